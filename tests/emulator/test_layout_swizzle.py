"""Swizzles against their pictures: which 16-byte piece of which 128-byte row holds which piece of the tile."""

import numpy as np
import pytest

from jax_fa4.emulator.layout import swizzle

MODES = {
    "32B": swizzle.B32,
    "64B": swizzle.B64,
    "128B": swizzle.B128,
    "128B-atom32": swizzle.B128_ATOM_32B,
    "128B-atom64": swizzle.B128_ATOM_64B,
    "128B-atom32-flip8": swizzle.B128_ATOM_32B_FLIP_8B,
}


def row_and_piece(mode, row, piece):
    """Where the mode puts a 16-byte piece, as (row of 128 bytes, piece in it)."""
    moved = int(mode(np.array([row * 128 + piece * 16]))[0])
    return moved // 128, moved % 128 // 16


def test_no_swizzle_moves_nothing():
    address = np.arange(4096)
    assert (swizzle.NONE(address) == address).all()


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("piece", range(8))
def test_mode_128_xors_the_piece_with_the_row(row, piece):
    assert row_and_piece(swizzle.B128, row, piece) == (row, piece ^ row)


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("piece", range(8))
def test_mode_64_swaps_pieces_of_a_half_row(row, piece):
    """A 64-byte row is half of a 128-byte one, so two of them share a pattern; four patterns make a period."""
    half, within = divmod(piece, 4)
    assert row_and_piece(swizzle.B64, row, piece) == (row, 4 * half + (within ^ row % 4))


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("piece", range(8))
def test_mode_32_swaps_neighbours_in_odd_rows(row, piece):
    assert row_and_piece(swizzle.B32, row, piece) == (row, piece ^ 1 if row % 2 else piece)


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("piece", range(8))
def test_32_byte_atoms_stay_whole(row, piece):
    assert row_and_piece(swizzle.B128_ATOM_32B, row, piece) == (row, 2 * (piece // 2 ^ row % 4) + piece % 2)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("piece", range(8))
def test_64_byte_atoms_stay_whole(row, piece):
    assert row_and_piece(swizzle.B128_ATOM_64B, row, piece) == (row, piece ^ 4 if row % 2 else piece)


def test_the_flip_swaps_8_bytes_in_alternate_rows():
    address = np.arange(0, 1024, 8)
    plain, flipped = swizzle.B128_ATOM_32B(address), swizzle.B128_ATOM_32B_FLIP_8B(address)
    assert (flipped == np.where(address // 128 % 2, plain ^ 8, plain)).all()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_swizzle_is_its_own_inverse_and_repeats_with_its_period(mode):
    address = np.arange(8192)
    assert (mode(mode(address)) == address).all()
    assert (mode(address + mode.period_bytes) == mode(address) + mode.period_bytes).all()
    assert (np.sort(mode(address)) == address).all()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_shorter_period_would_not_do(mode):
    address = np.arange(8192)
    half = mode.period_bytes // 2
    assert (mode(address + half) != mode(address) + half).any()


@pytest.mark.parametrize("mode", [swizzle.B32, swizzle.B64, swizzle.B128], ids=["32B", "64B", "128B"])
def test_a_column_of_eight_rows_meets_all_banks(mode):
    """What swizzles are for: the first pieces of eight successive rows fall on eight groups of four banks."""
    start = np.arange(8) * mode.span_bytes
    assert len(set(mode(start) % 128 // 16)) == 8
