"""`check`: out, lse and all gradients of one call against the definition."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

DRAWS = 4  # of inputs that a bound is measured on: by chance the error of a few numbers may be far too small
Check = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def check() -> Check:
    """check(cell, **options) runs `attention(**random(cell), **options)`, compares, and returns the results by name."""
    return _check


def _check(cell: Cell, **options: Any) -> dict[str, np.ndarray]:
    draws = [_with_cotangents(cell, seed, options) for seed in range(DRAWS)]
    exact = [testing.attention(x)._asdict() | _named(testing.gradients(x, *d)) for x, *d in draws]
    rounded = [testing.rounded(x)._asdict() | _named(testing.rounded_gradients(x, *d)) for x, *d in draws]
    results = _results(*draws[0])
    for name, value in results.items():
        dtype = cell.dtype if name in ("out", "dq", "dk", "dv") else "float32"
        bound = testing.error_bound(*(np.stack([draw[name] for draw in some]) for some in (exact, rounded)), dtype, 3)
        np.testing.assert_allclose(value.astype(np.float64), exact[0][name], rtol=0, atol=bound, err_msg=name)
    return results


def _with_cotangents(cell: Cell, seed: int, options: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    x, rng = {**testing.random(cell, seed), **options}, np.random.default_rng(seed)
    out, lse = testing.attention(x)
    dlse = np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0).astype(np.float32)
    return x, rng.standard_normal(out.shape).astype(x["q"].dtype), dlse


def _results(x: dict[str, Any], dout: np.ndarray, dlse: np.ndarray) -> dict[str, np.ndarray]:
    wrt = {name: jnp.asarray(x[name]) for name in ("q", "k", "v", "sinks", "bias") if name in x}
    (out, lse), pullback = jax.vjp(lambda wrt: jax_fa4.attention(**{**x, **wrt}, return_lse=True), wrt)
    (gradients,) = pullback((jnp.asarray(dout), jnp.asarray(dlse)))
    return jax.tree.map(np.asarray, {"out": out, "lse": lse, **_named(gradients)})


def _named(gradients: dict[str, Any]) -> dict[str, Any]:
    return {f"d{name}": gradient for name, gradient in gradients.items()}
