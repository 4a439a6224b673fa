"""Key blocks that a tile of queries visits by segment ids, against all pairs of ids."""

import numpy as np
import pytest

from jax_fa4.rules.segments import key_blocks

LENGTHS = [(1, 1), (8, 9), (23, 40), (40, 7)]
TILE_M, TILE_N = 8, 5


def tiles(q_len, kv_len, ordered):
    """For each tile: ids of its queries, ids of all keys, the blocks that it visits and those of its one segment."""
    rng = np.random.default_rng(q_len)
    q_ids, kv_ids = (rng.integers(-2, 4, (3, n)).astype(np.int32) for n in (q_len, kv_len))
    if ordered:
        q_ids.sort(axis=-1), kv_ids.sort(axis=-1)
    found = np.asarray(key_blocks(q_ids, kv_ids, tile_m=TILE_M, tile_n=TILE_N))
    assert found.shape == (3, -(-q_len // TILE_M), 4)
    for entry, m_block in np.ndindex(found.shape[:2]):
        own = q_ids[entry, m_block * TILE_M : (m_block + 1) * TILE_M]
        begin, end, one_begin, one_end = found[entry, m_block]
        yield own, kv_ids[entry], range(begin, end), range(one_begin, one_end)


@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_every_key_of_a_segment_is_visited(q_len, kv_len, ordered):
    for own, kv_ids, blocks, _ in tiles(q_len, kv_len, ordered):
        assert {key // TILE_N for key in np.flatnonzero(np.isin(kv_ids, own))} <= set(blocks)


@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_blocks_of_one_segment_hold_no_other(q_len, kv_len, ordered):
    for own, kv_ids, _, blocks in tiles(q_len, kv_len, ordered):
        keys = kv_ids[blocks.start * TILE_N : blocks.stop * TILE_N]
        assert {*keys} <= {*own}
        assert not blocks or len({*own}) == 1


def test_sorted_ids_miss_no_block_of_one_segment():
    found = 0
    for own, kv_ids, _, blocks in tiles(23, 40, ordered=True):
        whole = [b for b in range(8) if (kv_ids[b * TILE_N : (b + 1) * TILE_N] == own[0]).all()]
        if len({*own}) == 1:
            assert [*blocks] == whole
            found += len(whole)
    assert found


def test_blocks_of_one_segment_among_others_are_none():
    ids = np.array([[1] * 5 + [2] * 5 + [1] * 5], np.int32)
    found = np.asarray(key_blocks(np.ones((1, 8), np.int32), ids, tile_m=TILE_M, tile_n=TILE_N))
    np.testing.assert_array_equal(found[0], [[0, 3, 0, 0]])


def test_a_tile_without_a_segment_among_the_keys_visits_none():
    found = np.asarray(key_blocks(np.full((1, 8), 7), np.arange(5)[None], tile_m=TILE_M, tile_n=TILE_N))
    begin, end, one_begin, one_end = found[0, 0]
    assert end <= begin
    assert one_end <= one_begin


def test_sorted_ids_visit_nothing_outside_their_segments():
    ids = np.repeat(np.arange(4, dtype=np.int32), 10)[None]
    found = np.asarray(key_blocks(ids, ids, tile_m=10, tile_n=5))
    np.testing.assert_array_equal(found[0], [[0, 2, 0, 2], [2, 4, 2, 4], [4, 6, 4, 6], [6, 8, 6, 8]])


@pytest.mark.parametrize("lengths", [(0, 5), (8, 0)])
def test_an_empty_axis_has_no_blocks(lengths):
    found = np.asarray(key_blocks(*(np.zeros((2, n), np.int32) for n in lengths), tile_m=TILE_M, tile_n=TILE_N))
    assert (found[..., 1] <= found[..., 0]).all() or found.size == 0
