"""Rows that the heads of a group share, and splits of the keys they see, in whole numbers."""

import itertools

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.configs import decode
from jax_fa4.kernels.core.bounds import Visit
from jax_fa4.kernels.core.heads import Rows
from jax_fa4.kernels.core.splits import MAX_SPLITS, SplitKeys, Splits


@pytest.mark.parametrize(("group", "q_len"), [*itertools.product((1, 2, 3, 5, 8, 200), (1, 7, 130))])
def test_tiles_have_every_query_of_every_head_once(group, q_len):
    tile_m, num_rows = 128, q_len * group
    found = []
    for first in range(0, num_rows, tile_m):
        rows = Rows(first, group)
        begin, end = rows.queries(tile_m)
        places = [rows.place(row) for row in range(min(tile_m, num_rows - first))]
        assert {query for query, _ in places} == set(range(begin, min(end, q_len)))
        found += places
    assert sorted(found) == list(itertools.product(range(q_len), range(group)))


def test_rows_of_one_head_are_its_queries():
    rows = Rows(256)
    assert rows.place(3) == (259, 0)
    assert rows.queries(128) == (256, 384)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("blocks", [1, 9, 64, 73, 1024, 1025, 5000, 0])
def test_splits_have_every_block_once_and_the_first_ones_have_some(blocks, kv_heads):
    first_block, min_blocks, tile_n = 3, 8, 128
    whole = Visit(first_block + blocks - 1, blocks, ())
    most = decode.max_splits(1, blocks * tile_n, kv_heads)
    splits = Splits.of(whole, SplitKeys.of(1, kv_heads), tile_n, max(most, 1))
    ranges = [splits.within(split) for split in range(MAX_SPLITS)]
    clipped = [range(begin, min(end, first_block + blocks)) for begin, end in ranges]
    assert [block for part in clipped for block in part] == list(range(first_block, first_block + blocks))
    sizes = [len(part) for part in clipped]
    assert sizes == sorted(sizes, reverse=True)
    assert all(end - begin >= min_blocks for begin, end in ranges)
    assert splits.count(whole) == sum(size > 0 for size in sizes)


@pytest.mark.parametrize(("rows", "kv_heads"), [*itertools.product((1, 32, 33, 4096), (1, 3, 8, 64))])
def test_plans_have_room_for_all_splits_that_a_kernel_makes(rows, kv_heads):
    keys, tile_n = SplitKeys.of(rows, kv_heads), 64
    assert keys.least == decode.min_split_keys(rows)
    most = {length: keys.most_splits(length) for length in (1, 1024, 1025, 8192, 8193, 32768, 131072, 1 << 24)}
    assert most == {length: decode.max_splits(rows, length, kv_heads) for length in most}
    for length, limit in most.items():
        whole = Visit(0, -(-length // tile_n), ())
        for visit in (whole, Visit(0, whole.num_n_blocks // 3, ())):
            splits = [Splits.of(visit, keys, tile_n, room) for room in (limit, MAX_SPLITS)]
            assert splits[0] == splits[1]  # however many keys a sequence could have
            assert splits[0].count(visit) <= limit
