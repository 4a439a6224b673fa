"""The MMA warp: issues S = Q K^T and O += P V of the Q tiles in turn, and owns tensor memory.

    block            first        each further one                        after the last
    tile 0           S0           O0 += P0 V    S0                        O0 += P0 V
    tile 1           S1                              O1 += P1 V    S1     O1 += P1 V

    one tile         S0           S1    O += P0 V    S0    O += P1 V      O += P V

While softmax works on one tile's S, the tensor core is the other tile's, or the lone tile's next S. A product P V waits
for three quarters of P only; the rest follows behind it. Products execute in the order of issue, which is why S may
follow on the P V that reads the same columns of tensor memory. Of a pair of CTAs, the first one's warp issues the
products of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Numeric

from . import mma
from .shared import Barriers, Slot, Smem, Turn, Work, commit, in_slot, wait, wait_for_all

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["Issue", "State"]

WEIGHTS_A_COLUMN = 2  # 16-bit weights in a 32-bit column of tensor memory


class State(NamedTuple):
    """Where the warp is."""

    slot: Slot  # of the next block of K or V
    step: Int32  # blocks so far, and so phases of every barrier of a Q tile

    @classmethod
    def first(cls) -> State:
        """Before the first tile."""
        return cls(Slot.first(), Int32(0))


class Issue:
    """Products of one config."""

    def __init__(self, config: ForwardSm100Config, dtype: type[Numeric], early_weights: int) -> None:
        self.config, self.early = config, early_weights // mma.K_EXTENT
        group = config.cta_group
        self.scores = mma.Instruction(dtype, config.tile_n, b_by_columns=False, cta_group=group)
        self.out = mma.Instruction(dtype, config.v_columns, b_by_columns=True, cta_group=group)
        self.q = mma.by_rows(config.map_rows, config.columns)
        self.k = mma.by_rows(config.k_rows, config.columns)
        self.v = mma.by_columns(config.tile_n, config.v_part_columns)

    @cute.jit
    def tile(self, smem: Smem, barriers: Barriers, work: Work, tmem: Int32, state: State) -> State:
        """Waits: q.full, kv.full, p.full, p.last. Signals: s.full, o.full, q.empty, kv.empty (by tcgen05.commit)."""
        visit = work.visit
        instruction = Int32(self.scores.descriptor)
        if cutlass.const_expr(work.logits.negative is not None):
            flipped = Int32(self.scores.descriptor | mma.NEGATE_A)
            instruction = Int32(cutlass.select_(work.logits.negative, flipped, instruction))

        if visit.num_n_blocks > 0:
            state = self.first(smem, barriers, tmem, instruction, work, state)
            for n in cutlass.range(1, visit.num_n_blocks, unroll=1):
                if cutlass.const_expr(self.config.q_tiles > 1):
                    state = self.step(smem, barriers, tmem, instruction, n, state)
                else:
                    state = self.step_of_one(smem, barriers, tmem, instruction, n, state)
            state = self.last(smem, barriers, tmem, visit.num_n_blocks, state)
        return state

    @cute.jit
    def first(self, smem: Smem, barriers: Barriers, tmem: Int32, instruction: Int32, work: Work, state: State) -> State:
        """S of each tile with the first block. P of an earlier tile has been read: its P V was issued before."""
        keys = state.slot
        wait(barriers.kv_full + keys.index, keys.phase)
        for i in cutlass.range_constexpr(self.config.q_tiles):
            wait(barriers.q_full + i, work.filled & 1)
            self.issue_scores(smem, barriers, tmem, instruction, keys, state.step, i)
        self.commit(barriers.kv_empty + keys.index)
        return State(keys.next(self.config.kv_stages), state.step)

    @cute.jit
    def step(self, smem: Smem, barriers: Barriers, tmem: Int32, instruction: Int32, n: Int32, state: State) -> State:
        """O += P V of a block and S of block `n` of the tile, query tile by query tile."""
        values = state.slot
        keys = values.next(self.config.kv_stages)
        wait(barriers.kv_full + values.index, values.phase)
        wait(barriers.kv_full + keys.index, keys.phase)
        for i in cutlass.range_constexpr(self.config.q_tiles):
            self.issue_out(smem, barriers, tmem, values, state.step, i, accumulate=Boolean(n > 1))
            if cutlass.const_expr(i == self.config.q_tiles - 1):
                self.commit(barriers.kv_empty + values.index)
            # no wait for S to be free: softmax has read it before p.last, and P V above reads P before S overwrites it
            self.issue_scores(smem, barriers, tmem, instruction, keys, state.step + 1, i)
        self.commit(barriers.kv_empty + keys.index)
        return State(keys.next(self.config.kv_stages), state.step + 1)

    @cute.jit
    def step_of_one(
        self, smem: Smem, barriers: Barriers, tmem: Int32, instruction: Int32, n: Int32, state: State
    ) -> State:
        """S of block `n` of a lone query tile, in the other place, then O += P V of the block before."""
        values = state.slot
        keys = values.next(self.config.kv_stages)
        wait(barriers.kv_full + keys.index, keys.phase)
        # no wait for S to be free: what was there two blocks ago is read by a P V issued in the step before
        self.issue_scores(smem, barriers, tmem, instruction, keys, state.step + 1, 0)
        self.commit(barriers.kv_empty + keys.index)
        wait(barriers.kv_full + values.index, values.phase)
        self.issue_out(smem, barriers, tmem, values, state.step, 0, accumulate=Boolean(n > 1))
        self.commit(barriers.kv_empty + values.index)
        self.commit(barriers.o_full)
        return State(keys.next(self.config.kv_stages), state.step + 1)

    @cute.jit
    def last(self, smem: Smem, barriers: Barriers, tmem: Int32, num_n_blocks: Int32, state: State) -> State:
        """O += P V of the last block."""
        values = state.slot
        if cutlass.const_expr(self.config.is_persistent):
            for i in cutlass.range_constexpr(self.config.q_tiles):
                self.commit(barriers.q_empty + i)  # the tile's last S is issued
        wait(barriers.kv_full + values.index, values.phase)
        for i in cutlass.range_constexpr(self.config.q_tiles):
            self.issue_out(smem, barriers, tmem, values, state.step, i, accumulate=Boolean(num_n_blocks > 1))
            if cutlass.const_expr(i == self.config.q_tiles - 1 and self.config.is_persistent):
                self.commit(barriers.kv_empty + values.index)  # before o.full: the CTA ends behind it
            self.commit(barriers.o_full + i)
        return State(values.next(self.config.kv_stages), state.step + 1)

    def issue_scores(
        self, smem: Smem, barriers: Barriers, tmem: Int32, instruction: Int32, keys: Slot, block: Int32, i: int
    ) -> None:
        """S = Q K^T of tile `i`. Signals: s.full of its place."""
        place = Turn.of(self.config, i, block).place
        a = self.q.descriptor(smem.q[None, None, i].iterator)
        b = self.k.descriptor(in_slot(self.config, smem.k, keys).iterator)
        steps = tuple(zip(self.q.steps, self.k.steps, strict=True))
        d = tmem + place * self.config.tile_n
        mma.issue(instruction, d, a, b, steps, cta_group=self.config.cta_group, accumulate=False)
        self.commit(barriers.s_full + place)

    def issue_out(
        self, smem: Smem, barriers: Barriers, tmem: Int32, values: Slot, block: Int32, i: int, *, accumulate: Boolean
    ) -> None:
        """O += P V of tile `i`, in two parts. Waits: p.full, p.last of the block's place."""
        columns, group = self.config.tmem, self.config.cta_group
        turn = Turn.of(self.config, i, block)
        instruction = Int32(self.out.descriptor)
        d, a = tmem + columns.out[i], tmem + (columns.weights[0] + turn.place * self.config.tile_n)
        b = self.v.descriptor(in_slot(self.config, smem.v, values).iterator)
        steps = tuple((k * mma.K_EXTENT // WEIGHTS_A_COLUMN, at) for k, at in enumerate(self.v.steps))
        wait_for_all(barriers.p_full + turn.place, turn.phase, group)
        mma.issue(instruction, d, a, b, steps[: self.early], cta_group=group, accumulate=accumulate)
        wait_for_all(barriers.p_last + turn.place, turn.phase, group)
        mma.issue(instruction, d, a, b, steps[self.early :], cta_group=group, accumulate=True)

    def commit(self, barrier: cute.Pointer) -> None:
        """An arrival once all products issued so far are complete, in both CTAs of a pair."""
        commit(barrier, self.config.cta_group)
