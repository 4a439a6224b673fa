"""Fragments of wgmma against the written-out ones of mma.m16n8: a warp holds 16 rows, 8 columns at a time."""

import numpy as np
import pytest

from jax_fa4.emulator.layout import fragment


def m16n8_accumulator(lane, i):
    """Element i of four: the ISA's formula for C and D of mma.m16n8."""
    group, thread = lane // 4, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def m16n8_a(lane, i, element_bytes):
    """Element i of A of mma.m16n8k16 (2 bytes), k8 (4 bytes) or k32 (1 byte): the ISA's three formulas."""
    group, thread = lane // 4, lane % 4
    if element_bytes == 2:
        return (group if i < 2 or 4 <= i < 6 else group + 8), thread * 2 + (i & 1) + (8 if i >= 4 else 0)
    if element_bytes == 4:
        return (group if i in (0, 2) else group + 8), thread + (4 if i >= 2 else 0)
    return (group if i < 4 or 8 <= i < 12 else group + 8), thread * 4 + (i & 3) + (16 if i >= 8 else 0)


@pytest.mark.parametrize("n", [8, 24, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_an_accumulator_is_a_row_of_m16n8_tiles(n, element_bytes):
    row, column = fragment.accumulator_coordinates(n, element_bytes)
    for warp in range(4):
        for lane in range(32):
            for tile in range(n // 8):
                for i in range(4):
                    register, element = divmod(4 * tile + i, 4 // element_bytes)
                    at = (warp, register, lane, element)
                    tile_row, tile_column = m16n8_accumulator(lane, i)
                    assert (row[at], column[at]) == (16 * warp + tile_row, 8 * tile + tile_column)


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_a_comes_from_registers_as_for_m16n8(element_bytes):
    row, column = fragment.a_coordinates(element_bytes)
    for warp, lane, i in np.ndindex(4, 32, 16 // element_bytes):
        at = (warp, i // (4 // element_bytes), lane, i % (4 // element_bytes))
        tile_row, k = m16n8_a(lane, i, element_bytes)
        assert (row[at], column[at]) == (16 * warp + tile_row, k)


@pytest.mark.parametrize("n", range(8, 257, 8))
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_element_of_d_has_one_register(n, element_bytes):
    row, column = fragment.accumulator_coordinates(n, element_bytes)
    assert row.shape == (4, n * element_bytes // 8, 32, 4 // element_bytes)
    assert sorted(row.ravel() * n + column.ravel()) == list(range(64 * n))


def test_an_accumulator_packed_in_pairs_is_the_next_a():
    """Registers 2j, 2j+1 of D, packed to 16 bits, are register j of A of k-block j // 4."""
    d_row, d_column = fragment.accumulator_coordinates(64, 4)
    a_row, a_k = fragment.a_coordinates(2)
    for block in range(4):
        for j in range(4):
            pair = slice(8 * block + 2 * j, 8 * block + 2 * j + 2)
            assert (np.moveaxis(d_row[:, pair, :, 0], 1, -1) == a_row[:, j]).all()
            assert (np.moveaxis(d_column[:, pair, :, 0], 1, -1) == 16 * block + a_k[:, j]).all()


@pytest.mark.parametrize("bits", [np.uint16, np.uint32])
def test_gather_and_scatter_are_inverse(bits):
    matrix = np.random.default_rng(0).integers(0, 2**16, (64, 48)).astype(bits)
    registers = fragment.scatter_accumulator(matrix)
    assert registers.shape == fragment.accumulator_coordinates(48, np.dtype(bits).itemsize).row.shape[:3]
    assert registers.dtype == np.uint32
    assert (fragment.gather_accumulator(registers, 48, bits) == matrix).all()


@pytest.mark.parametrize("bits", [np.uint8, np.uint16, np.uint32])
def test_a_is_gathered_by_its_coordinates(bits):
    registers = np.random.default_rng(0).integers(0, 2**32, (4, 4, 32), dtype=np.uint32)
    matrix = fragment.gather_a(registers, bits)
    row, k = fragment.a_coordinates(matrix.itemsize)
    for at in np.ndindex(row.shape):
        assert matrix[row[at], k[at]] == registers[at[:3]] >> 8 * matrix.itemsize * at[3] & np.iinfo(bits).max


def test_the_first_element_is_in_the_low_half():
    matrix = np.arange(64 * 16, dtype=np.uint16).reshape(64, 16)
    registers = fragment.scatter_accumulator(matrix)
    assert registers[0, 0, 0] == int(matrix[0, 0]) | int(matrix[0, 1]) << 16
