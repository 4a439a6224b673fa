"""Merges the partial results of splits of a sequence: all warps of a CTA make one query of one head, or one each.

    weight_s = exp(lse_s - max lse),   out = sum(weight_s * out_s) / sum(weight_s),   lse = max lse + log(sum(weight_s))

A split whose lse is -inf has seen no key: its out is not read. A sink is one more logit, of no value. Splits that have
seen keys come first, so what is read ends with the last of them; where they have been counted there are no others.

What is added in which order depends on the number of splits with keys alone: warp w of 8 adds up splits w, w + 8, ...,
and then all are added up; a warp that is alone, where there are no more than 8, adds up 0, 1, ... to the same bits.

Parameters in order, as `CombineConfig.params` lists them:

    partial_out   float32*  [batch, kv_heads, num_splits, q_len, group, head_dim_v]
    partial_lse   float32*  [batch, kv_heads, q_len, group, num_splits]
    out           16-bit*   [batch, q_len, q_heads, head_dim_v] by strides, head_dim_v contiguous
    lse           float32*  [batch, q_heads, q_len]
    q_lengths     int32*    [batch, kv_heads] queries beyond are padding: out 0, lse -inf; only with has_q_lengths
    split_counts  int32*    [batch, kv_heads, q_len] splits that have results, -1: padding; only with has_split_counts
    sinks         float32*  [batch, q_heads]; only with has_sinks
    out_batch_stride out_row_stride out_head_stride     int64 each, elements
    q_len q_heads kv_heads batch num_splits row_warps   int32 each; row_warps (8, or 1 for up to 8 splits) make one row

Grid (ceil(q_len * group * kv_heads * batch * row_warps / 8), 1, 1), block (256, 1, 1). It may start before the kernel
that makes the partial results has ended, and waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .divide import divide, divide_with_rest
from .softmax import LN_2, LOG2_E

if TYPE_CHECKING:
    from jax_fa4.configs import CombineConfig

__all__ = ["Arrays", "Combine", "Extents"]

LANES = 32
VECTOR = 4  # floats in 16 bytes
CTAS_PER_SM = 4  # leave registers for what is in flight
IN_FLIGHT = 8  # splits that a warp reads at a time: one by one each would take as long as all


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
    row_warps: Int32


class Row(NamedTuple):
    """One query of one head."""

    index: Int32  # query * group + head of the group
    entry: Int32  # batch * kv_heads + kv_head
    query: Int32
    head: Int32  # of all query heads
    batch: Int32
    part: Int32  # of its splits, that of the warp


class Combine:
    """The combine kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.vectors = -(-config.head_dim_v // (LANES * VECTOR))  # of a lane

    @cute.jit
    def launch(self, arrays: Arrays, extents: Extents) -> None:
        """The grid is a placeholder: plans compute their own."""
        config = self.config
        self.kernel(arrays, extents).launch(
            grid=(extents.q_len, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,  # as the kernel ahead of it has: said, lest the DSL ask a device
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, extents: Extents) -> None:
        smem = cutlass.memory.SmemAllocator()
        warps = self.config.threads // LANES
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.config.head_dim_v, warps)), 16)
        totals = smem.allocate_tensor(Float32, cute.make_layout(warps), 16)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slot, part = divide_with_rest(warp, extents.row_warps)
        number = cute.arch.block_idx()[0] * divide(warps, extents.row_warps) + slot
        group = divide(extents.q_heads, extents.kv_heads)
        num_rows = extents.q_len * group
        entries = extents.batch * extents.kv_heads
        entry, index = divide_with_rest(cutlass.min(number, entries * num_rows - 1), num_rows)
        query, batch = divide(index, group), divide(entry, extents.kv_heads)
        head = (entry - batch * extents.kv_heads) * group + (index - query * group)
        row = Row(index, entry, query, head, batch, part)
        cute.arch.griddepcontrol_wait()  # the partial results are complete
        lses = arrays.partial_lse + (Int64(entry) * num_rows + index) * extents.num_splits
        used, largest, sink = self.statistics(arrays, extents, row, lses)
        base_log2 = Float32(cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)) * LOG2_E
        self.sum_splits(arrays, extents, row, lses, used, sink, base_log2, sums, totals)
        cute.arch.sync_threads()
        if number < entries * num_rows:
            self.store(arrays, extents, row, used, base_log2, warp - part, sums, totals)

    @cute.jit
    def statistics(
        self, arrays: Arrays, extents: Extents, row: Row, lses: cute.Pointer
    ) -> tuple[Int32, Float32, Float32]:
        """How many splits to read, negative where padding has been counted, the largest logit of all, and the sink."""
        used, largest, num_splits = Int32(0), Float32(-Float32.inf), extents.num_splits
        if cutlass.const_expr(arrays.split_counts is not None):
            num_splits = _read(arrays.split_counts + (Int64(row.entry) * extents.q_len + row.query))
            # where offsets of sequences descend a query may have no tile, and nobody has counted
            num_splits = cutlass.min(num_splits, extents.num_splits)
        for split in cutlass.range(cute.arch.lane_idx(), num_splits, LANES, unroll=4):
            lse = _read(lses + split)
            largest = cute.arch.fmax(largest, lse)
            used = Int32(cutlass.select_(lse != -Float32.inf, split + 1, used))  # NaN counts
        largest = cute.arch.warp_reduction_max(largest)
        if cutlass.const_expr(arrays.split_counts is not None):
            used = num_splits
        else:
            used = cute.arch.warp_redux_sync(used, "max")
        sink = Float32(-Float32.inf)
        if cutlass.const_expr(arrays.sinks is not None):
            sink = _read(arrays.sinks + (row.batch * extents.q_heads + row.head))
            largest = cute.arch.fmax(largest, sink)
        return used, largest, sink

    @cute.jit
    def sum_splits(
        self,
        arrays: Arrays,
        extents: Extents,
        row: Row,
        lses: cute.Pointer,
        used: Int32,
        sink: Float32,
        base_log2: Float32,
        sums: cute.Tensor,
        totals: cute.Tensor,
    ) -> None:
        """The warp's part of both sums over splits, to shared memory; the sink is in the first part."""
        dim, lane, warp = self.config.head_dim_v, cute.arch.lane_idx(), cute.arch.warp_idx()
        total = cute.math.exp2(cute.math.fma(sink, Float32(LOG2_E), -base_log2), fastmath=True)
        total = Float32(cutlass.select_(row.part == 0, total, Float32(0.0)))
        parts = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
        parts.fill(0.0)
        num_rows = extents.q_len * divide(extents.q_heads, extents.kv_heads)
        source = arrays.partial_out + (Int64(row.entry) * extents.num_splits * num_rows + row.index) * dim
        for first in cutlass.range(row.part, used, extents.row_warps * IN_FLIGHT, unroll=1):
            splits = [first + i * extents.row_warps for i in range(IN_FLIGHT)]
            last = [cutlass.min(split, used - 1) for split in splits]  # read again where there are no more
            exponents = [_read(lses + split) for split in last]
            values = [self.read_part(source + split * (Int64(num_rows) * dim), lane) for split in last]
            for split, exponent, value in zip(splits, exponents, values, strict=True):
                weight = cute.math.exp2(cute.math.fma(exponent, Float32(LOG2_E), -base_log2), fastmath=True)
                weight = Float32(cutlass.select_(split < used, weight, Float32(0.0)))
                total = total + weight
                for i in cutlass.range_constexpr(self.vectors):
                    for j in cutlass.range_constexpr(VECTOR):
                        # what a row that saw no key of the split has there may be NaN
                        term = Float32(cutlass.select_(weight == 0.0, Float32(0.0), value[i][j] * weight))
                        parts[j, i] = parts[j, i] + term
        for i in cutlass.range_constexpr(self.vectors):
            column = (i * LANES + lane) * VECTOR
            if column < dim:
                target = (sums.iterator + (warp * dim + column)).align(16)
                cute.make_tensor(target, cute.make_layout(VECTOR)).store(parts[None, i].load())
        if lane == 0:
            totals[warp] = total

    def read_part(self, row: cute.Pointer, lane: Int32) -> list[cute.TensorSSA]:
        """The lane's vectors of one row; lanes behind the last column read some that others have."""
        vectors = []
        for i in range(self.vectors):
            column = cutlass.min((i * LANES + lane) * VECTOR, self.config.head_dim_v - VECTOR)
            vectors.append(cute.make_tensor((row + column).align(16), cute.make_layout(VECTOR)).load())
        return vectors

    @cute.jit
    def store(
        self,
        arrays: Arrays,
        extents: Extents,
        row: Row,
        used: Int32,
        base_log2: Float32,
        first_warp: Int32,
        sums: cute.Tensor,
        totals: cute.Tensor,
    ) -> None:
        """Adds up the parts of the row's warps, `first_warp` and those behind it; a thread stores pairs of columns."""
        total, thread = Float32(0.0), row.part * LANES + cute.arch.lane_idx()
        for warp in cutlass.range(first_warp, first_warp + extents.row_warps, unroll=1):
            total = total + totals[warp]
        empty = total == 0.0
        if cutlass.const_expr(arrays.q_lengths is not None):
            empty = empty | (row.query >= _read(arrays.q_lengths + row.entry))
        if cutlass.const_expr(arrays.split_counts is not None):
            empty = empty | (used < 0)
        factor = Float32(cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total)))
        lse = (base_log2 + cute.math.log2(total, fastmath=True)) * LN_2
        if thread == 0:
            element = (Int64(row.batch) * extents.q_heads + row.head) * extents.q_len + row.query
            target = cute.make_tensor(arrays.lse + element, cute.make_layout(1))
            target[0] = Float32(cutlass.select_(empty, Float32(-Float32.inf), lse))
        out = arrays.out + (row.batch * extents.out_batch_stride + row.query * extents.out_row_stride)
        out = out + row.head * extents.out_head_stride
        for column in cutlass.range(thread * 2, self.config.head_dim_v, extents.row_warps * (LANES * 2), unroll=1):
            values = cute.make_rmem_tensor(2, Float32)
            values.fill(0.0)
            for warp in cutlass.range(first_warp, first_warp + extents.row_warps, unroll=1):
                for j in cutlass.range_constexpr(2):
                    values[j] = values[j] + sums[column + j, warp]
            rounded = cute.make_rmem_tensor(2, self.dtype)
            for j in cutlass.range_constexpr(2):
                # padding may be NaN
                rounded[j] = self.dtype(cutlass.select_(empty, Float32(0.0), values[j] * factor))
            cute.make_tensor((out + column).align(4), cute.make_layout(2)).store(rounded.load())


def _read(pointer: cute.Pointer) -> Float32 | Int32:
    """The one element at `pointer`."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
