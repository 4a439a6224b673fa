"""The load warp: streams both Q tiles and the blocks of K and V into shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core.tma import Corner, partition
from .shared import LEADER, Barriers, Maps, Slot, Smem, Work, in_slot, wait

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["Load", "Part", "fetch"]


class Part(NamedTuple):
    """What a CTA loads of a block."""

    rows: int
    columns: int  # padded
    head_dim: int  # columns that exist
    first_row: Int32 | int = 0
    first_column: Int32 | int = 0


class Load:
    """In the order in which the MMA warp asks: Q0 K(0) Q1 V(0), then K and V of each following block."""

    def __init__(self, config: ForwardSm100Config) -> None:
        self.config = config

    @cute.jit
    def tile(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, slot: Slot) -> Slot:
        """Waits: q.empty, kv.empty. Signals: q.full, kv.full (TMA counts the bytes). Returns the slot behind."""
        visit = work.visit
        if visit.num_n_blocks > 0:
            self.queries(maps, smem, barriers, work, 0)
            slot = self.keys(maps, smem, barriers, work, visit.first, slot)
            if cutlass.const_expr(self.config.q_tiles == 2):
                self.queries(maps, smem, barriers, work, 1)
            slot = self.values(maps, smem, barriers, work, visit.first, slot)
            slot = self.following(maps, smem, barriers, work, slot)
        # no tail: every copy is waited for by a product that the CTA's end waits for
        return slot

    @cute.jit
    def following(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, slot: Slot) -> Slot:
        """K and V of all blocks but the first. Waits: kv.empty. Signals: kv.full."""
        visit = work.visit
        for i in cutlass.range(1, visit.num_n_blocks, unroll=1):
            slot = self.keys(maps, smem, barriers, work, visit.first - i, slot)
            slot = self.values(maps, smem, barriers, work, visit.first - i, slot)
        return slot

    @cute.jit
    def queries(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, i: cutlass.Constexpr) -> None:
        """Q tile `i`. Waits: q.empty[i]. Signals: q.full[i]."""
        config = self.config
        if cutlass.const_expr(config.is_persistent):
            wait(barriers.q_empty + i, (work.filled & 1) ^ 1)  # the first round finds it empty
        full = barriers.q_full + i
        self.expect(full, config.q_bytes // config.q_tiles, work)
        corner = work.of_queries(work.first_row(config, i))
        fetch(maps.q, (config.map_rows, config.columns), corner, smem.q[None, None, i], full)

    def keys(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, n_block: Int32, slot: Slot) -> Slot:
        """K of a block into `slot`; returns the next one."""
        config = self.config
        target = in_slot(config, smem.k, slot)
        part = Part(config.k_rows, config.columns, config.head_dim, first_row=work.rank * config.k_rows)
        return self.block(maps.k, part, config.k_bytes, target, barriers, work, n_block, slot)

    def values(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, n_block: Int32, slot: Slot) -> Slot:
        """V of a block into `slot`; returns the next one."""
        config = self.config
        target = in_slot(config, smem.v, slot)
        first = work.rank * config.v_part_columns
        part = Part(config.tile_n, config.v_part_columns, config.head_dim_v, first_column=first)
        return self.block(maps.v, part, config.v_bytes, target, barriers, work, n_block, slot)

    def block(
        self,
        atom: cute.CopyAtom,
        part: Part,
        size: int,
        target: cute.Tensor,
        barriers: Barriers,
        work: Work,
        n_block: Int32,
        slot: Slot,
    ) -> Slot:
        """One block, or the CTA's part of it. Waits: kv.empty. Signals: kv.full."""
        wait(barriers.kv_empty + slot.index, slot.phase ^ 1)  # the first round finds empty slots
        if cutlass.const_expr(self.config.smem.kv_is_uneven):
            self.wait_for_the_middle(barriers, slot)
        full = barriers.kv_full + slot.index
        self.expect(full, size, work)
        self.copy(atom, part, target, full, work, n_block)
        return slot.next(self.config.kv_stages)

    def copy(
        self, atom: cute.CopyAtom, part: Part, target: cute.Tensor, full: cute.Pointer, work: Work, n_block: Int32
    ) -> None:
        """Starts the copy of one block."""
        corner = work.of_keys(n_block * self.config.tile_n + part.first_row, part.first_column)
        fetch(atom, (part.rows, part.columns), corner, target, full)

    @cute.jit
    def expect(self, full: cute.Pointer, size: cutlass.Constexpr, work: Work) -> None:
        """An arrival, and `size` bytes of each CTA: a pair's copies are counted where its products are issued."""
        if cutlass.const_expr(self.config.cta_group == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        else:
            if work.rank == LEADER:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * size)

    @cute.jit
    def wait_for_the_middle(self, barriers: Barriers, slot: Slot) -> None:
        """K in the first slot of an uneven ring reaches into where the middle one had K in the round before."""
        if slot.index == 0 and slot.phase == 0:
            wait(barriers.kv_empty + 1, 1)


def fetch(atom: cute.CopyAtom, block: tuple[int, int], corner: Corner, target: cute.Tensor, full: cute.Pointer) -> None:
    """Starts the copy of rows of a block; its bytes count towards `full`."""
    destination, source = partition(atom, block, corner, target)
    cute.copy(atom, source, destination, tma_bar_ptr=full)
