"""Hopper backward, first kernel: two numbers a query, and zeros where dq will be summed.

    lse_log2 = lse * log2(e)                    +inf where lse is -inf and beyond q_len: there every weight becomes 0
    delta    = sum(out * dout) - dlse           0 there
    dq_sum   = 0                                unless the main kernel stores what comes first
    dq_turn  = 0                                if it counts what has been added, but 1 where it need not store
    dq_done  = 0                                if there is that

A CTA has a thread for each of its tile_m queries of one head. Parameters in order, as `PreprocessConfig.params` lists
them:

    out, dout   map   (head_dim_v, q_len, q_heads, batch)   box (64, tile_m, 1, 1), swizzle 128 bytes
    lse, dlse   float32*  [batch, q_heads, q_len]
    lse_log2, delta   float32*  [batch, q_heads, padded_q_len]
    dq_sum      float32*  [batch, q_heads, padded_q_len, sum_columns]
    dq_turn     int32*    [batch, q_heads, ceil(q_len / tile_m), dq_parts]; only if deterministic or stores_dq
    dq_done     int32*    [batch, kv_heads]; only with counts_adders
    q_schedule  int32*    as core/schedule.py lists tiles, in the order "slots"; only with has_cu_seqlens
    q_len q_heads kv_heads   int32 each
    q_slots     int32     places of a batch entry's tiles; only with has_cu_seqlens

Grid (ceil(q_len / tile_m) * q_heads * batch, 1, 1), block (tile_m, 1, 1). With has_cu_seqlens a tile is one of a packed
sequence, lse_log2, delta, dq_sum and dq_turn have q_slots tiles, and so has the grid; a place without rows stays as it
is: nobody reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..core.barriers import Edge, make_pipelines
from ..core.packed import SlotRows, slot_rows
from ..core.softmax import LOG2_E
from ..core.tma import Corner, fetch
from . import mma
from .rows import last_first

if TYPE_CHECKING:
    from jax_fa4.configs import PreprocessConfig

__all__ = ["PreprocessSm90"]

VECTOR = 8  # 16-bit elements in 16 bytes
FLOAT_VECTOR = 4


class Arrays(NamedTuple):
    """Addresses of float32 arrays."""

    lse: cute.Pointer
    dlse: cute.Pointer
    lse_log2: cute.Pointer
    delta: cute.Pointer
    dq_sum: cute.Pointer
    dq_turn: cute.Pointer | None
    dq_done: cute.Pointer | None
    q_schedule: cute.Pointer | None


class Tile(NamedTuple):
    """Where a tile lies."""

    index: Int32  # among all
    batch: Int32
    head: Int32  # query head, over all of the batch
    q_head: Int32
    is_grouped: Boolean  # query heads share kv heads: they need zeros to add to, unless the order matters


class PreprocessSm90:
    """The preprocess kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: PreprocessConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        warps = config.threads // 32
        self.edges = (Edge(name="rows", stages=1, tx_bytes=2 * config.dout_bytes, consumer_warps=warps),)

    @cute.jit
    def launch(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        arrays: Arrays,
        q_len: Int32,
        q_heads: Int32,
        kv_heads: Int32,
        q_slots: Int32 | None,
    ) -> None:
        """`out` and `dout` are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        load = cpasync.CopyBulkTensorTileG2SOp()
        out_map, dout_map = (mma.tma_atom(load, array, config.tile_m, config.v_columns) for array in (out, dout))
        self.kernel(out_map, dout_map, arrays, q_len, q_heads, kv_heads, q_slots).launch(
            grid=(q_heads, 1, 1), block=(config.threads, 1, 1), smem=config.smem_bytes
        )

    @cute.kernel
    def kernel(
        self,
        out_map: cute.CopyAtom,
        dout_map: cute.CopyAtom,
        arrays: Arrays,
        q_len: Int32,
        q_heads: Int32,
        kv_heads: Int32,
        q_slots: Int32 | None,
    ) -> None:
        cute.arch.griddepcontrol_launch_dependents()  # they wait for this grid's end by themselves
        if cutlass.const_expr(q_slots is not None):
            cute.arch.griddepcontrol_wait()  # the schedule is complete
        m_blocks = (q_len + (self.config.tile_m - 1)) // self.config.tile_m if q_slots is None else q_slots
        index = last_first()  # the main kernel finds in L2 what it begins with
        head = index // m_blocks  # over all of the batch
        m_block = index - head * m_blocks
        batch = head // q_heads
        if cutlass.const_expr(arrays.dq_done is not None):
            self.clear_count(arrays.dq_done, m_block, head, q_heads // kv_heads)
        tile = Tile(index, batch, head, head - batch * q_heads, q_heads > kv_heads)
        if cutlass.const_expr(q_slots is None):
            rows = SlotRows(0, q_len, q_len, m_block * self.config.tile_m)
            self.prepare(out_map, dout_map, arrays, rows, q_len, tile)
        else:
            rows = slot_rows(arrays.q_schedule, batch * m_blocks + m_block, q_len, self.config.tile_m)
            if rows.first < rows.room:
                self.prepare(out_map, dout_map, arrays, rows, q_len, tile)

    @cute.jit
    def clear_count(self, dq_done: cute.Pointer, m_block: Int32, head: Int32, group: Int32) -> None:
        """Nobody has added to dq yet: the first tile of a kv head's first query head says so."""
        if (m_block == 0) & (head % group == 0) & (cute.arch.thread_idx()[0] == 0):
            cute.make_tensor(dq_done + head // group, cute.make_layout(1))[0] = Int32(0)

    @cute.jit
    def prepare(
        self,
        out_map: cute.CopyAtom,
        dout_map: cute.CopyAtom,
        arrays: Arrays,
        rows: SlotRows,
        q_len: Int32,
        tile: Tile,
    ) -> None:
        """The tile's two numbers a query, and zeros."""
        config, index = self.config, Int64(tile.index)
        smem = cutlass.memory.SmemAllocator()
        out = mma.tiles(smem, self.dtype, config.tile_m, config.v_columns, 1)
        dout = mma.tiles(smem, self.dtype, config.tile_m, config.v_columns, 1)
        producer, consumer = make_pipelines(self.edges)["rows"]
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            slot = producer.acquire()
            corner = Corner(rows.begin + rows.first, tile.q_head, tile.batch)
            for atom, target in ((out_map, out), (dout_map, dout)):
                fetch(atom, (config.tile_m, config.v_columns), corner, target[None, None, 0], slot)
        if cutlass.const_expr(not (config.stores_dq and config.deterministic)):
            is_needed = tile.is_grouped if config.stores_dq else Boolean(True)
            self.clear(arrays.dq_sum + index * config.dq_tile_floats, is_needed)

        thread = cute.arch.thread_idx()[0]
        row = rows.first + thread
        if cutlass.const_expr(arrays.dq_turn is not None):
            turn = Int32(0)
            if cutlass.const_expr(not config.deterministic):
                turn = Int32(tile.is_grouped)
            self.set_turns(arrays.dq_turn, index, thread, turn)
        lse, dlse = Float32(-Float32.inf), Float32(0.0)
        if row < rows.length:
            element = Int64(tile.head) * q_len + rows.begin + row
            lse = cute.make_tensor(arrays.lse + element, cute.make_layout(1))[0]
            dlse = cute.make_tensor(arrays.dlse + element, cute.make_layout(1))[0]
        consumer.wait()  # out and dout have landed
        delta = self.dot(out, dout, thread) - dlse

        empty = lse == -Float32.inf
        element = index * config.tile_m + thread
        lse_log2 = cute.make_tensor(arrays.lse_log2 + element, cute.make_layout(1))
        lse_log2[0] = Float32(cutlass.select_(empty, Float32(Float32.inf), lse * LOG2_E))
        row_delta = cute.make_tensor(arrays.delta + element, cute.make_layout(1))
        row_delta[0] = Float32(cutlass.select_(empty, Float32(0.0), delta))

    def dot(self, out: cute.Tensor, dout: cute.Tensor, row: Int32) -> Float32:
        """sum(out * dout) of a row, in float32."""
        total = Float32(0.0)
        for column in range(0, self.config.head_dim_v, VECTOR):
            offset = mma.swizzled(row, column, self.config.tile_m)
            a, b = (_vector(t.iterator, offset, VECTOR).load().to(Float32) for t in (out, dout))
            for i in range(VECTOR):
                total = cute.math.fma(a[i], b[i], total)
        return total

    @cute.jit
    def set_turns(self, dq_turn: cute.Pointer, tile: Int64, thread: Int32, turn: Int32) -> None:
        """So much has been added to every warpgroup's part of the tile's dq."""
        if thread < self.config.dq_parts:
            turns = cute.make_tensor(dq_turn + (tile * self.config.dq_parts + thread), cute.make_layout(1))
            turns[0] = turn

    @cute.jit
    def clear(self, dq_tile: cute.Pointer, is_needed: Boolean) -> None:
        """Zeroes the tile's dq, neighbouring threads at neighbouring addresses."""
        if is_needed:
            zeros = cute.make_rmem_tensor(FLOAT_VECTOR, Float32)
            zeros.fill(0.0)
            for i in cutlass.range_constexpr(self.config.sum_columns // FLOAT_VECTOR):
                offset = (i * self.config.threads + cute.arch.thread_idx()[0]) * FLOAT_VECTOR
                _vector(dq_tile, offset, FLOAT_VECTOR).store(zeros.load())


def _vector(pointer: cute.Pointer, offset: Int32 | Int64, count: int) -> cute.Tensor:
    """`count` elements that fill 16 bytes, on a 16-byte boundary."""
    return cute.make_tensor((pointer + offset).align(16), cute.make_layout(count))
