"""Random packings: what holds for any offsets, lengths and windows, in one compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jax_fa4
from jax_fa4 import testing

T, S, SEQUENCES = 14, 17, 4
quick = settings(max_examples=60, deadline=None, derandomize=True)


def random_call(packed, seed=0):
    return packed(T, S, seed, group=2)


def offsets(total):
    return st.lists(st.integers(0, total), min_size=SEQUENCES + 1, max_size=SEQUENCES + 1).map(
        lambda cuts: np.sort(np.array(cuts, np.int32))
    )


def lengths(limit):
    return st.lists(st.integers(0, limit), min_size=SEQUENCES, max_size=SEQUENCES).map(
        lambda sizes: np.array(sizes, np.int32)
    )


windows = st.integers(0, 9)


@jax.jit
def results(arrays, values):
    """out and lse, and the gradients of a weighted sum of both."""

    def weighted(arrays):
        out, lse = jax_fa4.attention_varlen(*arrays, **values, return_lse=True)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return (out * weights).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum(), (out, lse)

    gradients, (out, lse) = jax.grad(weighted, has_aux=True)(arrays)
    return out, lse, gradients


@pytest.fixture(scope="module")
def bound(packed) -> dict[str, float]:
    """Errors of results and gradients without any bound: a row that sees fewer keys sums less."""
    whole = {"cu_seqlens_q": [0, T], "cu_seqlens_kv": [0, S]}
    rows = np.cos(np.arange(T * 4 * 8)).reshape(T, 4, 8), np.ones((4, T))

    def largest(exact, rounded):
        calls = [random_call(packed, seed) | whole for seed in range(8)]
        pairs = [zip(exact(x), rounded(x), strict=True) for x in calls]
        return max(testing.error_bound(*pair, "float32", 3) for each in pairs for pair in each)

    return {
        "results": largest(testing.attention_varlen, lambda x: testing.attention_varlen(x, testing.rounded)),
        "gradients": largest(
            lambda x: testing.gradients_varlen(x, *rows).values(),
            lambda x: testing.gradients_varlen(x, *rows, testing.rounded_gradients).values(),
        ),
    }


def packing(q_offsets, kv_offsets, q_lengths=(99,) * SEQUENCES, kv_lengths=(99,) * SEQUENCES, window=(9, 9)):
    """One that is tried whatever the strategies find; lengths of 99 leave no gap."""
    return example(*(np.array(x, np.int32) for x in (q_offsets, kv_offsets, q_lengths, kv_lengths)), *window)


@quick
@packing([0, 0, 5, 5, T], [0, 4, 4, 9, S])  # no queries, no keys
@packing([0, 1, 2, 13, T], [0, 1, 9, 10, S], window=(0, 0))  # one query, one key, both
@packing([3, 3, 3, 3, 3], [S] * 5)
@packing([0, 4, 8, 11, T], [0, 5, 9, 12, S], [2, 0, 1, 3], [1, 4, 0, 2])  # gaps behind every sequence
@packing([2, 4, 6, 8, 10], [5, 6, 9, 10, 12])  # rows in front of the first sequence and behind the last
@packing([0, 0, 0, 0, T], [0, 0, 0, 0, S], [1] * SEQUENCES, [0, 0, 0, 1])
@given(offsets(T), offsets(S), lengths(9), lengths(9), windows, windows)
def test_every_packing_is_its_sequences(packed, bound, q_offsets, kv_offsets, q_lengths, kv_lengths, left, right):
    x = random_call(packed)
    values = {
        "cu_seqlens_q": q_offsets,
        "cu_seqlens_kv": kv_offsets,
        "q_lengths": q_lengths,
        "kv_lengths": kv_lengths,
        "window": (left, right),
    }
    out, lse, gradients = results((x["q"], x["k"], x["v"]), values)
    exact = testing.attention_varlen(x | values)
    np.testing.assert_allclose(out, exact.out, rtol=0, atol=bound["results"])
    np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=bound["results"])
    dout = np.cos(np.arange(out.size)).reshape(out.shape)
    expected = testing.gradients_varlen(x | values, dout, np.ones(lse.shape))
    for ours, name in zip(gradients, "qkv", strict=True):
        np.testing.assert_allclose(ours, expected[name], rtol=0, atol=bound["gradients"])
        assert np.array_equal(ours == 0, expected[name] == 0)  # exactly zero where the definition is
