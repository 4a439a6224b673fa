"""`jax_fa4.testing` itself: the reference must be right on its own evidence."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.testing import Cell

CELLS = [
    Cell(q=3, k=5, group=2, causal=True, head_dim_v=8),
    Cell(q=5, k=3, causal=True, sinks=True, softmax_scale=0.4, layout="BNTH"),
    Cell(q=4, k=6, softcap=1.5, bias="keys", window=(1, 2), batch=(2, 1)),
    Cell(q=4, q_offset=-1, causal=True, bias="shared", mask="full", batch=()),
    Cell(q=4, k=5, segments=2, bias="full", sinks=True, q_lengths=(4, 2), kv_lengths=(0, 5)),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_the_slopes_of_the_forward(cell):
    cell = dataclasses.replace(cell, dtype="float64")
    x = {"softmax_scale": 0.25, **testing.random(cell)}
    rng = np.random.default_rng(1)
    forward = testing.attention(x)
    dout, live = rng.standard_normal(forward.out.shape), np.isfinite(forward.lse)
    dlse = np.where(live, rng.standard_normal(live.shape), 0)
    gradients = testing.gradients(x, dout, dlse)
    step = 1e-4

    def loss(name: str, change: np.ndarray) -> float:
        out, lse = testing.attention({**x, name: np.asarray(x[name], np.float64) + change})
        return (out * dout).sum() + (np.where(live, lse, 0) * dlse).sum()

    for name, gradient in gradients.items():
        direction = rng.standard_normal(np.shape(x[name]))
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6, err_msg=name)


def test_attention_is_its_definition():
    x = testing.random(Cell(q=2, k=3, kv_heads=1, group=2, head_dim=8))
    out, lse = testing.attention(x)
    for b, t, h in np.ndindex(2, 2, 2):
        scores = [float(np.dot(x["q"][b, t, h].astype(float), x["k"][b, j, 0])) / 8**0.5 for j in range(3)]
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[b, t, h], weights @ x["v"][b, :, 0], rtol=1e-12)
        np.testing.assert_allclose(lse[b, h, t], np.log(np.exp(scores).sum()), rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"causal": True}, ["xx.", "xxx"]),
        ({"window": (0, 0)}, [".x.", "..x"]),
        ({"window": (1, None), "q_offset": 0}, ["xxx", "xxx"]),
        ({"window": (0, 1), "q_offset": 0}, ["xx.", ".xx"]),
        ({"causal": True, "q_offset": -1}, ["...", "x.."]),
        ({"causal": True, "kv_lengths": np.array(2)}, ["x..", "xx."]),
        ({"causal": True, "q_lengths": np.array(1)}, ["xxx", "..."]),
    ],
    ids=str,
)
def test_the_keys_that_two_queries_see_of_three(options, rows):
    x = testing.random(Cell(q=2, k=3, kv_heads=1, batch=()))
    seen = testing.visible(x, **options)[0]
    assert ["".join("x" if key else "." for key in row) for row in seen] == rows


def test_inputs_differ_everywhere():
    x = testing.random(Cell(batch=(3,), q=5, k=6, dtype="bfloat16"), seed=3)
    for array in x.values():
        assert len(np.unique(array.reshape(-1, array.shape[-1]), axis=0)) == np.prod(array.shape[:-1])
    assert not np.array_equal(x["q"], testing.random(Cell(batch=(3,), q=5, k=6, dtype="bfloat16"), seed=4)["q"])


def test_inputs_hold_the_options_of_the_cell_and_no_others():
    assert set(testing.random(Cell())) == {"q", "k", "v"}
    x = testing.random(Cell(causal=True, sinks=True, q_lengths=(1, 2), layout="BNTH"))
    assert set(x) == {"q", "k", "v", "causal", "sinks", "q_lengths", "layout"}


def test_a_cell_reads_as_a_test_id():
    assert str(Cell(head_dim=128, group=2, causal=True)) == "d128-h4.2-q7-k7-causal"
    assert str(Cell(batch=(), q=1, k=9, head_dim_v=8, dtype="float16")) == "unbatched-d16.8-h2.2-q1-k9-float16"
    assert str(Cell(window=(3, None), softcap=2.0, sinks=True)) == "d16-h2.2-q7-k7-window3.inf-softcap2.0-sinks"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounded_values_are_off_by_about_the_dtype(dtype):
    x = testing.random(Cell(q=16, k=32, dtype=dtype))
    error = np.abs(testing.rounded(x).out.astype(float) - testing.attention(x).out).max()
    eps = float(ml_dtypes.finfo(testing.np_dtype(dtype)).eps)
    assert eps / 8 < error < 8 * eps


def test_the_bound_is_the_rounded_error_and_two_units_in_the_last_place():
    exact, rounded = np.array([1.5, -3.0, -np.inf]), np.array([1.5, -3.125, -np.inf])
    assert testing.error_bound(exact, rounded, "bfloat16") == 2 * 0.125 + 2 * 2**-6
    assert testing.error_bound(exact, rounded, "float32", factor=3) == 3 * 0.125 + 2 * 2**-22
    assert testing.error_bound(exact[2:], rounded[2:], "float32") == 0


def test_a_tile_of_small_values_has_a_bound_of_its_own():
    exact = np.ones((2, 4096))
    exact[1] = 0.01
    rounded = exact * np.where(np.arange(4096) % 2, 1.01, 0.99)
    assert testing.error_ratio(rounded, exact, rounded, "bfloat16") <= 0.5
    got = exact.copy()
    got[1] = 0  # within the largest error of all, but all of that tile
    assert np.abs(got - exact).max() <= testing.error_bound(exact, rounded, "bfloat16")
    assert testing.error_ratio(got, exact, rounded, "bfloat16") > 10


def test_an_error_of_one_element_counts_as_much_as_it_may_be():
    exact, rounded = np.array([1.5, -3.0, -np.inf]), np.array([1.5, -3.125, -np.inf])
    got = np.array([1.5, -3.0 + 0.28125, -np.inf])
    assert testing.error_ratio(got, exact, rounded, "bfloat16") == 1
    assert testing.error_ratio(exact[2:], exact[2:], rounded[2:], "bfloat16") == 0
