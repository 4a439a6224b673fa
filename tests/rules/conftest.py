"""What tests of the rules share: a look into jaxprs, a comparison, and attention written out for autodiff."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.cubins import Cubin
from jax_fa4.rules import cuda


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """These programs run once: half of the time goes if XLA optimises them less."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program holds of a kernel is its name."""

    def named(config: Any) -> Cubin:
        key, sizes = f"{abs(hash(config)):064x}", {"smem_bytes": config.smem_bytes, "threads": config.threads}
        names = {"key": key, "recipe": key, "entry": config.name, "arch": config.arch, "config": repr(config)}
        return Cubin(**names, **sizes, dsl_version="", params=(), image=b"", ptx_zlib=b"")

    monkeypatch.setattr(cuda.cubins, "get", named)
    monkeypatch.setattr(cuda.cubins, "check_params", lambda cubin, launch: None)
    monkeypatch.setattr(cuda.cubins, "register", lambda cubin: None)


@pytest.fixture
def equations() -> Callable[..., list[Any]]:
    """equations(name, function, *args): those of that primitive in the function's jaxpr, nested ones included."""
    return lambda name, function, *args: [
        e for e in _equations(jax.make_jaxpr(function)(*args).jaxpr) if e.primitive.name == name
    ]


@pytest.fixture
def runs(equations: Callable[..., list[Any]]) -> Callable[..., dict[str, int]]:
    """runs(function, *args): how many forwards, backwards and tangents of attention the function runs."""
    return lambda function, *args: {
        name: len(equations(f"jax_fa4_{name}", function, *args)) for name in ("forward", "backward", "tangent")
    }


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for nested in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(nested, "eqns"):
                yield from _equations(getattr(nested, "jaxpr", nested))


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """assert_close(actual, wanted): equal trees of float32 arrays, up to another order of the same sums."""

    def compare(actual: Any, wanted: Any, rtol: float = 1e-4) -> None:
        assert jax.tree.structure(actual) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert a.shape == b.shape
            size = np.abs(b[np.isfinite(b)]).max(initial=1)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * size)

    return compare


@pytest.fixture
def written_out() -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Attention with the whole score matrix, which JAX differentiates as often as it likes."""
    return _written_out


def _written_out(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible: Any = True,
    softmax_scale: Any = 1.0,
    softcap: Any = None,
    sinks: Any = None,
    bias: Any = 0,
) -> tuple[jax.Array, jax.Array]:
    """out [*B, T, N, E] and lse [*B, N, T] where every row sees a key or has a sink; visible, bias [*B, N, T, S]."""
    k, v = (jnp.repeat(a, q.shape[-2] // a.shape[-2], axis=-2) for a in (k, v))
    s = softmax_scale * jnp.einsum("...tnd,...snd->...nts", q, k)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(visible, s + bias, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))
        s = jnp.concatenate([s, sink], axis=-1)
        v = jnp.concatenate([v, jnp.zeros_like(v[..., :1, :, :])], axis=-3)
    lse = jax.nn.logsumexp(s, axis=-1)
    return jnp.einsum("...nts,...sne->...tne", jnp.exp(s - lse[..., None]), v), lse
