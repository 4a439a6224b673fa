"""Windows and causal masks: where they are, and that nothing is bounded silently or by accident."""

import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    "cell",
    [
        Cell(q=6, k=6, window=(2, 0)),
        Cell(q=9, k=4, window=(3, 5)),  # the first queries stand before the first key
        Cell(q=4, k=9, causal=True, window=(2, None)),
        Cell(q=6, k=6, head_dim=192, window=(2, 1), kv_heads=1),
        Cell(q=6, k=6, head_dim=256, window=(3, 0), kv_heads=1, dtype="bfloat16"),
        Cell(q=3, k=600, window=(4, 0), kv_heads=1),  # whole key blocks lie left of every window
        Cell(q=2, k=600, window=(None, 0), q_offset=3, kv_heads=1),  # ... or right of it
    ],
    ids=str,
)
def test_a_window_is_where_the_definition_puts_it(check, cell):
    results = check(cell)
    assert all(np.isfinite(value).all() for name, value in results.items() if name != "lse")


def test_a_window_bounds_without_causal_too():
    x = testing.random(Cell(q=8, k=8))
    changed = {**x, "k": x["k"].copy(), "v": x["v"].copy()}
    changed["k"][:, 5:], changed["v"][:, 5:] = 7.0, -7.0
    out, other = (jax_fa4.attention(**y, window=(3, 0)) for y in (x, changed))
    np.testing.assert_array_equal(out[:, :5], other[:, :5])  # the future is not attended to
    assert (np.abs(out[:, 5:] - other[:, 5:]).max((1, 2, 3)) > 1).all()


def test_windows_of_other_sizes_give_other_results():
    x = testing.random(Cell(q=8, k=10))
    a, b, c = (jax_fa4.attention(**x, window=window) for window in ((0, 3), (0, 0), (None, None)))
    assert np.abs(a - b).max() > 0.1
    assert np.abs(a - c).max() > 0.1


def test_causal_with_an_unbounded_window_is_causal():
    x = testing.random(Cell(q=6, k=6))
    np.testing.assert_array_equal(
        jax_fa4.attention(**x, causal=True, window=(None, 0)), jax_fa4.attention(**x, causal=True)
    )


def test_minus_one_is_refused_instead_of_hiding_everything():
    with pytest.raises(ValueError, match="None is unbounded"):
        jax_fa4.attention(**testing.random(Cell()), causal=True, window=(-1, 0))


def test_the_last_query_stands_at_the_last_key_of_its_sequence(check):
    results = check(Cell(q=4, k=7, causal=True, q_lengths=(3, 4), kv_lengths=(5, 7)))
    x = testing.random(Cell(q=4, k=7))
    full = testing.attention({"q": x["q"][:1, 2:3], "k": x["k"][:1, :5], "v": x["v"][:1, :5]})
    np.testing.assert_allclose(results["out"][0, 2], full.out[0, 0], atol=1e-6)
