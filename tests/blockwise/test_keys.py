"""The cut of the key axis against a plain loop over keys."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.blockwise.keys import KeyBlocks

LENGTHS = [0, 1, 3, 4, 5, 8, 9, 11, 23]


def own_keys(blocks: KeyBlocks) -> list[int]:
    return [int(key) for first in blocks.firsts for key in blocks.keys(first) if key >= first]


@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_every_key_belongs_to_exactly_one_block(seqlen_k):
    assert own_keys(KeyBlocks.of(seqlen_k)) == list(range(seqlen_k))


@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_no_block_is_larger_than_the_limit_or_reaches_past_the_keys(seqlen_k):
    blocks = KeyBlocks.of(seqlen_k)
    assert blocks.size <= 4
    assert all(blocks.keys(first).max() < seqlen_k for first in blocks.firsts)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_joined_slices_are_the_array(seqlen_k, axis):
    shape = [2, 3, 5]
    shape[axis] = seqlen_k
    whole = jnp.arange(np.prod(shape)).reshape(shape)
    blocks = KeyBlocks.of(seqlen_k)
    parts = [blocks.slice(whole, first, axis=axis) for first in blocks.firsts]
    stacked = jnp.stack(parts) if parts else jnp.zeros((0, *shape), whole.dtype)
    np.testing.assert_array_equal(blocks.join(stacked, axis=axis), whole)
