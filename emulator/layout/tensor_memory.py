"""Tensor memory of sm_100, PTX ISA 9.7.16: which cell (32 bits at a lane and column) an element occupies."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "COLUMNS",
    "COPY_SHAPES",
    "LANES",
    "SHAPES",
    "AccumulatorBlock",
    "Cells",
    "CopyShape",
    "Indices",
    "accumulator_blocks",
    "register_cells",
    "split_address",
]

Indices = npt.NDArray[np.int64]

LANES, COLUMNS = 128, 512  # per CTA
WARP_LANES = 32  # warp w of a warpgroup reaches lanes 32w .. 32w+31


def split_address(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor-memory address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


class Cells(NamedTuple):
    """Cells relative to the address of the instruction."""

    lane: Indices
    column: Indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessShape:
    """One shape of tcgen05.ld and .st."""

    lanes: int  # of tensor memory that a warp touches
    registers: int  # per repetition
    max_repeat: int


SHAPES = {
    "32x32b": AccessShape(lanes=32, registers=1, max_repeat=128),
    "16x64b": AccessShape(lanes=16, registers=1, max_repeat=128),
    "16x128b": AccessShape(lanes=16, registers=2, max_repeat=64),
    "16x256b": AccessShape(lanes=16, registers=4, max_repeat=32),
    "16x32bx2": AccessShape(lanes=16, registers=1, max_repeat=128),
}


def _cells(shape: str, r: Indices, lane: Indices, split: int) -> tuple[Indices, Indices]:
    """Lane and column of register r of each lane of the warp, one 32-bit cell a register."""
    if shape == "32x32b":
        return lane, r
    if shape == "16x64b":
        return (lane >> 2) + 8 * (lane & 1), (lane >> 1 & 1) + 2 * r
    if shape == "16x128b":
        return (lane >> 2) + 8 * (r & 1), (lane & 3) + 4 * (r >> 1)
    if shape == "16x256b":
        return (lane >> 2) + 8 * (r >> 1 & 1), 2 * (lane & 3) + (r & 1) + 8 * (r >> 2)
    return lane & 15, r + np.where(lane >= 16, split, 0)


@functools.cache
def register_cells(shape: str, repeat: int, *, halves: bool = False, split: int = 0) -> Cells:
    """Cells of the registers of one tcgen05.ld or .st: int64 [registers, 32], relative to its address.

    `halves` (.pack::16b of ld, .unpack::16b of st): int64 [registers, 32, 2], two cells a register, 16 bits each,
    the lower half's first. `split` is the immediate of 16x32bx2: how many columns further lanes 16-31 start.
    """
    access = SHAPES[shape]
    r, lane = np.ogrid[: access.registers * repeat, :32]
    lanes, columns = np.broadcast_arrays(*_cells(shape, r, lane, split))
    if not halves:
        return Cells(np.array(lanes), np.array(columns))
    return Cells(np.stack([lanes] * 2, -1), np.stack([2 * columns, 2 * columns + 1], -1))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AccumulatorBlock:
    """A part of D that one CTA's lanes hold: D[rows, columns] at (lanes, column of D + 0, 1, ...).

    The same lanes feed its A from tensor memory; from shared memory it takes rows `a_rows` of the CTA's own A. B's rows
    are those of `columns`: row n lies in CTA n // (N / CTAs).
    """

    cta: int  # rank in the pair
    lanes: Indices
    rows: slice  # of D
    a_rows: slice  # of the A matrix in this CTA
    columns: slice  # of D


@functools.cache
def accumulator_blocks(cta_group: int, m: int, n: int, *, upper_half: bool = False) -> tuple[AccumulatorBlock, ...]:
    """Where D [m, n] lies. `upper_half`: an M = 64 accumulator in lanes 16-31 of every 32, as its address says."""
    lanes = np.arange(LANES)
    if cta_group == 1:
        if m == 64:
            rows = np.arange(64)
            lanes = 32 * (rows // 16) + rows % 16 + (16 if upper_half else 0)
        return (AccumulatorBlock(cta=0, lanes=lanes, rows=slice(0, m), a_rows=slice(0, m), columns=slice(0, n)),)
    per_cta = m // 2
    halves = (slice(0, n),) if m == 256 else (slice(0, n // 2), slice(n // 2, n))
    return tuple(
        AccumulatorBlock(
            cta=cta,
            lanes=lanes[per_cta * i : per_cta * (i + 1)],
            rows=slice(per_cta * cta, per_cta * (cta + 1)),
            a_rows=slice(0, per_cta),
            columns=columns,
        )
        for cta in range(2)
        for i, columns in enumerate(halves)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CopyShape:
    """One shape of tcgen05.cp: every row of the source goes to each of its lanes, columns in order."""

    row_bytes: int
    lanes: Indices  # [rows, copies]


def _copies(rows: int, *offsets: int) -> Indices:
    return np.arange(rows)[:, None] + np.array(offsets)


_ROW = np.arange(64)[:, None]
COPY_SHAPES = {
    "128x256b": CopyShape(row_bytes=32, lanes=_copies(128, 0)),
    "128x128b": CopyShape(row_bytes=16, lanes=_copies(128, 0)),
    "4x256b": CopyShape(row_bytes=32, lanes=32 * np.arange(4)[:, None]),
    "64x128b.warpx2::02_13": CopyShape(row_bytes=16, lanes=_copies(64, 0, 64)),
    "64x128b.warpx2::01_23": CopyShape(row_bytes=16, lanes=64 * (_ROW // 32) + _ROW % 32 + np.array([0, 32])),
    "32x128b.warpx4": CopyShape(row_bytes=16, lanes=_copies(32, 0, 32, 64, 96)),
}
