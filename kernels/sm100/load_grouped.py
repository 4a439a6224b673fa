"""The load warps of grouped heads: Q row by row, K and V by TMA or, where that takes too many copies, row by row too.

What cp.async copies is in shared memory when the warp that asked for it has waited; a fence then shows it to the tensor
core. Where K and V come so, both warps run up to `blocks_ahead` blocks of K or V ahead of what they have shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Numeric

from ..core.pages import Pages
from ..core.rows import GlobalRows
from ..core.tma import Corner
from . import mma
from .gather import Source, gather
from .load import Load, Part, fetch
from .shared import Barriers, Maps, Slot, Smem, Work, arrive, wait

if TYPE_CHECKING:
    from jax_fa4.configs.grouped import GroupedSm100Config

__all__ = ["GroupedLoad", "box_layout"]

WARPS = 2
LANES = 32
MAX_UNROLLED_BOXES = 4


def box_layout(dtype: type[Numeric], config: GroupedSm100Config, columns: int) -> cute.ComposedLayout:
    """What one copy writes: rows as in a tile, from any of its swizzle's patterns on."""
    tile = mma.layout(dtype, config.box_rows, columns)
    slab = mma.swizzle_width(columns) * 8 // dtype.width
    outer = cute.make_layout((config.box_rows, (slab, columns // slab)), stride=(slab, (1, config.box_rows * slab)))
    return cute.make_composed_layout(tile.inner, 0, outer)


class PagesOfTile(NamedTuple):
    """The pages of a tile's sequence."""

    pages: Pages
    table: cute.Pointer
    size: int

    @classmethod
    def of(cls, work: Work, size: int | None) -> PagesOfTile:
        """For keys that lie in pages of that size."""
        grid, tile = work.grid, work.tile
        assert size is not None, "keys lie in pages"
        assert grid.pages is not None, "the config says so, and so do the parameters"
        return cls(grid.pages, grid.pages.table_of(grid.page_table, tile.kv_head, tile.batch), size)

    def find(self, key: Int32) -> tuple[Int32, Int32]:
        """The page of a key, and its row there."""
        return self.pages.find(self.table, key, self.size)


class GroupedLoad(Load):
    """In the order in which the MMA warp asks: Q, then K and V of each block."""

    config: GroupedSm100Config

    @cute.jit
    def tile(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, slot: Slot) -> Slot:
        """Waits: kv.empty. Signals: q.full, kv.full. Returns the slot behind. Both warps call it."""
        visit = work.visit
        if visit.num_n_blocks > 0:
            self.gather_queries(smem, work)
            if cutlass.const_expr(self.config.gathers_keys):
                slot = self.gather_blocks(smem, barriers, work, slot)
            else:
                is_first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS == 0
                if is_first:
                    slot = self.keys(maps, smem, barriers, work, visit.first, slot)
                cute.arch.cp_async_wait_group(0)
                self.show_queries(barriers)
                if is_first:
                    slot = self.values(maps, smem, barriers, work, visit.first, slot)
                    slot = self.following(maps, smem, barriers, work, slot)
        return slot

    def gather_queries(self, smem: Smem, work: Work) -> None:
        """Starts copies of all Q tiles. Rows behind the last query are 0: finite, and never stored."""
        config, grid, tile = self.config, work.grid, work.tile
        assert grid.q is not None, "no other way to load Q"
        shape, queries = (config.map_rows, config.columns), grid.q
        for i in range(config.q_tiles):

            def find(row: Int32, first: int = i * config.map_rows) -> Source:
                query, head = work.rows.place(first + row)
                place = cutlass.min(query, grid.q_len - 1)
                return Source(queries.row(tile.batch, place, tile.q_head + head), query < grid.q_len)

            gather(smem.q[None, None, i], shape, config.head_dim, self.lane, WARPS * LANES, find)
        cute.arch.cp_async_commit_group()

    def show_queries(self, barriers: Barriers) -> None:
        """The copies of Q are complete. Signals: q.full."""
        cute.arch.fence_proxy("async.shared", space="cta")
        for i in range(self.config.q_tiles):
            arrive(barriers.q_full + i)

    @cute.jit
    def gather_blocks(self, smem: Smem, barriers: Barriers, work: Work, slot: Slot) -> Slot:
        """Waits: kv.empty. Signals: q.full, kv.full."""
        visit, ahead, shown = work.visit, self.config.blocks_ahead, slot
        arrays = Maps(None, work.grid.k, work.grid.v, None)
        slot = self.keys(arrays, smem, barriers, work, visit.first, slot)
        cute.arch.cp_async_wait_group(1)
        self.show_queries(barriers)
        if cutlass.const_expr(ahead == 0):
            shown = self.show_block(barriers, shown, ahead)
        slot = self.values(arrays, smem, barriers, work, visit.first, slot)
        if cutlass.const_expr(ahead <= 1):
            shown = self.show_block(barriers, shown, ahead)
        for i in cutlass.range(1, visit.num_n_blocks, unroll=1):
            slot = self.keys(arrays, smem, barriers, work, visit.first - i, slot)
            shown = self.show_block(barriers, shown, ahead)
            slot = self.values(arrays, smem, barriers, work, visit.first - i, slot)
            shown = self.show_block(barriers, shown, ahead)
        for newer in cutlass.range_constexpr(ahead - 1, -1, -1):
            shown = self.show_block(barriers, shown, newer)
        return slot

    def block(
        self,
        source: cute.CopyAtom | GlobalRows,
        part: Part,
        size: int,
        target: cute.Tensor,
        barriers: Barriers,
        work: Work,
        n_block: Int32,
        slot: Slot,
    ) -> Slot:
        """One block; of an array only starts the copies, keys beyond the sequence being 0. Waits: kv.empty."""
        config = self.config
        if not config.gathers_keys:
            return super().block(source, part, size, target, barriers, work, n_block, slot)
        pages = PagesOfTile.of(work, config.page_size)
        wait(barriers.kv_empty + slot.index, slot.phase ^ 1)  # the first round finds empty slots

        def find(row: Int32) -> Source:
            key = n_block * config.tile_n + row
            place = cutlass.min(key, work.seq.kv_len - 1)
            page, row = pages.find(place)
            return Source(source.row(page, row, work.tile.kv_head), key < work.seq.kv_len)

        gather(target, (part.rows, part.columns), part.head_dim, self.lane, WARPS * LANES, find)
        cute.arch.cp_async_commit_group()
        return slot.next(config.kv_stages)

    def show_block(self, barriers: Barriers, shown: Slot, newer: int) -> Slot:
        """All but the `newer` last copies are complete, so that of slot `shown`. Signals: kv.full."""
        cute.arch.cp_async_wait_group(newer)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(barriers.kv_full + shown.index)
        return shown.next(self.config.kv_stages)

    @property
    def lane(self) -> Int32:
        """Of both warps."""
        return cute.arch.thread_idx()[0] % (WARPS * LANES)

    def copy(
        self, atom: cute.CopyAtom, part: Part, target: cute.Tensor, full: cute.Pointer, work: Work, n_block: Int32
    ) -> None:
        """Starts the copies of one block: page by page where keys lie in pages."""
        if work.grid.pages is None:
            super().copy(atom, part, target, full, work, n_block)
        else:
            self.copy_pages(atom, part.columns, target, full, work, n_block)

    @cute.jit
    def copy_pages(
        self,
        atom: cute.CopyAtom,
        columns: cutlass.Constexpr,
        target: cute.Tensor,
        full: cute.Pointer,
        work: Work,
        n_block: Int32,
    ) -> None:
        """As many keys at a time as surely lie in one page."""
        config, pages = self.config, PagesOfTile.of(work, self.config.page_size)
        rows, boxes = config.box_rows, config.tile_n // config.box_rows
        for box in cutlass.range(boxes, unroll=min(boxes, MAX_UNROLLED_BOXES)):
            key = n_block * config.tile_n + box * rows
            page, row = pages.find(key)
            place = cute.local_tile(target, (rows, columns), (box, 0))
            fetch(atom, (rows, columns), Corner(row, work.tile.kv_head, page), place, full)
