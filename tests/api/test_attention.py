"""`attention` against its definition: out, lse and every gradient, over all pairs of features."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

from ..pairwise import pairwise

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTHS = {"square": (7, 7), "decode": (1, 9), "tall": (9, 5), "two-blocks": (5, 261)}
FACTORS: dict[str, tuple[Any, ...]] = {
    "lengths": tuple(LENGTHS),
    "bounds": ("none", "causal", "window", "causal-left"),
    "q_offset": (None, -1, 3),
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ((1, 1), (2, 1), (1, 3), (2, 2)),  # kv_heads, group
    "head_dims": ((16, None), (8, 24), (24, 8)),
    "batch": ((2,), (), (2, 1, 2)),
    "layout": ("BTNH", "BNTH"),
    "softmax_scale": (None, 0.7),
    "softcap": (None, 2.5),
    "sinks": (False, True),
    "bias": (None, "full", "keys", "shared"),
    "mask": (None, "full", "keys", "shared"),
    "segments": (None, 2),
    "padding": ("none", "queries", "keys", "both"),
}


def cell_of(row: dict[str, Any]) -> Cell:
    row = dict(row)
    q, k = LENGTHS[row.pop("lengths")]
    (kv_heads, group), (head_dim, head_dim_v) = row.pop("heads"), row.pop("head_dims")
    bounds, padding, entries = row.pop("bounds"), row.pop("padding"), int(np.prod(row["batch"]))
    return Cell(
        q=q,
        k=k,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=bounds in ("causal", "causal-left"),
        window={"window": (3, 1), "causal-left": (2, None)}.get(bounds, (None, None)),
        q_lengths=tuple(max(0, q - 2 * i) for i in range(entries)) if padding in ("queries", "both") else None,
        kv_lengths=tuple(max(0, k - 3 * i) for i in range(entries)) if padding in ("keys", "both") else None,
        **row,
    )


CELLS = [cell_of(row) for row in pairwise(FACTORS)]


DRAWS = 8  # of inputs that a bound is measured on: by chance the error of a single number may be far too small


class Values(NamedTuple):
    """What one call gives, as numpy arrays by name."""

    forward: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def inputs(cell: Cell, seed: int = 0) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Arguments, and cotangents of out and lse; those of lse are 0 in rows without a key."""
    x, rng = testing.random(cell, seed), np.random.default_rng(1000 + seed)
    exact = testing.attention(x)
    dout, dlse = rng.standard_normal(exact.out.shape), rng.standard_normal(exact.lse.shape)
    return x, dout.astype(x["q"].dtype), np.where(np.isfinite(exact.lse), dlse, 0).astype(np.float32)


@functools.cache
def computed(cell: Cell) -> Values:
    """out, lse and all gradients of the cell, from one jitted program."""
    x, dout, dlse = inputs(cell)
    x = {"softmax_scale": cell.head_dim**-0.5, **x}
    wrt = {
        name: jnp.asarray(x[name]) for name in ("q", "k", "v", "softmax_scale", "softcap", "sinks", "bias") if name in x
    }

    @jax.jit
    def program(wrt):
        results, pullback = jax.vjp(lambda wrt: jax_fa4.attention(**{**x, **wrt}, return_lse=True), wrt)
        return results, pullback((jnp.asarray(dout), jnp.asarray(dlse)))

    (out, lse), (gradients,) = jax.tree.map(np.asarray, program(wrt))
    return Values({"out": out, "lse": lse}, gradients)


@functools.cache
def references(cell: Cell) -> tuple[Values, Values]:
    """Exact values and those rounded as usual, of all draws: one more axis in front."""
    draws = [inputs(cell, seed) for seed in range(DRAWS)]
    exact = [Values(testing.attention(x)._asdict(), testing.gradients(x, dout, dlse)) for x, dout, dlse in draws]
    rounded = [
        Values(testing.rounded(x)._asdict(), testing.rounded_gradients(x, dout, dlse)) for x, dout, dlse in draws
    ]
    stack = functools.partial(jax.tree.map, lambda *values: np.stack(values))
    return stack(*exact), stack(*rounded)


def assert_close(name: str, value: np.ndarray, exact: np.ndarray, rounded: np.ndarray, dtype: Any, cell: Cell) -> None:
    bound = testing.error_bound(exact, rounded, dtype, factor=2 if cell.softcap is None else 3)
    error, expected = np.zeros(value.shape), exact[0]
    finite = np.isfinite(expected)
    assert (value[~finite] == expected[~finite]).all(), name
    error[finite] = np.abs(value[finite].astype(np.float64) - expected[finite])
    assert error.max(initial=0) <= bound, f"{name}: error {error.max():.3g} > bound {bound:.3g}"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_out_and_lse_are_as_exact_as_the_dtype_allows(cell):
    exact, rounded = references(cell)
    for name, value in computed(cell).forward.items():
        dtype = cell.dtype if name == "out" else "float32"
        assert_close(name, value, exact.forward[name], rounded.forward[name], dtype, cell)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_as_exact_as_the_dtype_allows(cell):
    exact, rounded = references(cell)
    for name, value in computed(cell).gradients.items():
        dtype = cell.dtype if name in ("q", "k", "v") else "float32"
        assert_close(name, value, exact.gradients[name], rounded.gradients[name], dtype, cell)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_results_have_the_documented_shapes_and_dtypes(cell):
    x, dout, dlse = inputs(cell)
    results = computed(cell)
    assert (results.forward["out"].shape, results.forward["out"].dtype) == (dout.shape, x["q"].dtype)
    assert (results.forward["lse"].shape, results.forward["lse"].dtype) == (dlse.shape, np.float32)
    for name, gradient in results.gradients.items():
        assert gradient.shape == np.shape(x.get(name, 0.0)), name
