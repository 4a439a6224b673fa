"""Rows that TMA can't copy as a tile, heads of a group or keys in small pages: by cp.async, 16 bytes a lane."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..core.divide import divide_with_rest
from . import mma, ptx

__all__ = ["Source", "gather"]

PIECE_BYTES = 16
UNROLL = 8  # addresses, which may come from a page table, are found side by side


class Source(NamedTuple):
    """Where the elements of a row come from; what isn't `present` becomes 0."""

    start: cute.Pointer
    present: Boolean


@cute.jit
def gather(
    target: cute.Tensor,
    shape: cutlass.Constexpr,
    head_dim: cutlass.Constexpr,
    lane: Int32,
    lanes: cutlass.Constexpr,
    find: cutlass.Constexpr,
) -> None:
    """Starts copies into a tile of `shape`, (rows, columns), by `lanes` lanes; columns behind head_dim become 0.

    `find` tells the source of a row: Int32 -> Source.
    """
    rows, columns = shape
    pieces = columns // mma.PIECE
    for turn in cutlass.range(rows * pieces // lanes, unroll=UNROLL):
        row, piece = divide_with_rest(turn * lanes + lane, pieces)
        source = find(row)
        column = piece * mma.PIECE
        size = Int32(cutlass.select_(source.present & (column < head_dim), Int32(PIECE_BYTES), Int32(0)))
        place = target.iterator + mma.piece(row, column, rows, columns)
        ptx.cp_async(place, source.start + cutlass.min(column, head_dim - mma.PIECE), size)
