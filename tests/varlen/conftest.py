"""Packed calls in blocks so small that short sequences have several, and a comparison with the definition."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.blockwise import blocks

DRAWS = 4  # of inputs that a bound is measured on: by chance the error of a few numbers may be far too small
DIFFERENTIABLE = ("q", "k", "v", "sinks")
Call = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    whole, blocks.BLOCK = blocks.BLOCK, 4
    yield
    blocks.BLOCK = whole


@pytest.fixture(scope="session")
def packed() -> Callable[..., Call]:
    """packed(total_q, total_kv, seed=0, **options): keyword arguments of `attention_varlen`, all rows different."""
    return _packed


@pytest.fixture(scope="session")
def check() -> Callable[..., dict[str, np.ndarray]]:
    """check(make) compares results and gradients of the call make(seed) with the definition, and returns them."""
    return _check


def _packed(
    total_q: int, total_kv: int | None = None, seed: int = 0, *, group: int = 1, dtype: Any = "float32", **options: Any
) -> Call:
    rng = np.random.default_rng(seed)
    total_kv = total_q if total_kv is None else total_kv
    shapes = {"q": (total_q, 2 * group, 16), "k": (total_kv, 2, 16), "v": (total_kv, 2, 8)}
    arrays = {name: rng.standard_normal(shape).astype(testing.np_dtype(dtype)) for name, shape in shapes.items()}
    integers = {name: np.asarray(value, np.int32) for name, value in options.items() if isinstance(value, list)}
    return {**arrays, **options, **integers}


def _check(make: Callable[[int], Call]) -> dict[str, np.ndarray]:
    calls = [make(seed) for seed in range(DRAWS)]
    exact = [_expected(x, testing.attention, testing.gradients) for x in calls]
    rounded = [_expected(x, testing.rounded, testing.rounded_gradients) for x in calls]
    results = _results(calls[0])
    for name, value in results.items():
        dtype = calls[0]["q"].dtype.name if name in ("out", "dq", "dk", "dv") else "float32"
        bound = testing.error_bound(*(np.stack([draw[name] for draw in some]) for some in (exact, rounded)), dtype, 3)
        np.testing.assert_allclose(value.astype(np.float64), exact[0][name], rtol=0, atol=bound, err_msg=name)
    return results


def _cotangents(x: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(len(x["q"]))
    (total, heads, _), dim = x["q"].shape, x["v"].shape[-1]
    dlse = rng.standard_normal((heads, total)).astype(np.float32)
    return rng.standard_normal((total, heads, dim)).astype(x["q"].dtype), dlse


def _expected(x: Call, forward: Callable[..., Any], gradients: Callable[..., Any]) -> dict[str, np.ndarray]:
    wrt = testing.gradients_varlen(x, *_cotangents(x), gradients)
    results = testing.attention_varlen(x, forward)._asdict()
    return results | {f"d{name}": wrt[name] for name in DIFFERENTIABLE if name in x}


def _results(x: Call) -> dict[str, np.ndarray]:
    wrt = {name: jnp.asarray(x[name]) for name in DIFFERENTIABLE if name in x}
    results, pullback = jax.vjp(lambda wrt: jax_fa4.attention_varlen(**{**x, **wrt}, return_lse=True), wrt)
    (gradients,) = pullback(tuple(map(jnp.asarray, _cotangents(x))))
    named = {"out": results[0], "lse": results[1], **{f"d{name}": gradient for name, gradient in gradients.items()}}
    return jax.tree.map(np.asarray, named)
