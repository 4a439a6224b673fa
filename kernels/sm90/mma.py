"""Hopper's matrix products: tiles in shared memory, wgmma batches, and where a thread's accumulators lie."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Numeric
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..core import ptx
from ..core.mask import Place

__all__ = [
    "K_EXTENT",
    "batch",
    "block_of",
    "k_major",
    "keep_rows",
    "mn_major",
    "pack",
    "place",
    "products",
    "queries_mma",
    "rows_and_columns",
    "scale_rows",
    "scores_mma",
    "slab_columns",
    "swizzled",
    "tiles",
    "tma_atom",
    "transposed",
    "values_mma",
]

WARPGROUP_ROWS = 64
K_EXTENT = 16  # of a 16-bit wgmma
SLAB = 64  # 16-bit columns of a swizzle atom
ALIGNMENT = 1024  # bytes, as the swizzle wants it


def k_major(dtype: type[Numeric], rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(rows, columns, stages), columns contiguous: swizzled slabs, one behind the other, of 128 bytes a row.

    Where 128 bytes don't divide a row, slabs are of 64 or 32 bytes.
    """
    atom = warpgroup.make_smem_layout_atom(_atom_kind("K", dtype, columns), dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def mn_major(dtype: type[Numeric], rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(columns, rows, stages): the same bytes as `k_major`, seen transposed."""
    atom = warpgroup.make_smem_layout_atom(_atom_kind("MN", dtype, columns), dtype)
    return cute.tile_to_shape(atom, (columns, rows, stages), order=(1, 0, 2))


def tiles(
    smem: cutlass.memory.SmemAllocator, dtype: type[Numeric], rows: int, columns: int, stages: int
) -> cute.Tensor:
    """Allocates what `k_major` describes."""
    layout = k_major(dtype, rows, columns, stages)
    return smem.allocate_tensor(dtype, layout.outer, ALIGNMENT, layout.inner)


def transposed(tiles: cute.Tensor, rows: int, columns: int, stages: int) -> cute.Tensor:
    """The same bytes, as `mn_major` describes them."""
    return cute.make_tensor(tiles.iterator, mn_major(tiles.element_type, rows, columns, stages).outer)


def tma_atom(op: Any, array: cute.Tensor, rows: int, columns: int) -> cute.CopyAtom:
    """The copy `op` between a block of an array (seq, head_dim, heads, batch) and one tile."""
    layout = k_major(array.element_type, rows, columns, 1)
    return cpasync.make_tiled_tma_atom(op, array, layout, (rows, columns))[0]


def swizzled(row: Int32, column: Int32, rows: int, slab: int = SLAB) -> Int32:
    """Element of a `k_major` tile of `rows` rows, from its start: 16-byte pieces of a row trade places by row.

    `slab` is what `slab_columns` says of the tile: what repeats is 8 pieces of 128 bytes, which are one or more rows.
    """
    pieces = slab // 8
    turn = row % 8 if slab == SLAB else row // (SLAB // slab) % pieces
    return column // slab * (rows * slab) + row * slab + (column % slab // 8 ^ turn) * 8 + column % 8


def slab_columns(columns: int) -> int:
    """16-bit columns of one row of the atom that `k_major` takes for tiles of so many."""
    return next(slab for slab in (SLAB, SLAB // 2, SLAB // 4) if columns % slab == 0)


def _atom_kind(major: str, dtype: type[Numeric], columns: int) -> warpgroup.SmemLayoutAtomKind:
    width = slab_columns(columns) * dtype.width // 8
    return getattr(warpgroup.SmemLayoutAtomKind, f"{major}_SW{width}")


def scores_mma(dtype: type[Numeric], tile_n: int, *, in_registers: bool = False) -> cute.TiledMma:
    """S [64, tile_n] = Q K^T of one warpgroup, K in shared memory, Q there or in registers."""
    source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
    return _mma(dtype, tile_n, source, OperandMajorMode.K)


def values_mma(dtype: type[Numeric], head_dim_v: int) -> cute.TiledMma:
    """O [64, head_dim_v] += P V of one warpgroup, P in registers; so are dV += P^T dO and dK += dS^T Q."""
    return _mma(dtype, head_dim_v, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)


def queries_mma(dtype: type[Numeric], columns: int) -> cute.TiledMma:
    """dQ [64, columns] = dS K of one warpgroup, both operands in smem, contiguous along queries and columns."""
    return _mma(dtype, columns, warpgroup.OperandSource.SMEM, OperandMajorMode.MN, OperandMajorMode.MN)


def _mma(
    dtype: type[Numeric],
    n: int,
    a_source: warpgroup.OperandSource,
    b_major: OperandMajorMode,
    a_major: OperandMajorMode = OperandMajorMode.K,
) -> cute.TiledMma:
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (WARPGROUP_ROWS, n, K_EXTENT), a_source, a_major, b_major)
    return cute.make_tiled_mma(op)


def batch(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, *, accumulate: bool, steps: int | None = None
) -> None:
    """Issues acc (+)= a b as one commit group of wgmma; `a` and `b` are fragments (MMA, 1, K).

    `steps`: of K_EXTENT elements, if fewer than the fragments have.
    """
    products(mma, acc, a, b, range(cute.size(a, mode=[2]) if steps is None else steps), accumulate=accumulate)
    warpgroup.commit_group()


def products(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, steps: range, *, accumulate: bool
) -> None:
    """Issues some steps of acc (+)= a b, of a commit group that goes on."""
    for k in steps:
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > steps.start)
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, n / 8), 1, 1) as [2 rows, n / 4 columns]."""
    pair, rows, blocks = acc.shape[0]
    pair_stride, row_stride, block_stride = acc.stride[0]
    layout = cute.make_layout((rows, (pair, blocks)), stride=(row_stride, (pair_stride, block_stride)))
    return cute.make_tensor(acc.iterator, layout)


def block_of(scores: cute.Tensor, block: int) -> cute.Tensor:
    """A copy of a thread's [2, 2] scores in a block of eight columns, from those as `rows_and_columns` gives them."""
    part = cute.make_rmem_tensor((2, 2), Float32)
    for r in range(2):
        for c in range(2):
            part[r, c] = scores[r, 2 * block + c]
    return part


def pack(dtype: type[Numeric], scores: cute.Tensor, weights: cute.Tensor) -> None:
    """P in 16 bit: a thread's elements of the accumulator S are its elements of the A operand, in the same order."""
    scores = cute.coalesce(scores)
    pairs = cute.recast_tensor(cute.coalesce(weights), Int32)
    for i in range(cute.size(pairs)):
        pairs[i] = ptx.cvt_pair(dtype, scores[2 * i], scores[2 * i + 1])


def scale_rows(acc: cute.Tensor, factors: cute.Tensor | list[Float32]) -> None:
    """Multiplies each row of an accumulator by its factor, in place."""
    elements = rows_and_columns(acc)
    for r in range(2):
        for c in range(cute.size(elements, mode=[1])):
            elements[r, c] = elements[r, c] * factors[r]


def keep_rows(acc: cute.Tensor, kept: list[Boolean]) -> None:
    """Zeroes the rows of an accumulator that are not kept, even where they hold NaN."""
    elements = rows_and_columns(acc)
    for r in range(2):
        for c in range(cute.size(elements, mode=[1])):
            elements[r, c] = Float32(cutlass.select_(kept[r], elements[r, c], Float32(0.0)))


def place(first_row: Int32, thread: Int32, tile_n: int) -> Place:
    """Where a thread of the warpgroup that starts at query `first_row` has its elements (PTX ISA, wgmma: matrix D)."""
    warp, lane = thread // 32, thread % 32
    row = first_row + warp * 16 + lane // 4
    columns = tuple(8 * block + pair for block in range(tile_n // 8) for pair in range(2))
    return Place(rows=(row, row + 8), first_column=2 * (lane % 4), columns=columns)
