"""Random calls: what holds for any values of masks, lengths, offsets and windows."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

T, S, BATCH = 5, 7, 2
CELL = Cell(batch=(BATCH,), q=T, k=S, kv_heads=1, group=2, head_dim=8)
X = testing.random(CELL)
quick = settings(max_examples=60, deadline=None, derandomize=True)

sizes = st.integers(0, 8)


def lengths(limit: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, limit), min_size=BATCH, max_size=BATCH).map(lambda n: np.array(n, np.int32))


def ids(size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, 2), min_size=size, max_size=size).map(lambda row: np.array(row, np.int32))


bits = st.integers(0, 2 ** (T * S) - 1).map(lambda n: np.array([n >> i & 1 for i in range(T * S)], bool).reshape(T, S))


def float32_error() -> float:
    """The bound of unrestricted calls: a row that sees fewer keys sums less."""
    results = [(testing.attention(x), testing.rounded(x)) for x in (testing.random(CELL, seed) for seed in range(16))]
    return max(testing.error_bound(e, r, "float32", 3) for pair in results for e, r in zip(*pair, strict=True))


FLOAT32_ERROR = float32_error()


@jax.jit
def bounded(left, right, q_offset, q_lengths, kv_lengths, q_segment_ids, kv_segment_ids, mask):
    """One compiled program for all values."""
    return jax_fa4.attention(
        **X,
        window=(left, right),
        q_offset=q_offset,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        mask=mask,
        return_lse=True,
    )


@quick
@given(sizes, sizes, st.integers(-6, 8), lengths(T), lengths(S), ids(T), ids(S), bits)
def test_all_restrictions_hold_at_once(left, right, q_offset, q_lengths, kv_lengths, q_ids, kv_ids, mask):
    out, lse = bounded(left, right, q_offset, q_lengths, kv_lengths, q_ids, kv_ids, mask)
    options = {
        "window": (left, right),
        "q_offset": np.int32(q_offset),
        "q_lengths": q_lengths,
        "kv_lengths": kv_lengths,
        "q_segment_ids": q_ids,
        "kv_segment_ids": kv_ids,
        "mask": mask,
    }
    exact = testing.attention(X, **options)
    np.testing.assert_allclose(out, exact.out, rtol=0, atol=FLOAT32_ERROR)
    np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=FLOAT32_ERROR)
    empty = ~testing.visible(X, **options).any(-1)
    assert not np.asarray(out)[np.swapaxes(empty, 1, 2)].any()
    assert (np.asarray(lse)[empty] == -np.inf).all()


@jax.jit
def biased(q, k, v, bias):
    return jax_fa4.attention(q, k, v, bias=bias, return_lse=True)


@quick
@given(st.permutations(range(S)), st.integers(0, 2**16))
def test_the_order_of_keys_does_not_matter(order, seed):
    x = testing.random(CELL, seed)
    order = np.array(order)
    bias = np.random.default_rng(seed).standard_normal((T, S)).astype(np.float32)
    out, lse = biased(x["q"], x["k"], x["v"], bias)
    other_out, other_lse = biased(x["q"], x["k"][:, order], x["v"][:, order], bias[:, order])
    np.testing.assert_allclose(out, other_out, rtol=0, atol=2 * FLOAT32_ERROR)
    np.testing.assert_allclose(lse, other_lse, rtol=0, atol=2 * FLOAT32_ERROR)


@quick
@given(st.integers(-16, 16), st.integers(0, 2**16))
def test_a_constant_added_to_a_row_moves_its_lse_alone(constant, seed):
    x = testing.random(CELL, seed)
    out, lse = biased(x["q"], x["k"], x["v"], np.zeros((T, S), np.float32))
    other_out, other_lse = biased(x["q"], x["k"], x["v"], np.full((T, S), constant, np.float32))
    rounding = abs(constant) * float(np.finfo(np.float32).eps)  # of a score: the constant takes away low bits
    np.testing.assert_allclose(out, other_out, rtol=0, atol=2 * FLOAT32_ERROR + 8 * rounding)
    np.testing.assert_allclose(lse + constant, other_lse, rtol=0, atol=2 * FLOAT32_ERROR + 2 * rounding)


@quick
@given(st.integers(0, S), st.integers(0, 2**16))
def test_two_parts_of_the_keys_combine_by_their_lse(cut, seed):
    x = testing.random(CELL, seed)
    hidden = [np.where(seen, 0, -np.inf).astype(np.float32) for seen in (np.arange(S) < cut, np.arange(S) >= cut)]
    parts = [biased(x["q"], x["k"], x["v"], np.broadcast_to(bias, (T, S))) for bias in hidden]
    whole, lse = biased(x["q"], x["k"], x["v"], np.zeros((T, S), np.float32))
    weights = [jnp.swapaxes(jnp.exp(part_lse - lse), 1, 2)[..., None] for _, part_lse in parts]
    combined = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(combined, whole, rtol=0, atol=3 * FLOAT32_ERROR)
    np.testing.assert_allclose(jnp.logaddexp(*(part_lse for _, part_lse in parts)), lse, rtol=0, atol=3 * FLOAT32_ERROR)
