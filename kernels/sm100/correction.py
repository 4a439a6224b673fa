"""The correction warps: rescale O off softmax's path, and normalise and round it at the end. A thread a row.

O is only touched where some row of a warp needs it: all 32 lanes decide together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Numeric

from ..core.ptx import cvt_pair
from . import mma, ptx
from .shared import Barriers, Slot, Smem, Turn, Work, arrive, arrive_at_leader, in_slot, wait

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["Correction"]

COLUMNS = 16  # of O that a thread has in registers at a time
WORDS = 4  # of 32 bits in a store


class SmemRow(NamedTuple):
    """A row of O in shared memory, from where TMA stores it."""

    config: ForwardSm100Config
    tile: cute.Pointer
    row: Int32

    def store(self, column: int, values: list[Float32]) -> None:
        """Elements from `column` on."""
        for first, words in _rounded(self.tile.dtype, column, values):
            element = mma.piece(self.row, first, self.config.map_rows, self.config.v_columns)
            ptx.st_shared_v4(self.tile + element, words)


class GlobalRow(NamedTuple):
    """A row of O in global memory, if it is there."""

    config: ForwardSm100Config
    start: cute.Pointer
    exists: Boolean

    def store(self, column: int, values: list[Float32]) -> None:
        """Elements from `column` on, but padding."""
        for first, words in _rounded(self.start.dtype, column, values):
            if first < self.config.head_dim_v:
                ptx.st_global_v4(self.start + first, words, self.exists)


class PartialRow(NamedTuple):
    """A row of a split's O in global memory in float32, if it is there."""

    config: ForwardSm100Config
    start: cute.Pointer
    exists: Boolean

    def store(self, column: int, values: list[Float32]) -> None:
        """Elements from `column` on, but padding."""
        for first in range(column, min(column + len(values), self.config.head_dim_v), WORDS):
            words = values[first - column : first - column + WORDS]
            ptx.st_global_v4(self.start + first, words, self.exists)


