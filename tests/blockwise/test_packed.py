"""Where packed queries stand and which tiles they need, against loops over sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.blockwise.mask import if_seen, spans, visible
from jax_fa4.blockwise.packed import places, row_blocks, row_tile
from jax_fa4.operands import Operands

T, S = 18, 21
OFFSETS = [
    ([0, 5, 5, 12, 18], [0, 7, 9, 9, 21]),
    ([3, 3, 4, 9, 16], [2, 6, 6, 20, 20]),
    ([0, 18], [0, 21]),
    ([0], [0]),
]


def row(q_offsets, kv_offsets) -> Operands:
    """A causal call."""
    q, k = jnp.zeros((T, 1, 8)), jnp.zeros((S, 1, 8))
    offsets = {"cu_seqlens_q": jnp.asarray(q_offsets, jnp.int32), "cu_seqlens_kv": jnp.asarray(kv_offsets, jnp.int32)}
    return Operands(q, k, k, jnp.float32(1), window_right=jnp.int32(0), **offsets)


def written_out(q_offsets, kv_offsets) -> np.ndarray:
    """Causal visibility [T, S]."""
    see = np.zeros((T, S), bool)
    for q0, q1, k0, k1 in zip(q_offsets, q_offsets[1:], kv_offsets, kv_offsets[1:], strict=False):
        for query in range(q0, q1):
            for key in range(k0, k1):
                see[query, key] = key - k1 <= query - q1
    return see


@pytest.mark.parametrize(("q_offsets", "kv_offsets"), OFFSETS, ids=str)
def test_tiles_joined_are_the_mask_written_out(q_offsets, kv_offsets):
    x = row(q_offsets, kv_offsets)
    tiles, blocks = row_blocks(x), Blocks.of(S)

    def line(first):
        tile = row_tile(x, tiles, first)
        parts = [visible(tile, spans(tile), blocks, key).reshape(tiles.size, blocks.size) for key in blocks.firsts]
        return blocks.join(jnp.stack(parts), axis=-1)

    see = tiles.join(jnp.stack([line(first) for first in tiles.firsts]), axis=0)
    np.testing.assert_array_equal(see, written_out(q_offsets, kv_offsets))


@pytest.mark.parametrize(("q_offsets", "kv_offsets"), OFFSETS, ids=str)
def test_tiles_that_no_query_sees_are_not_visited(q_offsets, kv_offsets):
    x, blocks = row(q_offsets, kv_offsets), Blocks.of(S)
    tiles, see = row_blocks(x), written_out(q_offsets, kv_offsets)
    for first in tiles.firsts:
        tile = row_tile(x, tiles, first)
        queries = np.asarray(tiles.indices(first))
        for key in blocks.firsts:
            visited = if_seen(tile, spans(tile), blocks, key, lambda: True, lambda: False)
            assert bool(visited) == see[np.ix_(queries, np.asarray(blocks.indices(key)))].any()


def test_a_sequence_is_found_among_many():
    offsets = jnp.arange(65537, dtype=jnp.int32)  # a query and a key each
    q = jnp.zeros((65536, 1, 8))
    x = Operands(q, q, q, jnp.float32(1), cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    found = jax.jit(places)(x)
    np.testing.assert_array_equal(found.first, np.arange(65536))
    np.testing.assert_array_equal(found.end, np.arange(65536) + 1)
    assert not found.padded.any()
