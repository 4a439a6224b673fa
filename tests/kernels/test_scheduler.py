"""Tile orders and walks over them: each tile once, in the order that was promised, in equal shares."""

import dataclasses
import itertools

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.kernels.core import scheduler
from jax_fa4.kernels.core.scheduler import Grid, Queue, SingleTile, Tile, TileOrder, Walk

TILE_M, STEP = 128, 64
GRIDS = [
    Grid(q_len=1, kv_len=1, q_heads=1, kv_heads=1, batch=1),
    Grid(q_len=129, kv_len=0, q_heads=6, kv_heads=2, batch=3),
    Grid(q_len=1000, kv_len=100, q_heads=8, kv_heads=8, batch=2),
    Grid(q_len=300, kv_len=10**6, q_heads=16, kv_heads=1, batch=5),  # K and V of a head exceed L2
    Grid(q_len=512, kv_len=30000, q_heads=9, kv_heads=3, batch=5),  # three heads a section, the last section full
    Grid(q_len=512, kv_len=25000, q_heads=6, kv_heads=3, batch=3),  # four heads a section, the last section short
]


def order(grid, longest_first, even_sections=False):
    tiles = SingleTile(tile_m=TILE_M, kv_bytes=512, longest_first=longest_first, even_sections=even_sections)
    count = -(-grid.q_len // TILE_M) * grid.q_heads * grid.batch
    return [tiles.tile(index, grid) for index in range(count)]


@pytest.mark.parametrize(
    ("longest_first", "even_sections"),
    [(False, False), (True, False), (True, True)],
    ids=["plain", "longest-first", "even-sections"],
)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_tile_is_computed_once(grid, longest_first, even_sections):
    group = grid.q_heads // grid.kv_heads
    expected = {
        Tile(m_block, head, head // group, batch)
        for m_block in range(-(-grid.q_len // TILE_M))
        for head in range(grid.q_heads)
        for batch in range(grid.batch)
    }
    found = order(grid, longest_first, even_sections)
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


@pytest.mark.parametrize(("fitting", "heads"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (100, 11)])
def test_even_sections_hold_the_power_of_two_of_heads_that_fits(fitting, heads):
    kv_len = scheduler.L2_BUDGET // 512 // fitting
    tiles = order(Grid(q_len=256, kv_len=kv_len, q_heads=11, kv_heads=11, batch=1), True, even_sections=True)
    assert [tile.kv_head for tile in tiles[: 2 * heads]] == [*range(heads)] * 2


def test_plain_order_finishes_a_head_before_the_next():
    tiles = order(Grid(q_len=300, kv_len=300, q_heads=2, kv_heads=1, batch=2), longest_first=False)
    assert [tile.m_block for tile in tiles] == [0, 1, 2] * 4
    assert [(tile.batch, tile.q_head) for tile in tiles[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def order_of(longest_first, partial_first):
    return TileOrder(
        tile_m=TILE_M, row_step=STEP, kv_bytes=512, longest_first=longest_first, partial_first=partial_first
    )


def all_tiles(grid, longest_first=True, partial_first=True, ctas=None):
    order = order_of(longest_first, partial_first)
    return [order.tile(index, grid, ctas) for index in range(order.count(grid))]


def walk(cta, ctas, count):
    """Indices that one CTA visits."""
    place, indices = Walk.first(cta, ctas), []
    while place.tile_index < count:
        indices.append(place.tile_index)
        place = place.next(ctas)
    return indices


@pytest.mark.parametrize("partial_first", [False, True], ids=["partial-last", "partial-first"])
@pytest.mark.parametrize(
    ("longest_first", "ctas"), [(False, None), (True, None), (True, 5)], ids=["plain", "longest-first", "in-rounds"]
)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_query_is_in_one_tile(grid, longest_first, ctas, partial_first):
    found = []
    for tile in all_tiles(grid, longest_first, partial_first, ctas):
        assert 0 <= tile.first_row < min(tile.end_row, grid.q_len)
        assert tile.end_row - tile.first_row <= TILE_M
        assert tile.first_row % (STEP if partial_first else TILE_M) == 0
        assert tile.kv_head == tile.q_head // (grid.q_heads // grid.kv_heads)
        rows = range(tile.first_row, min(tile.end_row, grid.q_len))
        found += [(tile.batch, tile.q_head, row) for row in rows]
    assert len(found) == len(set(found)) == grid.batch * grid.q_heads * grid.q_len


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_query_heads_of_a_kv_head_are_neighbours_in_the_order(grid):
    group = grid.q_heads // grid.kv_heads
    tiles = all_tiles(grid)
    for start in range(0, len(tiles), group):
        assert len({(t.batch, t.kv_head, t.first_row) for t in tiles[start : start + group]}) == 1


def test_sections_are_taken_up_and_down_and_hold_as_many_heads_as_fit_in_l2():
    kv_len = scheduler.L2_BUDGET // 512 // 4  # four heads fill the budget
    tiles = all_tiles(Grid(q_len=256, kv_len=kv_len, q_heads=8, kv_heads=8, batch=1))
    places = [(tile.kv_head, tile.first_row) for tile in tiles]
    expected = [(range(4), 0), (range(4), 128), (range(4, 8), 128), (range(4, 8), 0)]
    assert places == [(head, row) for heads, row in expected for head in heads]


@pytest.mark.parametrize(
    ("fitting", "ctas", "heads"), [(40, 8, 40), (40, 9, 40), (40, 30, 26), (9, 30, 26), (9, 1, 9), (9, 100, 80)]
)
def test_sections_of_walking_ctas_are_about_whole_rounds_that_fit_in_l2_or_one(fitting, ctas, heads):
    """A head has two tiles, a round up and down two for each CTA; 26 is a third of 80 heads, 9 no part of them."""
    kv_len = scheduler.WALK_BUDGET // 512 // fitting
    tiles = all_tiles(Grid(q_len=256, kv_len=kv_len, q_heads=80, kv_heads=80, batch=1), ctas=ctas)
    assert [tile.kv_head for tile in tiles[: 2 * heads]] == 2 * list(range(heads))


@pytest.mark.parametrize(
    ("partial_first", "rows"),
    [(True, [(192, 320), (64, 192), (0, 64)]), (False, [(256, 384), (128, 256), (0, 128)])],
    ids=["first", "last"],
)
def test_the_tile_that_is_not_full_is_where_it_is_wanted(partial_first, rows):
    tiles = all_tiles(Grid(q_len=290, kv_len=290, q_heads=1, kv_heads=1, batch=1), partial_first=partial_first)
    assert [(tile.first_row, tile.end_row) for tile in tiles] == rows


@pytest.mark.parametrize("count", [1, 5, 6, 7, 12, 40])
@pytest.mark.parametrize("ctas", [1, 2, 6, 40])
def test_every_index_is_walked_to_once(ctas, count):
    found = [index for cta in range(min(ctas, count)) for index in walk(cta, min(ctas, count), count)]
    assert sorted(found) == list(range(count))


@pytest.mark.parametrize(("heads", "kv_len"), [(256, 1024), (16, 16384), (7, 16384), (5, 16384)])
def test_walks_over_causal_tiles_are_equally_long(heads, kv_len):
    """As good as equal sections can make them, whether heads are as many as some sections or not."""
    order = dataclasses.replace(order_of(longest_first=True, partial_first=True), kv_bytes=512)
    grid = Grid(q_len=kv_len, kv_len=kv_len, q_heads=heads, kv_heads=heads, batch=1)
    ctas, count = 132, order.count(grid)
    ends = [order.tile(index, grid, ctas).end_row for index in range(count)]
    keys = [sum(ends[index] for index in walk(cta, ctas, count)) for cta in range(ctas)]
    assert max(keys) <= 1.08 * sum(keys) / ctas


@pytest.mark.parametrize("count", [1, 5, 12, 40])
@pytest.mark.parametrize("ctas", [1, 2, 6, 40])
def test_ctas_of_a_queue_take_every_index_once_whoever_is_fast(ctas, count):
    """A CTA begins where a walk does, and takes its tickets two tiles ahead."""
    queues, tickets, taken = {cta: Queue.first(cta, ctas) for cta in range(ctas)}, itertools.count(), []
    random = np.random.default_rng(count)
    while queues:
        cta = random.choice(list(queues))
        queue = queues.pop(cta)
        if queue.tile_index < count:
            taken.append(queue.tile_index)
            queues[cta] = queue.next(next(tickets), ctas)
    assert sorted(taken) == list(range(count))


@pytest.mark.parametrize("ctas", [1, 2, 6, 40])
def test_a_queue_without_tickets_is_a_walk(ctas):
    for cta in range(ctas):
        queue, taken = Queue.first(cta, ctas), []
        while queue.tile_index < 40:
            taken.append(queue.tile_index)
            queue = queue.next(-1, ctas)
        assert taken == walk(cta, ctas, 40)


@pytest.mark.parametrize(("count", "longest", "wanted"), [(128, 16384, 0), (128, 1024, 1), (250, 16384, 1)])
def test_tickets_are_for_sections_of_many_tiles_or_short_sequences(count, longest, wanted):
    """Of 132 CTAs each has about two of the 128 tiles of two heads, which fit in L2."""
    grid = Grid(q_len=16384, kv_len=16384, q_heads=16, kv_heads=16, batch=1)
    assert order_of(longest_first=True, partial_first=True).wants_tickets(count, longest, grid, 132) == wanted
