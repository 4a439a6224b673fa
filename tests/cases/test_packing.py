"""Several sequences in a row, masks of padded batches, and results that are put together again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_packed_sequences_are_as_if_alone():
    lengths, padding = (3, 1, 4), 2
    total = sum(lengths) + padding
    x = testing.random(Cell(batch=(1,), q=total, k=total, group=2))
    ids = np.repeat([1, 2, 3, 0], (*lengths, padding))[None]
    packed = jax_fa4.attention(**x, causal=True, q_segment_ids=ids, kv_segment_ids=ids)
    start = 0
    for length in lengths:
        part = {name: a[:, start : start + length] for name, a in x.items()}
        alone = testing.attention(part, causal=True).out
        np.testing.assert_allclose(packed[:, start : start + length], alone, rtol=0, atol=1e-6)
        start += length


@pytest.mark.parametrize("seed", range(3))
def test_rows_pack_each_their_own_segments(check, seed):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 4, (2, 8)), axis=1)
    results = check(Cell(q=8, k=8, causal=True), q_segment_ids=ids, kv_segment_ids=ids)
    assert np.isfinite(results["lse"]).all()  # every query sees at least itself


def test_a_segment_without_keys_leaves_its_queries_empty(check):
    results = check(Cell(q=4, k=5), q_segment_ids=np.array([0, 1, 7, 7]), kv_segment_ids=np.array([0, 0, 1, 1, 1]))
    assert not results["out"][:, 2:].any()


def test_a_mask_of_keys_broadcasts_over_heads_and_queries(check):
    mask = np.arange(6)[None, None, None] < np.array([4, 6])[:, None, None, None]  # [B, 1, 1, S]
    by_mask, by_lengths = check(Cell(q=5, k=6), mask=mask), check(Cell(q=5, k=6), kv_lengths=np.array([4, 6]))
    np.testing.assert_array_equal(by_mask["out"], by_lengths["out"])


def test_lengths_keep_padding_out_of_every_batch_entry(check):
    lengths = np.array([2, 12, 5, 8])
    results = check(Cell(batch=(4,), q=12, k=12, head_dim=8), kv_lengths=lengths)
    for b, length in enumerate(lengths):
        assert not results["dv"][b, length:].any()
        assert results["dv"][b, :length].any()


def test_parts_that_are_combined_by_lse_have_the_gradients_of_the_whole():
    """As ring attention does: every part on its own, put together by lse, differentiated through both results."""
    x = testing.random(Cell(q=4, k=8, group=2))

    def whole(q, k, v):
        return jax_fa4.attention(q, k, v)

    def ring(q, k, v):
        parts = [jax_fa4.attention(q, k[:, i::2], v[:, i::2], return_lse=True) for i in range(2)]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        return sum(out * jnp.swapaxes(jnp.exp(part - lse), 1, 2)[..., None] for out, part in parts)

    arrays = [jnp.asarray(a) for a in x.values()]
    gradients, other = (jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(*arrays) for f in (whole, ring))
    for a, b in zip(gradients, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
