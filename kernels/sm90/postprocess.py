"""Hopper backward, last kernel: dq = softmax_scale * dq_sum, rounded to the inputs' type.

`dq_sum` holds tiles in the order of registers, see `BackwardSm90.hand_over`. With counts_adders CTAs start while the
main kernel's last ones run, on multiprocessors that have none of these, and wait for those that add to the dq of their
head: a grid of equal tiles seldom ends on all multiprocessors at once.

A CTA turns tile_m queries of one head. Parameters in order, as `PostprocessConfig.params` lists them:

    dq             map       (head_dim, q_len, q_heads, batch)   box (64, tile_m, 1, 1), swizzle 128 bytes
    dq_sum         float32*  [batch, q_heads, padded_q_len, sum_columns]
    softmax_scale  float32*  one element
    dq_turn        int32*    [batch, q_heads, ceil(q_len / tile_m), dq_parts]; only with stores_dq: 0 where no key has
                             been visited, so that dq is 0 whatever dq_sum holds
    q_len q_heads  int32 each
    dq_done        int32*    [batch, kv_heads]: how many have added all that they have to dq of its query heads;
                             only with counts_adders, like
    kv_heads       int32
    dq_adders      int32     how many there are of each; with has_cu_seqlens that follows from kv_schedule, and numbers
                             of batch entry 0 are those of all
    q_schedule     int32*    as core/schedule.py lists tiles, in the order "slots"; only with has_cu_seqlens, like
    kv_schedule    int32*    of keys, in the order "sequences"; only with counts_adders, too
    dq             the config's type*  [batch, q_len, q_heads, head_dim] by strides: its address, again, and
    dq_*_stride    int64 each, * batch, row, head: in elements
    q_slots        int32     places of a batch entry's tiles

or, where CTAs of the main kernel have shared a kv head's query heads, tile_m keys of a kv head:

    dk, dv          map       (head_dim, kv_len, kv_heads, batch)   likewise; one of both
    dk_sum, dv_sum  float32*  [batch, kv_heads, head_splits, padded_kv_len, head_dim] parts in tiles
    softmax_scale   float32*  one element; not for dv
    kv_len kv_heads head_splits   int32 each

Grid (ceil(q_len / tile_m) * q_heads * batch, 1, 1), of keys likewise, block (128, 1, 1). With has_cu_seqlens a tile is
one of a packed sequence, dq_sum has q_slots tiles, and so has the grid; a tile that is not full is stored row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..core import ptx
from ..core.barriers import NamedBarrierId
from ..core.packed import SlotRows, read_count, slot_rows
from ..core.rows import GlobalRows
from ..core.tma import Corner, partition
from . import mma
from .rows import last_first, store_rows

if TYPE_CHECKING:
    from jax_fa4.configs import PostprocessConfig

__all__ = ["Adders", "PackedQueries", "PostprocessSm90"]

VECTOR = 4  # floats in 16 bytes
WARPGROUP = 128
SLAB = 64  # columns of a swizzle atom
LATE_ADDERS = 4 * 132  # that may still add when the first CTAs run: two for each of the last two CTAs of an H200's SMs


class PackedQueries(NamedTuple):
    """What a call with packed sequences has beside others."""

    schedule: cute.Pointer
    kv_schedule: cute.Pointer | None  # only with adders
    dq: GlobalRows
    q_slots: Int32


class Source(NamedTuple):
    """A tile in float32, or several of which the sum is meant."""

    tile: cute.Pointer
    turn: cute.Pointer | None  # of its first part; None: all are meant
    scale: Float32
    parts: Int32 | None  # None: one
    part_floats: Int64  # from one to the next


class Adders(NamedTuple):
    """Who adds to dq while this kernel runs."""

    done: cute.Pointer  # [batch, kv_heads] int32: how many have added all that they have
    kv_heads: Int32
    count: Int32  # of a kv head; of packed sequences more than there are


class PostprocessSm90:
    """The postprocess kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: PostprocessConfig) -> None:
        self.config = config
        self.columns = config.columns
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]

    @cute.jit
    def launch(
        self,
        dq: cute.Tensor,
        dq_sum: cute.Pointer,
        softmax_scale: cute.Pointer | None,
        dq_turn: cute.Pointer | None,
        q_len: Int32,
        q_heads: Int32,
        parts: Int32 | None,
        adders: Adders | None,
        packed: PackedQueries | None,
    ) -> None:
        """`dq`, or dk or dv, is (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        dq_map = mma.tma_atom(cpasync.CopyBulkTensorTileS2GOp(), dq, config.tile_m, self.columns)
        self.kernel(dq_map, dq_sum, softmax_scale, dq_turn, q_len, q_heads, parts, adders, packed).launch(
            grid=(q_heads, 1, 1), block=(config.threads, 1, 1), smem=config.smem_bytes
        )

    @cute.kernel
    def kernel(
        self,
        dq_map: cute.CopyAtom,
        dq_sum: cute.Pointer,
        softmax_scale: cute.Pointer | None,
        dq_turn: cute.Pointer | None,
        q_len: Int32,
        q_heads: Int32,
        parts: Int32 | None,
        adders: Adders | None,
        packed: PackedQueries | None,
    ) -> None:
        cute.arch.griddepcontrol_launch_dependents()  # they wait for this grid's end by themselves
        tile_m = self.config.tile_m
        m_blocks = (q_len + (tile_m - 1)) // tile_m if packed is None else packed.q_slots
        index = last_first()  # what has been summed last is still in L2
        if cutlass.const_expr(adders is None):
            cute.arch.griddepcontrol_wait()  # the sums are complete
        else:
            index = self.late_last(adders, packed, m_blocks, q_heads)
        head = index // m_blocks  # over all of the batch
        m_block = index - head * m_blocks
        batch = head // q_heads
        scale = Float32(1.0) if softmax_scale is None else cute.make_tensor(softmax_scale, cute.make_layout(1))[0]
        tile = Int64(head if parts is None else head * parts) * m_blocks + m_block
        source = Source(
            dq_sum + tile * self.config.dq_tile_floats,
            None if dq_turn is None else dq_turn + tile * self.config.dq_parts,
            scale,
            parts,
            Int64(m_blocks) * self.config.dq_tile_floats,
        )
        rows = self.rows(packed, q_len, m_block, batch * m_blocks + m_block)
        if cutlass.const_expr(packed is None):
            self.wait(adders, packed, batch, head, q_heads)
            self.turn(dq_map, source, packed, rows, batch, head - batch * q_heads)
        else:
            if rows.first < rows.room:
                self.wait(adders, packed, batch, head, q_heads)
                self.turn(dq_map, source, packed, rows, batch, head - batch * q_heads)
        if cutlass.const_expr(adders is not None):
            self.end(index)

    @cute.jit
    def end(self, index: Int32) -> None:
        """One CTA waits for the grid ahead: who waits for this one's end waits for that, too."""
        if index == cute.arch.grid_dim()[0] - 1:
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def late_last(self, adders: Adders | None, packed: PackedQueries | None, m_blocks: Int32, q_heads: Int32) -> Int32:
        """The tile of the CTA: as of `last_first`, but those of the last heads, to which many still add, come last."""
        assert adders is not None, "others wait for all sums"
        tiles, block = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        count = cutlass.max(self.adders(adders, packed), 1)
        late_heads = (LATE_ADDERS + (count - 1)) // count * (q_heads // adders.kv_heads)
        early = cutlass.max(tiles - late_heads * m_blocks, 0)
        return Int32(cutlass.select_(block < early, early - 1 - block, block))

    def adders(self, adders: Adders, packed: PackedQueries | None) -> Int32:
        """How many add to dq of the query heads of a kv head."""
        return adders.count if packed is None else read_count(packed.kv_schedule) * self.config.tile_adders

    def wait(
        self, adders: Adders | None, packed: PackedQueries | None, batch: Int32, head: Int32, q_heads: Int32
    ) -> None:
        """Until dq of a query head, counted over all batch entries, is complete, if that must be waited for."""
        if adders is not None:
            kv_head = head // (q_heads // adders.kv_heads)
            if packed is not None:
                kv_head = kv_head - batch * adders.kv_heads
            self.wait_for(adders.done + kv_head, self.adders(adders, packed))

    @cute.jit
    def wait_for(self, done: cute.Pointer, count: Int32) -> None:
        """Until `count` adders have added all that they have."""
        if count == 0:
            cute.arch.griddepcontrol_wait()  # nobody adds, but there is dq_turn or dq_sum to read
        if cute.arch.thread_idx()[0] == 0:
            while ptx.ld_acquire(done) != count:
                pass
        cute.arch.sync_threads()

    def rows(self, packed: PackedQueries | None, q_len: Int32, m_block: Int32, slot: Int32) -> SlotRows:
        """Of a tile; `slot`: its place in a schedule."""
        if packed is None:
            return SlotRows(0, q_len, q_len, m_block * self.config.tile_m)
        return slot_rows(packed.schedule, slot, q_len, self.config.tile_m)

    @cute.jit
    def turn(
        self,
        dq_map: cute.CopyAtom,
        source: Source,
        packed: PackedQueries | None,
        rows: SlotRows,
        batch: Int32,
        head: Int32,
    ) -> None:
        """The tile, to `rows` of the array: by its map, which drops rows beyond the array, or one by one."""
        config = self.config
        tile = mma.tiles(cutlass.memory.SmemAllocator(), self.dtype, config.tile_m, self.columns, 1)
        self.turn_tile(source, tile)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        cute.arch.sync_threads()
        is_whole = cutlass.Boolean(True)
        if cutlass.const_expr(packed is not None):
            is_whole = rows.room - rows.first >= config.tile_m
            if not is_whole:
                self.store_rows(packed, tile, rows, batch, head)
        if (cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0) & is_whole:
            corner = Corner(rows.begin + rows.first, head, batch)
            block = (config.tile_m, self.columns)
            rounded, destination = partition(dq_map, block, corner, tile[None, None, 0])
            cute.copy(dq_map, rounded, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copy has left smem, so the CTA may go

    def store_rows(
        self, packed: PackedQueries | None, tile: cute.Tensor, rows: SlotRows, batch: Int32, head: Int32
    ) -> None:
        """The rows of a tile that belong to its sequence."""
        assert packed is not None, "only then is a tile not full"
        start, left = packed.dq.row(batch, rows.begin + rows.first, head), rows.room - rows.first
        sizes = (self.columns, self.config.head_dim)
        barrier = Int32(NamedBarrierId.STORE)
        store_rows(tile[None, None, 0], start, packed.dq.row_stride, left, *sizes, barrier, self.config.tile_m)

    @cute.jit
    def turn_tile(self, source: Source, tile: cute.Tensor) -> None:
        """The tile to smem, scaled and rounded."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        warp, lane = thread // 32, thread % 32
        slabs, blocks = config.tile_m // SLAB, config.sum_columns // 8  # of queries, of columns
        for slab in range(slabs):
            first = slab * blocks
            values = cute.make_rmem_tensor((VECTOR, blocks), Float32)
            for block in range(blocks):
                values[None, block].store(self.block(source.tile, first + block).load())
            if cutlass.const_expr(source.turn is not None):
                self.clear_unless(values, source.turn)
            if cutlass.const_expr(source.parts is not None):
                for part in cutlass.range(1, source.parts, unroll=1):
                    for block in cutlass.range_constexpr(blocks):
                        more = self.block(source.tile + part * source.part_floats, first + block)
                        values[None, block].store(values[None, block].load() + more.load())
            for block in range(self.columns // 8):
                rounded = cute.make_rmem_tensor((2, 2), self.dtype)
                if block < blocks:
                    rounded.store((values[None, block].load() * source.scale).to(self.dtype).reshape((2, 2)))
                else:
                    rounded.fill(0.0)  # beyond head_dim
                row, column = slab * SLAB + 16 * warp + lane // 4, block * 8 + 2 * (lane % 4)
                for half in range(2):
                    pair = tile.iterator + mma.swizzled(row + 8 * half, column, config.tile_m)
                    cute.make_tensor(pair.align(4), cute.make_layout(2)).store(rounded[None, half].load())

    @cute.jit
    def clear_unless(self, values: cute.Tensor, turn: cute.Pointer) -> None:
        """Zeroes what nobody has stored."""
        if cute.make_tensor(turn, cute.make_layout(1))[0] == 0:
            values.fill(0.0)

    def block(self, dq_tile: cute.Pointer, block: int) -> cute.Tensor:
        """The thread's four floats of a block of eight columns: two in its first query, then in its second."""
        place = dq_tile + (block * WARPGROUP + cute.arch.thread_idx()[0]) * VECTOR
        return cute.make_tensor(place.align(16), cute.make_layout(VECTOR))
