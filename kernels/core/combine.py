"""Merges the partial results of splits of a sequence: a warp makes some columns of one query of one head.

A split whose lse is -inf has seen no key: its out is not added. Splits that have seen keys come first, so what is read
ends with the last of them; where they have been counted there are no others. `merge` says what is computed; splits are
added up one after the other, so what is added in which order depends on the splits with keys alone.

Shared memory is not used and registers are few, so that CTAs fit beside two of the kernel ahead on every SM: they stand
there when it ends.

Parameters in order, as `CombineConfig.params` lists them:

    partial_out   float32*  [batch, kv_heads, num_splits, q_len, group, head_dim_v]
    partial_lse   float32*  [batch, kv_heads, q_len, group, num_splits]
    out           16-bit*   [batch, q_len, q_heads, head_dim_v] by strides, head_dim_v contiguous
    lse           float32*  [batch, q_heads, q_len]
    q_lengths     int32*    [batch, kv_heads] queries beyond are padding: out 0, lse -inf; only with has_q_lengths
    split_counts  int32*    [batch, kv_heads, q_len] splits that have results, -1: padding; only with has_split_counts
    sinks         float32*  [batch, q_heads]; only with has_sinks
    out_batch_stride out_row_stride out_head_stride     int64 each, elements
    q_len q_heads kv_heads batch num_splits             int32 each

Grid (ceil(q_len * group * kv_heads * batch * row_warps / 4), 1, 1), block (128, 1, 1). It may start before the kernel
that makes the partial results has ended, and waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from . import merge
from .divide import divide, divide_with_rest

if TYPE_CHECKING:
    from jax_fa4.configs import CombineConfig

__all__ = ["Arrays", "Combine", "Extents"]

LANES = 32


class Arrays(NamedTuple):
    """Addresses; None: compiled without."""

    partial_out: cute.Pointer
    partial_lse: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    q_lengths: cute.Pointer | None
    split_counts: cute.Pointer | None
    sinks: cute.Pointer | None


class Extents(NamedTuple):
    """Sizes of a call, and out's strides in elements."""

    out_batch_stride: Int64
    out_row_stride: Int64
    out_head_stride: Int64
    q_len: Int32
    q_heads: Int32
    kv_heads: Int32
    batch: Int32
    num_splits: Int32


class Row(NamedTuple):
    """Some columns of one query of one head."""

    index: Int32  # query * group + head of the group
    entry: Int32  # batch * kv_heads + kv_head
    query: Int32
    head: Int32  # of all query heads
    batch: Int32
    column: Int32  # the lane's first


