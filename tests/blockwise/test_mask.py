"""A block's visibility against the mask written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.blockwise.mask import seen_keys, spans, visible
from jax_fa4.testing import Cell

CELLS = [
    Cell(q=7, k=9, causal=True),
    Cell(q=9, k=7, causal=True),
    Cell(q=9, k=9, window=(3, 1)),
    Cell(q=9, k=9, window=(None, 2)),
    Cell(q=5, k=11, window=(0, None), q_offset=-2),
    Cell(q=6, k=10, window=(2, 2), q_offset=5),
    Cell(q=7, k=9, q_lengths=(3, 0)),
    Cell(q=7, k=9, kv_lengths=(0, 5)),
    Cell(q=7, k=9, q_lengths=(7, 4), kv_lengths=(6, 9), causal=True),
    Cell(q=7, k=9, segments=3),
    Cell(q=7, k=9, mask="full"),
    Cell(q=7, k=9, mask="keys", group=2),
    Cell(q=7, k=9, mask="shared", causal=True, segments=2, kv_lengths=(9, 3), batch=(2, 1), group=3),
    Cell(q=3, k=9, mask="shared", batch=()),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_blocks_joined_are_the_mask_written_out(cell, operands):
    x, blocks = operands(cell), Blocks.of(cell.keys)
    shape = (*cell.batch, cell.kv_heads, cell.group, cell.q, blocks.size)

    @jax.jit
    def joined(x):
        parts = [jnp.broadcast_to(visible(x, spans(x), blocks, first), shape) for first in blocks.firsts]
        return blocks.join(jnp.stack(parts), axis=-1).reshape(*cell.batch, cell.heads, cell.q, cell.keys)

    np.testing.assert_array_equal(joined(x), testing.visible(testing.random(cell)))


def test_nothing_is_masked_without_bounds_and_remainder(operands):
    x, blocks = operands(Cell(q=7, k=8)), Blocks.of(8)
    assert visible(x, spans(x), blocks, blocks.firsts[1]) is None


def test_the_largest_integers_are_no_bound(operands):
    largest = jnp.int32(2**31 - 1)
    x = operands(Cell(q=7, k=4))._replace(window_left=largest, window_right=largest)
    blocks = Blocks.of(4)
    for q_offset in (None, -100, 100):
        at = None if q_offset is None else jnp.full(2, q_offset, jnp.int32)
        at_offset = x._replace(q_offset=at)
        assert visible(at_offset, spans(at_offset), blocks, jnp.int32(0)).all()


def test_an_extreme_offset_does_not_wrap_around(operands):
    blocks = Blocks.of(4)
    x = operands(Cell(q=7, k=4, causal=True))
    far, before = (x._replace(q_offset=jnp.full(2, offset, jnp.int32)) for offset in (2**31 - 1, -(2**31)))
    assert visible(far, spans(far), blocks, jnp.int32(0)).all()
    assert not visible(before, spans(before), blocks, jnp.int32(0)).any()


def test_a_key_is_seen_if_any_query_of_any_head_of_its_group_sees_it():
    see = jnp.zeros((2, 3, 2, 5, 4), bool).at[1, 2, 1, 3, 0].set(True)
    seen = seen_keys(see)
    assert seen.shape == (2, 4, 3, 1)
    assert seen.sum() == 1
    assert seen[1, 0, 2, 0]
