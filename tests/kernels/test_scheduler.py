"""Tile orders: each tile once, in the order that was promised."""

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.kernels.core import scheduler
from jax_fa4.kernels.core.scheduler import Grid, SingleTile, Tile

TILE_M = 128
GRIDS = [
    Grid(q_len=1, kv_len=1, q_heads=1, kv_heads=1, batch=1),
    Grid(q_len=129, kv_len=0, q_heads=6, kv_heads=2, batch=3),
    Grid(q_len=1000, kv_len=100, q_heads=8, kv_heads=8, batch=2),
    Grid(q_len=300, kv_len=10**6, q_heads=16, kv_heads=1, batch=5),  # K and V of a head exceed L2
    Grid(q_len=512, kv_len=30000, q_heads=9, kv_heads=3, batch=5),  # three heads a section, the last section full
    Grid(q_len=512, kv_len=25000, q_heads=6, kv_heads=3, batch=3),  # four heads a section, the last section short
]


def order(grid, longest_first):
    tiles = SingleTile(tile_m=TILE_M, kv_bytes=512, longest_first=longest_first)
    count = -(-grid.q_len // TILE_M) * grid.q_heads * grid.batch
    return [tiles.tile(index, grid) for index in range(count)]


@pytest.mark.parametrize("longest_first", [False, True], ids=["plain", "longest-first"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_tile_is_computed_once(grid, longest_first):
    group = grid.q_heads // grid.kv_heads
    expected = {
        Tile(m_block, head, head // group, batch)
        for m_block in range(-(-grid.q_len // TILE_M))
        for head in range(grid.q_heads)
        for batch in range(grid.batch)
    }
    found = order(grid, longest_first)
    assert set(found) == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_query_heads_of_a_kv_head_are_neighbours(grid):
    group = grid.q_heads // grid.kv_heads
    tiles = order(grid, longest_first=True)
    for start in range(0, len(tiles), group):
        assert len({(t.batch, t.kv_head, t.m_block) for t in tiles[start : start + group]}) == 1


def test_long_tiles_of_all_heads_in_a_section_come_first():
    tiles = order(Grid(q_len=1024, kv_len=1024, q_heads=4, kv_heads=2, batch=2), longest_first=True)
    blocks = [tile.m_block for tile in tiles]
    assert blocks == sorted(blocks, reverse=True)


def test_a_section_holds_as_many_heads_as_fit_in_l2():
    kv_len = scheduler.L2_BUDGET // 512 // 2  # two heads fill the budget
    tiles = order(Grid(q_len=256, kv_len=kv_len, q_heads=4, kv_heads=4, batch=1), longest_first=True)
    assert [(tile.kv_head, tile.m_block) for tile in tiles[:4]] == [(0, 1), (1, 1), (0, 0), (1, 0)]
    assert [tile.kv_head for tile in tiles[4:]] == [2, 3, 2, 3]


def test_plain_order_finishes_a_head_before_the_next():
    tiles = order(Grid(q_len=300, kv_len=300, q_heads=2, kv_heads=1, batch=2), longest_first=False)
    assert [tile.m_block for tile in tiles] == [0, 1, 2] * 4
    assert [(tile.batch, tile.q_head) for tile in tiles[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