class Correction:
    """Rows of all Q tiles."""

    def __init__(self, config: ForwardSm100Config, dtype: type[Numeric]) -> None:
        self.config, self.dtype = config, dtype

    @cute.jit
    def tile(self, smem: Smem, barriers: Barriers, out: Any | None, work: Work, tmem: Int32, step: Int32) -> Int32:
        """Waits: stats, total, o.full, out.empty. Signals: p.full, total.empty, out.full.

        `out`: where O is stored from here; None: it goes to shared memory, and the epilogue warp stores it.
        `step`: blocks with statistics in earlier tiles; returns the number with this one's.
        """
        thread = cute.arch.thread_idx()[0] % self.config.map_rows
        lanes = tmem + (thread // 32 << 21)
        visit = work.visit
        if visit.num_n_blocks > 0:
            if cutlass.const_expr(self.config.clears_values):
                self.clear_padding(smem, barriers, work)
            if cutlass.const_expr(self.config.q_tiles > 1):
                step = self.blocks(smem, barriers, visit.num_n_blocks, lanes, thread, step)
            else:
                step = self.blocks_of_one(smem, barriers, visit.num_n_blocks, lanes, thread, step)
            for i in cutlass.range_constexpr(self.config.q_tiles):
                # O is complete, and no product reads Q any more
                wait(barriers.total + i, work.round & 1)
                wait(barriers.o_full + i, (work.filled if self.config.q_tiles > 1 else step - 1) & 1)
                self.finish(smem, barriers, out, work, lanes, thread, i, False)
        else:
            for i in cutlass.range_constexpr(self.config.q_tiles):
                if cutlass.const_expr(self.config.is_dynamic):
                    wait(barriers.total + i, work.round & 1)  # of each tile, or phases would be lost
                self.finish(smem, barriers, out, work, lanes, thread, i, True)
        return step

    @cute.jit
    def blocks(
        self, smem: Smem, barriers: Barriers, num_n_blocks: Int32, lanes: Int32, thread: Int32, step: Int32
    ) -> Int32:
        """O of two query tiles, block after block. Of a tile's first one there are no statistics."""
        for i in cutlass.range_constexpr(2):
            arrive_at_leader(barriers.p_full + i, self.config.cta_group)  # the first product overwrites O
        for _ in cutlass.range(1, num_n_blocks, unroll=1):
            for i in cutlass.range_constexpr(2):
                wait(barriers.stats + i, step & 1)  # and so softmax has seen O complete up to the last block
                self.rescale(lanes + self.config.tmem.out[i], smem.factors[thread, i])
                arrive_at_leader(barriers.p_full + i, self.config.cta_group)
            step = step + 1
        return step

    @cute.jit
    def blocks_of_one(
        self, smem: Smem, barriers: Barriers, num_n_blocks: Int32, lanes: Int32, thread: Int32, step: Int32
    ) -> Int32:
        """O of a lone query tile, whose softmax may be a block ahead of it."""
        for n in cutlass.range(num_n_blocks, unroll=1):
            turn = Turn.of(self.config, 0, step)
            wait(barriers.stats + turn.place, turn.phase)
            if n > 0:  # the first product overwrites O
                wait(barriers.o_full, (step - 1) & 1)
                self.rescale(lanes + self.config.tmem.out[0], smem.factors[thread, turn.place])
            arrive_at_leader(barriers.p_full + turn.place, self.config.cta_group)
            step = step + 1
        return step

    @cute.jit
    def rescale(self, address: Int32, factor: Float32) -> None:
        """O *= factor in tensor memory, unless no row of the warp needs it."""
        if cute.arch.vote_any_sync(factor != 1.0):
            for column in cutlass.range_constexpr(0, self.config.v_columns, COLUMNS):
                out = ptx.tcgen05_ld(address + column, COLUMNS)
                cute.arch.fence_view_async_tmem_load()
                ptx.tcgen05_st(address + column, _scaled(out, factor))
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def finish(
        self,
        smem: Smem,
        barriers: Barriers,
        out: Any | None,
        work: Work,
        lanes: Int32,
        thread: Int32,
        i: cutlass.Constexpr,
        empty: cutlass.Constexpr,
    ) -> None:
        """Rows of tile `i`: O / row_sum in 16 bit to shared or global memory. Signals: out.full[i].

        `empty`: no key is visited, nothing was computed.
        """
        config = self.config
        query, head = work.rows.place(work.first_row(config, i) + thread)
        factor = Float32(0.0) if cutlass.const_expr(empty) else smem.totals[thread, i]
        if cutlass.const_expr(config.is_persistent):
            arrive(barriers.total_empty + i)
        place: SmemRow | GlobalRow | PartialRow
        if cutlass.const_expr(out is None):
            assert smem.out is not None, "the epilogue warp stores O"
            if cutlass.const_expr(config.is_persistent):
                wait(barriers.out_empty + i, (work.round & 1) ^ 1)  # the O of the tile before has left
            place = SmemRow(config, smem.out[None, None, i].iterator, thread)
        else:
            assert out is not None, "no other way to store O"
            place = self.global_row(out, work, query, head)
        self.store_row(place, lanes + config.tmem.out[i], factor, query < work.seq.q_len, empty)
        if cutlass.const_expr(out is None):
            cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
            arrive(barriers.out_full + i)

    def global_row(self, out: Any, work: Work, query: Int32, head: Int32 | int) -> GlobalRow | PartialRow:
        """Where a row lies in global memory; `head` counts from the tile's."""
        start = out.row(work.tile.batch, work.q_begin + query, work.tile.q_head + head)
        return GlobalRow(self.config, start, query < work.q_rows)

    def store_row(
        self, place: SmemRow | GlobalRow | PartialRow, address: Int32, factor: Float32, present: Boolean, empty: bool
    ) -> None:
        """A row of O, times `factor`, from tensor memory to `place`; 0 where it is `empty` or not `present`."""
        config = self.config
        for column in range(0, config.v_columns, COLUMNS):
            out = [Float32(0.0)] * COLUMNS
            if not empty:
                loaded = ptx.tcgen05_ld(address + column, COLUMNS)
                cute.arch.fence_view_async_tmem_load()
                out = _scaled(loaded, factor)
            if config.has_padding:
                out = [Float32(cutlass.select_(present, value, Float32(0.0))) for value in out]
            place.store(column, out)

    @cute.jit
    def clear_padding(self, smem: Smem, barriers: Barriers, work: Work) -> None:
        """Zeroes what the first V block holds beyond the sequence: its weights are 0, but 0 * NaN is NaN.

        Only there: a block further on is not visited, and what lies beyond the array itself was filled in as zeros.
        V follows on K in the ring's second slot. The product waits for p.full, which these warps signal next.
        """
        config, seq = self.config, work.seq
        seen = seq.kv_len - work.visit.first * config.tile_n
        if seen < config.tile_n and seq.kv_len < work.kv_rows:
            wait(barriers.kv_full + 1, 0)
            words = cute.recast_tensor(in_slot(config, smem.v, Slot(Int32(1), Int32(0))), Int32)
            row_words = config.v_columns * config.element_bytes // 4
            first = cute.arch.thread_idx()[0] % config.map_rows
            for word in cutlass.range(first, (config.tile_n - seen) * row_words, config.map_rows, unroll=1):
                words[seen + word // row_words, word % row_words] = Int32(0)
            cute.arch.fence_proxy("async.shared", space="cta")  # the tensor core may read what this thread wrote


def _rounded(dtype: type[Numeric], column: int, values: list[Float32]) -> Iterator[tuple[int, list[Int32]]]:
    """Values from `column` on in 16 bit: the first column of each store, and its words."""
    words = [cvt_pair(dtype, values[c], values[c + 1]) for c in range(0, len(values), 2)]
    return ((column + 2 * w, words[w : w + WORDS]) for w in range(0, len(words), WORDS))


def _scaled(values: tuple[Float32, ...], factor: Float32) -> list[Float32]:
    """Every value times `factor`, two at a time."""
    pairs = (cute.arch.mul_packed_f32x2((a, b), (factor, factor)) for a, b in zip(*[iter(values)] * 2, strict=True))
    return [value for pair in pairs for value in pair]
