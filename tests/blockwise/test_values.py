"""Values at the edges: rows without a key, unused memory, extreme scores, 16-bit operands."""

import jax
import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.blockwise import Results
from jax_fa4.testing import Cell

WRT = ("q", "k", "v")


@pytest.fixture
def both(forward, backward):
    """both(x): the results, and the gradients of q, k and v for cotangents of 1."""

    def run(x):
        saved = forward(x)
        return saved, backward(x, saved, ones_like(saved), *WRT)

    return run


def ones_like(saved):
    return Results(*(np.ones(a.shape, a.dtype) for a in saved))


def test_rows_before_the_first_key_are_zero_with_zero_gradients(operands, both):
    (out, lse), gradients = both(operands(Cell(q=9, k=5, causal=True)))
    assert (out[:, :4] == 0).all()
    assert (lse[..., :4] == -np.inf).all()
    assert np.isfinite(lse[..., 4:]).all()
    assert (gradients["q"][:, :4] == 0).all()
    assert all(np.isfinite(g).all() for g in gradients.values())


def test_a_row_without_a_key_has_its_sink_as_lse_and_a_padded_one_has_nothing(operands, both):
    x = operands(Cell(q=5, k=6, kv_lengths=(0, 6), q_lengths=(5, 3), sinks=True))
    (out, lse), gradients = both(x)
    assert (out[0] == 0).all()
    np.testing.assert_array_equal(lse[0], np.broadcast_to(x.sinks[0][:, None], lse[0].shape))
    assert (out[1, 3:] == 0).all()
    assert (lse[1, :, 3:] == -np.inf).all()
    assert (gradients["q"][0] == 0).all()
    assert (gradients["q"][1, 3:] == 0).all()


def test_a_whole_row_of_minus_infinity_bias_is_a_row_without_a_key(operands, both):
    x = operands(Cell(q=5, k=6, bias="full"))
    (out, lse), gradients = both(x._replace(bias=np.where(np.arange(5)[:, None] == 2, -np.inf, x.bias)))
    assert (out[:, 2] == 0).all()
    assert (lse[..., 2] == -np.inf).all()
    assert (gradients["q"][:, 2] == 0).all()
    assert all(np.isfinite(g).all() for g in gradients.values())


PADDED = {
    "lengths": Cell(q=5, k=11, kv_lengths=(6, 0), q_lengths=(3, 5)),
    "segments": Cell(q=5, k=11, segments=2),
    "mask": Cell(q=5, k=11, mask="keys"),
    "cache": Cell(q=2, k=11, causal=True, q_offset=3),
}


def unused(cell):
    """Which keys [B, S] no query sees, and which queries [B, T] see no key."""
    see = testing.visible(testing.random(cell))
    return ~see.any(axis=(1, 2)), ~see.any(axis=(1, 3))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("cell", PADDED.values(), ids=PADDED)
def test_what_no_query_sees_may_hold_anything(cell, garbage, operands, both):
    x = operands(cell)
    if cell.segments:
        x.kv_segment_ids[:, 7:] = 9  # a segment without queries
        keys, queries = np.tile(np.arange(11) >= 7, (2, 1)), np.zeros((2, 5), bool)
    else:
        keys, queries = unused(cell)

    def spoil(a, where):
        return np.where(where[..., None, None], np.float32(garbage), a)

    dirty = x._replace(q=spoil(x.q, queries), k=spoil(x.k, keys), v=spoil(x.v, keys))
    (results, gradients), (dirty_results, dirty_gradients) = both(x), both(dirty)
    jax.tree.map(np.testing.assert_array_equal, dirty_results, results)
    jax.tree.map(np.testing.assert_array_equal, dirty_gradients, gradients)
    assert (gradients["k"][keys] == 0).all()
    assert (gradients["v"][keys] == 0).all()
    assert (gradients["q"][queries] == 0).all()


def test_cotangents_of_rows_without_a_key_may_hold_anything(operands, forward, backward):
    x = operands(Cell(q=9, k=5, causal=True))
    saved = forward(x)
    ones, dirty = ones_like(saved), ones_like(saved)
    dirty.out[:, :4] = dirty.lse[..., :4] = np.nan
    jax.tree.map(np.testing.assert_array_equal, backward(x, saved, dirty, *WRT), backward(x, saved, ones, *WRT))


@pytest.mark.parametrize("sink", [-np.inf, 1e30])
def test_a_sink_far_from_all_scores_is_everything_or_nothing(sink, operands, both):
    x = operands(Cell(q=5, k=9))
    (out, lse), gradients = both(x._replace(sinks=np.full((1, 2), sink)))
    (plain_out, plain_lse), _ = both(x)
    np.testing.assert_allclose(out, 0 if sink > 0 else plain_out, rtol=1e-6)
    np.testing.assert_allclose(lse, sink if sink > 0 else plain_lse, rtol=1e-6)
    assert all(np.isfinite(g).all() for g in gradients.values())


@pytest.mark.parametrize("shift", [-100, 100])
def test_a_shift_of_all_scores_moves_lse_alone(shift, operands, both):
    x = operands(Cell(q=5, k=9, dtype="float64", bias="full"))
    (out, lse), gradients = both(x)
    (shifted_out, shifted_lse), shifted_gradients = both(x._replace(bias=x.bias + shift))
    np.testing.assert_allclose(shifted_out, out, rtol=1e-11)
    np.testing.assert_allclose(shifted_lse, lse + shift, rtol=1e-11)
    for name in WRT:
        np.testing.assert_allclose(shifted_gradients[name], gradients[name], atol=1e-11)


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_scores_of_any_size_keep_everything_finite(scale, operands, both):
    x = operands(Cell(q=5, k=9, causal=True))
    results, gradients = both(x._replace(softmax_scale=np.asarray(scale)))
    assert all(np.isfinite(a).all() for a in (*results, *gradients.values()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_operands_are_summed_in_float32(dtype, operands, both):
    cell = Cell(q=33, k=65, head_dim=64, group=2, causal=True, dtype=dtype)
    x, numbers = operands(cell), testing.random(cell)
    saved, gradients = both(x)
    assert saved.out.dtype == x.q.dtype
    assert saved.lse.dtype == np.float32
    ones = [np.ones(a.shape) for a in saved]
    exact, rounded = testing.attention(numbers), testing.rounded(numbers)
    for name in ("out", "lse"):
        wanted, error = getattr(exact, name), np.asarray(getattr(saved, name), np.float64)
        bound = testing.error_bound(wanted, getattr(rounded, name), dtype if name == "out" else "float32")
        assert abs(error - wanted).max() <= bound
    wanted, rough = testing.gradients(numbers, *ones), testing.rounded_gradients(numbers, *ones)
    for name in WRT:
        error = abs(np.asarray(gradients[name], np.float64) - wanted[name]).max()
        assert error <= testing.error_bound(wanted[name], rough[name], dtype)
