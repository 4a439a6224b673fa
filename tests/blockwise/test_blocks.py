"""The cut of an axis against a plain loop over its indices."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.blockwise.blocks import Blocks

LENGTHS = [0, 1, 3, 4, 5, 8, 9, 11, 23]


def owned(blocks: Blocks) -> list[int]:
    return [int(index) for first in blocks.firsts for index in blocks.indices(first) if index >= first]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_index_belongs_to_exactly_one_block(length):
    assert owned(Blocks.of(length)) == list(range(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_no_block_is_larger_than_the_limit_or_reaches_past_the_end(length):
    blocks = Blocks.of(length)
    assert blocks.size <= 4
    assert all(blocks.indices(first).max() < length for first in blocks.firsts)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("length", LENGTHS)
def test_joined_slices_are_the_array(length, axis):
    shape = [2, 3, 5]
    shape[axis] = length
    whole = jnp.arange(np.prod(shape)).reshape(shape)
    blocks = Blocks.of(length)
    parts = [blocks.slice(whole, first, axis=axis) for first in blocks.firsts]
    stacked = jnp.stack(parts) if parts else jnp.zeros((0, *shape), whole.dtype)
    np.testing.assert_array_equal(blocks.join(stacked, axis=axis), whole)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_blocks_consist_of_whole_steps(steps, step):
    blocks = Blocks.of(steps * step, step)
    assert owned(blocks) == list(range(steps * step))
    assert blocks.size <= max(4, step)
    assert all(int(n) % step == 0 for n in (blocks.size, *map(blocks.start, blocks.firsts)))