class Combine:
    """The combine kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]

    @cute.jit
    def launch(self, arrays: Arrays, extents: Extents) -> None:
        """The grid is a placeholder: plans compute their own."""
        config = self.config
        self.kernel(arrays, extents).launch(
            grid=(extents.q_len, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,  # as the kernel ahead of it has: said, lest the DSL ask a device
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, extents: Extents) -> None:
        config, warp = self.config, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        number = cute.arch.block_idx()[0] * (config.threads // LANES) + warp
        number, part = divide_with_rest(number, config.row_warps)
        group = divide(extents.q_heads, extents.kv_heads)
        num_rows = extents.q_len * group
        entry, index = divide_with_rest(number, num_rows)
        if entry < extents.batch * extents.kv_heads:
            query, batch = divide(index, group), divide(entry, extents.kv_heads)
            head = (entry - batch * extents.kv_heads) * group + (index - query * group)
            column = (part * LANES + cute.arch.lane_idx()) * config.lane_columns
            cute.arch.griddepcontrol_wait()  # the partial results are complete
            self.make(arrays, extents, Row(index, entry, query, head, batch, column))

    @cute.jit
    def make(self, arrays: Arrays, extents: Extents, row: Row) -> None:
        """The columns, from those of all splits."""
        columns, lane = self.config.lane_columns, cute.arch.lane_idx()
        num_rows = extents.q_len * divide(extents.q_heads, extents.kv_heads)
        lses = arrays.partial_lse + (Int64(row.entry) * num_rows + row.index) * extents.num_splits
        values = cute.make_rmem_tensor((columns, self.config.in_flight), Float32)
        self.read_splits(values, arrays, extents, row, Int32(0))  # before it is known how many count
        used, largest, sink = self.statistics(arrays, extents, row, lses)
        base_log2 = merge.base_of(largest)
        total = merge.weight(sink, base_log2)
        sums = cute.make_rmem_tensor(columns, Float32)
        sums.fill(0.0)
        for first in cutlass.range(0, used, self.config.in_flight, unroll=1):
            split = first + lane
            weight = merge.weight(_read(lses + cutlass.min(split, used - 1)), base_log2)
            weight = Float32(cutlass.select_(split < used, weight, Float32(0.0)))
            if first > 0:
                self.read_splits(values, arrays, extents, row, first)
            for i in cutlass.range_constexpr(self.config.in_flight):
                own = cute.arch.shuffle_sync(weight, i)
                total = total + own
                for j in cutlass.range_constexpr(columns):
                    sums[j] = sums[j] + merge.weighted(values[j, i], own)
        self.store(arrays, extents, row, used, base_log2, total, sums)

    def read_splits(self, values: cute.Tensor, arrays: Arrays, extents: Extents, row: Row, first: Int32) -> None:
        """The columns of the splits from `first` on; the last again where there are no more, as for lanes."""
        columns, dim = self.config.lane_columns, self.config.head_dim_v
        num_rows = extents.q_len * divide(extents.q_heads, extents.kv_heads)
        source = arrays.partial_out + (Int64(row.entry) * extents.num_splits * num_rows + row.index) * dim
        source = source + cutlass.min(row.column, dim - columns)
        for i in range(self.config.in_flight):
            split = cutlass.min(first + i, extents.num_splits - 1)
            place = (source + split * (Int64(num_rows) * dim)).align(4 * columns)
            values[None, i].store(cute.make_tensor(place, cute.make_layout(columns)).load())

    @cute.jit
    def statistics(
        self, arrays: Arrays, extents: Extents, row: Row, lses: cute.Pointer
    ) -> tuple[Int32, Float32, Float32]:
        """How many splits count, negative where padding has been counted, the largest logit of all, and the sink."""
        used, largest, counted = Int32(0), Float32(-Float32.inf), extents.num_splits
        if cutlass.const_expr(arrays.split_counts is not None):
            counted = _read(arrays.split_counts + (Int64(row.entry) * extents.q_len + row.query))
            # where offsets of sequences descend a query may have no tile, and nobody has counted
            counted = cutlass.min(counted, extents.num_splits)
        for split in cutlass.range(cute.arch.lane_idx(), extents.num_splits, LANES, unroll=4):
            lse = _read(lses + split)
            lse = Float32(cutlass.select_(split < counted, lse, Float32(-Float32.inf)))
            largest = cute.arch.fmax(largest, lse)
            used = Int32(cutlass.select_(lse != -Float32.inf, split + 1, used))  # NaN counts
        largest = cute.arch.warp_reduction_max(largest)
        if cutlass.const_expr(arrays.split_counts is not None):
            used = counted
        else:
            used = cute.arch.warp_redux_sync(used, "max")
        sink = Float32(-Float32.inf)
        if cutlass.const_expr(arrays.sinks is not None):
            sink = _read(arrays.sinks + (row.batch * extents.q_heads + row.head))
            largest = cute.arch.fmax(largest, sink)
        return used, largest, sink

    @cute.jit
    def store(
        self,
        arrays: Arrays,
        extents: Extents,
        row: Row,
        used: Int32,
        base_log2: Float32,
        total: Float32,
        sums: cute.Tensor,
    ) -> None:
        """Normalises the columns and rounds them; the lane of the first stores lse."""
        is_padding, columns = Boolean(False), self.config.lane_columns
        if cutlass.const_expr(arrays.q_lengths is not None):
            is_padding = row.query >= _read(arrays.q_lengths + row.entry)
        if cutlass.const_expr(arrays.split_counts is not None):
            is_padding = used < 0
        empty, factor, lse = merge.normalise(total, base_log2, is_padding)
        if row.column == 0:
            element = (Int64(row.batch) * extents.q_heads + row.head) * extents.q_len + row.query
            cute.make_tensor(arrays.lse + element, cute.make_layout(1))[0] = lse
        if row.column < self.config.head_dim_v:
            out = arrays.out + (row.batch * extents.out_batch_stride + row.query * extents.out_row_stride)
            out = out + (row.head * extents.out_head_stride + row.column)
            rounded = cute.make_rmem_tensor(columns, self.dtype)
            for j in cutlass.range_constexpr(columns):
                rounded[j] = self.dtype(cutlass.select_(empty, Float32(0.0), sums[j] * factor))  # padding may be NaN
            cute.make_tensor(out.align(2 * columns), cute.make_layout(columns)).store(rounded.load())


def _read(pointer: cute.Pointer) -> Float32 | Int32:
    """The one element at `pointer`."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
