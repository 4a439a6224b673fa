"""Which rows a CTA has, and how it stores them one by one, where TMA would write those of another sequence."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import mma

__all__ = ["last_first", "store_rows"]

WARPGROUP = 128
WARPGROUP_ROWS = 64
VECTOR = 8  # 16-bit elements in 16 bytes


def last_first() -> Int32:
    """The tile of the CTA, where those that start first have the last ones."""
    return cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]


@cute.jit
def store_rows(
    tile: cute.Tensor,
    target: cute.Pointer,
    row_stride: Int64,
    rows: Int32,
    columns: cutlass.Constexpr,
    head_dim: cutlass.Constexpr,
    barrier: Int32,
    tile_rows: cutlass.Constexpr = WARPGROUP_ROWS,
) -> None:
    """The first `rows` of a `k_major` tile (tile_rows, columns), without padded columns, by the calling warpgroup.

    `barrier` is a named barrier of the warpgroup: behind it nobody reads the tile any more.
    """
    thread, slab = cute.arch.thread_idx()[0] % WARPGROUP, mma.slab_columns(columns)
    vectors = head_dim // VECTOR  # of a row
    for vector in cutlass.range(thread, cutlass.min(rows, tile_rows) * vectors, WARPGROUP, unroll=1):
        row, column = vector // vectors, vector % vectors * VECTOR
        source = (tile.iterator + mma.swizzled(row, column, tile_rows, slab)).align(16)
        place = (target + (row * row_stride + column)).align(16)
        values = cute.make_tensor(source, cute.make_layout(VECTOR)).load()
        cute.make_tensor(place, cute.make_layout(VECTOR)).store(values)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
