"""The list of tiles of packed sequences: every row once, in the promised order, whatever the offsets hold."""

import dataclasses
import functools

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.configs import ScheduleConfig
from jax_fa4.emulator.launch import Buffer, Launch
from jax_fa4.emulator.run import run
from jax_fa4.kernels.build import compile_kernel
from jax_fa4.kernels.core.packed import FIELDS, PackedTile
from jax_fa4.kernels.core.schedule import work_class

TILE = 64
QUERIES = ScheduleConfig(
    arch="sm_90a", side="q", order="tiles", tile_m=TILE, tile_n=32, row_step=32, has_right=True, has_q_lengths=True
)
KEYS = ScheduleConfig(
    arch="sm_90a", side="kv", order="sequences", tile_m=TILE, tile_n=32, has_right=True, has_kv_lengths=True
)
SLOTS = ScheduleConfig(arch="sm_100a", side="q", order="slots", tile_m=TILE, tile_n=32)
CALLS = {  # offsets of queries of each batch entry, offsets of keys, all rows of either
    "one": ([[0, 300]], [[0, 300]], 300, 300),
    "gaps and empty ones": ([[5, 5, 70, 70, 135, 400]], [[0, 64, 64, 200, 200, 500]], 450, 500),
    "none": ([[7]], [[0]], 100, 3),
    "no keys": ([[0, 100]], [[0, 0]], 100, 0),
    "rows": ([[0, 100, 200], [50, 60, 200]], [[0, 100, 200], [0, 128, 256]], 200, 256),
    "descending": ([[90, 10, 400, 3, -7, 999]], [[90, 10, 400, 3, -7, 999]], 256, 300),
    "many": ([np.arange(0, 3001, 3)], [np.arange(0, 3001, 3)], 3000, 3000),
}


@functools.cache
def ptx(config):
    return compile_kernel(config).ptx


def written(config, q_offsets, kv_offsets, q_len, kv_len, lengths=None):
    """The head of the list, and all that has room behind it."""
    q_offsets, kv_offsets = (np.array(each, np.int32) for each in (q_offsets, kv_offsets))
    batch, sequences = q_offsets.shape[0], q_offsets.shape[1] - 1
    rows = q_len if config.side == "q" else kv_len
    table = np.full((1 + batch * (rows // TILE + sequences + 2), FIELDS), -1, np.int32)
    lengths = np.full((batch, max(sequences, 1)), 10**6, np.int32) if lengths is None else np.array(lengths, np.int32)
    arrays = [q_offsets, kv_offsets, *[lengths] * (config.has_q_lengths or config.has_kv_lengths)]
    arrays += [np.zeros(1, np.int32)] * config.has_right
    scalars = [np.int32(x).tobytes() for x in (q_len, kv_len, sequences, batch, 1)]
    params = (*(Buffer(a) for a in (*arrays, table)), *scalars)
    run(ptx(config), Launch(grid=(1, 1, 1), block=config.threads, smem_bytes=config.smem_bytes, params=params))
    return table[0], table[1:]


def schedule(config, *call, **lengths):
    head, table = written(config, *call, **lengths)
    count = head[0] if config.order != "slots" else len(table)
    return [PackedTile(*(int(x) for x in row)) for row in table[:count]]


def rows_of(tile):
    """Rows of the batch entry that a tile writes."""
    return range(tile.begin + tile.first_row(TILE), tile.begin + min(tile.end_row, tile.room))


@pytest.mark.parametrize("config", [QUERIES, KEYS, SLOTS], ids=lambda c: c.order)
@pytest.mark.parametrize("call", [name for name in CALLS if name != "descending"])
def test_every_row_is_in_one_tile(config, call):
    q_offsets, _, q_len, kv_len = CALLS[call]
    found = sorted((t.batch, row) for t in schedule(config, *CALLS[call]) for row in rows_of(t))
    rows = q_len if config.side == "q" else kv_len
    assert found == [(b, row) for b in range(len(q_offsets)) for row in range(rows)]


@pytest.mark.parametrize("config", [QUERIES, KEYS], ids=lambda c: c.order)
def test_offsets_that_descend_name_no_row_outside(config):
    *_, q_len, kv_len = CALLS["descending"]
    own, other = (q_len, kv_len) if config.side == "q" else (kv_len, q_len)
    for t in schedule(config, *CALLS["descending"]):
        assert all(0 <= row < own for row in rows_of(t))
        assert 0 <= t.other_begin <= t.other_begin + t.other_length <= other
        assert 0 <= t.length <= t.room


def test_a_tile_knows_its_sequence():
    (q_offsets,), (kv_offsets,), q_len, kv_len = CALLS["gaps and empty ones"]
    q_starts, kv_starts = [0, *q_offsets, q_len], [0, *kv_offsets, kv_len]
    lengths = [9, 60, 1, 1000, -3]
    for t in schedule(QUERIES, *CALLS["gaps and empty ones"], lengths=[lengths]):
        number = max(i for i, start in enumerate(q_starts[:-1]) if start == t.begin)
        is_one = 1 <= number <= len(lengths)
        assert t.room == q_starts[number + 1] - t.begin
        assert t.length == (min(max(lengths[number - 1], 0), t.room) if is_one else 0)
        assert t.other_begin == kv_starts[number]
        assert t.other_length == (kv_starts[number + 1] - kv_starts[number] if is_one else 0)
        assert t.other_slot == kv_starts[number] // 32 + number


@pytest.mark.parametrize("config", [QUERIES, KEYS], ids=lambda c: c.order)
@pytest.mark.parametrize("call", CALLS)
def test_a_list_tells_what_one_of_its_sequences_sees_at_most(config, call):
    (_, longest, tickets, *_), _ = written(config, *CALLS[call])
    assert longest == max((tile.other_length for tile in schedule(config, *CALLS[call])), default=0)
    assert tickets == 0


def test_tiles_that_see_more_come_first():
    offsets = [[0, 40, 900, 1000, 1500]]
    lengths = [-(-min(t.end_row, t.room) // 32) for t in schedule(QUERIES, offsets, offsets, 1500, 1500)]
    assert lengths == sorted(lengths, reverse=True)


def test_tiles_of_a_sequence_of_keys_follow_each_other_the_longest_sequence_first():
    offsets = [[0, 40, 900, 1000, 1500]]
    found = schedule(KEYS, offsets, offsets, 1500, 1500)
    assert [(t.begin, t.first_row(TILE)) for t in found] == [
        (begin, first)
        for begin, end in ((40, 900), (1000, 1500), (900, 1000), (0, 40))
        for first in range(0, end - begin, TILE)
    ]


def test_tiles_have_places_of_their_own():
    offsets = [[0, 40, 900, 1000, 1500]]
    found = schedule(SLOTS, offsets, offsets, 1500, 1500)
    for number, (begin, end) in enumerate(zip(offsets[0], offsets[0][1:], strict=False), start=1):
        for block in range(-(-(end - begin) // TILE)):
            tile = found[begin // TILE + number + block]
            assert (tile.begin, tile.first_row(TILE)) == (begin, block * TILE)


def test_classes_of_work_never_fall():
    classes = [work_class(blocks) for blocks in range(100_000)]
    assert classes[:1025] == list(range(1025))
    assert (np.diff(classes) >= 0).all()
    assert classes[-1] == 2047


@pytest.mark.matrix
def test_a_schedule_of_many_sequences():
    offsets = [np.arange(65_537)]
    config = dataclasses.replace(QUERIES, has_q_lengths=False)
    assert len(schedule(config, offsets, offsets, 65_536, 65_536)) == 65_536
