"""Cells of tensor memory against the ISA's shapes: rows of fragments, data paths of MMA, copies."""

import numpy as np
import pytest

from jax_fa4.emulator.layout import tensor_memory as tm

REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def test_an_address_is_lane_and_column():
    assert tm.split_address(0x00200180) == (32, 384)


@pytest.mark.parametrize("repeat", [1, 2, 32])
def test_32x32b_gives_a_lane_its_own_row(repeat):
    lane, column = tm.register_cells("32x32b", repeat)
    for r, thread in np.ndindex(repeat, 32):
        assert (lane[r, thread], column[r, thread]) == (thread, r)


@pytest.mark.parametrize("repeat", [1, 4])
def test_16x256b_is_a_row_of_m16n8_accumulators(repeat):
    lane, column = tm.register_cells("16x256b", repeat)
    for tile, i, thread in np.ndindex(repeat, 4, 32):
        group, in_group = thread // 4, thread % 4
        assert lane[4 * tile + i, thread] == (group if i < 2 else group + 8)
        assert column[4 * tile + i, thread] == 8 * tile + 2 * in_group + i % 2


@pytest.mark.parametrize("repeat", [1, 4])
def test_16x128b_gives_four_lanes_a_row_of_four_columns(repeat):
    lane, column = tm.register_cells("16x128b", repeat)
    for tile, i, thread in np.ndindex(repeat, 2, 32):
        assert lane[2 * tile + i, thread] == thread // 4 + 8 * i
        assert column[2 * tile + i, thread] == 4 * tile + thread % 4


@pytest.mark.parametrize("repeat", [1, 4])
def test_16x64b_gives_four_lanes_two_rows_of_two_columns(repeat):
    lane, column = tm.register_cells("16x64b", repeat)
    for tile, thread in np.ndindex(repeat, 32):
        quad, in_quad = divmod(thread, 4)
        assert lane[tile, thread] == (quad if in_quad % 2 == 0 else quad + 8)
        assert column[tile, thread] == 2 * tile + in_quad // 2


def test_16x32bx2_splits_the_warp():
    lane, column = tm.register_cells("16x32bx2", 4, split=64)
    for r, thread in np.ndindex(4, 32):
        assert (lane[r, thread], column[r, thread]) == (thread % 16, r if thread < 16 else 64 + r)


@pytest.mark.parametrize("shape", REGISTERS)
@pytest.mark.parametrize("halves", [False, True], ids=["words", "halves"])
def test_no_cell_has_two_registers_and_none_is_left_out(shape, halves):
    repeat = 8
    lane, column = tm.register_cells(shape, repeat, halves=halves, split=repeat * (2 if halves else 1) // (1 + halves))
    assert lane.shape[:2] == (REGISTERS[shape] * repeat, 32)
    cells = set(zip(lane.ravel(), column.ravel(), strict=True))
    rows = tm.SHAPES[shape].lanes
    assert len(cells) == lane.size
    assert cells == {(i, j) for i in range(rows) for j in range(lane.size // rows)}


def test_packing_takes_neighbouring_columns():
    lane, column = tm.register_cells("16x256b", 2)
    packed_lane, packed_column = tm.register_cells("16x256b", 2, halves=True)
    for half in range(2):
        assert (packed_lane[..., half] == lane).all()
        assert (packed_column[..., half] == 2 * column + half).all()


def accumulator_map(blocks, m, n):
    """(cta, lane, column) of every element of D, and how many blocks hold it."""
    where, count = np.full((m, n, 3), -1), np.zeros((m, n), int)
    for block in blocks:
        rows, columns = np.arange(m)[block.rows], np.arange(n)[block.columns]
        assert len(rows) == len(block.lanes)
        where[np.ix_(rows, columns, [0])] = block.cta
        where[np.ix_(rows, columns, [1])] = block.lanes[:, None, None]
        where[np.ix_(rows, columns, [2])] = (columns - columns[0])[None, :, None]
        count[np.ix_(rows, columns)] += 1
    return where, count


def layout(cta_group, m, n, i, j, upper):
    """The four data paths, element by element."""
    if cta_group == 1:
        return (0, i, j) if m == 128 else (0, 32 * (i // 16) + i % 16 + 16 * upper, j)
    if m == 256:
        return i // 128, i % 128, j
    return i // 64, i % 64 + 64 * (j >= n // 2), j % (n // 2)


@pytest.mark.parametrize(
    ("cta_group", "m", "upper"), [(1, 128, False), (1, 64, False), (1, 64, True), (2, 256, False), (2, 128, False)]
)
@pytest.mark.parametrize("n", [32, 128])
def test_an_accumulator_follows_its_data_path(cta_group, m, upper, n):
    where, count = accumulator_map(tm.accumulator_blocks(cta_group, m, n, upper_half=upper), m, n)
    assert (count == 1).all()
    for i, j in np.ndindex(m, n):
        assert tuple(where[i, j]) == layout(cta_group, m, n, i, j, upper), (i, j)


def test_each_cta_of_a_pair_reads_its_own_rows_of_a():
    for m in (128, 256):
        for block in tm.accumulator_blocks(2, m, 64):
            assert block.a_rows == slice(0, m // 2)
            assert block.rows == slice(block.cta * m // 2, (block.cta + 1) * m // 2)


@pytest.mark.parametrize(
    ("shape", "row", "lanes"),
    [
        ("128x256b", 77, [77]),
        ("128x128b", 127, [127]),
        ("4x256b", 3, [96]),
        ("64x128b.warpx2::02_13", 40, [40, 104]),
        ("64x128b.warpx2::01_23", 31, [31, 63]),
        ("64x128b.warpx2::01_23", 40, [72, 104]),
        ("32x128b.warpx4", 5, [5, 37, 69, 101]),
    ],
)
def test_a_copied_row_reaches_its_lanes(shape, row, lanes):
    copy = tm.COPY_SHAPES[shape]
    assert list(copy.lanes[row]) == lanes
    assert copy.row_bytes * 8 == int(shape.split("x")[1].split("b")[0])


@pytest.mark.parametrize("shape", tm.COPY_SHAPES)
def test_a_copy_writes_no_lane_twice(shape):
    lanes = tm.COPY_SHAPES[shape].lanes
    assert len(lanes) == int(shape.split("x")[0])
    assert len(set(lanes.ravel())) == lanes.size
    assert lanes.size == (4 if shape == "4x256b" else 128)
