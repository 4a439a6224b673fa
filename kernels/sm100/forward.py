"""Blackwell forward: 16 warps with a role each; one or two tiles of 128 queries share the blocks of K and V.

    load --q--> mma --s--> softmax0, softmax1 --p--> mma --o--> correction --out--> epilogue
         --kv->                               --stats, total-->

    gmem -TMA-> smem -tcgen05.mma-> tensor memory: S, P over S, O -tcgen05.ld-> registers -st.shared-> smem -TMA-> gmem,
    or registers -st.global-> gmem where TMA can't store O

    smem           Q 2 x 128 x D (O leaves through it) | kv_stages x (K or V) 128 x max(D, E) | statistics | barriers
    tensor memory  S0 [0, 128)  S1 [128, 256)  P0 [64, 128)  P1 [192, 256)  O0 [256, 256 + E)  O1 [256 + E, 256 + 2 E)

    warps     0-3       4-7       8-11        12   13        14    15
    role      softmax0  softmax1  correction  mma  epilogue  load  schedule

Barriers: `ForwardSm100Config.barriers`, the table that is initialised here. Each of a Q tile's barriers completes once
a block of keys, or once a tile, so that a phase is the parity of the number of blocks or tiles. Key blocks are visited
downwards: the masked right edge first, the masked left edge last.

A lone query tile has both places of S in turn, and a softmax group is idle. A pair of CTAs multiplies as one: each has
query tiles of its own, half of K's keys and half of V's columns; the first one's MMA warp issues for both, and the
barriers that it waits for are those of the first CTA.

A persistent CTA computes every n-th tile where the grid has n CTAs, or takes over tiles of CTAs that have not started.
O then has room of its own, and the next tile's Q is loaded and multiplied while the correction warps still finish the
tile before.

Parameters and grid are those of the Hopper kernel, with boxes of 128 rows for q and out; a pair's K and V come in
halves, and its grid has two CTAs a tile. Head dims that 16 doesn't divide are padded in shared memory: the copies fill
in zeros there, and drop them from O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..core import inputs as calls
from ..core.bounds import Bounds
from ..core.heads import Rows
from ..core.inputs import Inputs
from ..core.rows import GlobalRows
from ..core.scheduler import SingleTile
from . import mma, schedule
from .correction import Correction
from .epilogue import Epilogue
from .issue import Issue, State
from .load import Load
from .shared import LEADER, Cta, Extents, Maps, Slot, Smem, Work, allocate, arrive, make_barriers, meet, wait
from .softmax import Softmax

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["ForwardSm100"]

CORRECTION_WARP = 8
MMA_WARP = 12
EPILOGUE_WARP = 13
LOAD_WARP = 14
SCHEDULE_WARP = 15
SOFTMAX_WARPS = 4  # of each Q tile, from warp 0 on
TMEM_COLUMNS = 512
EARLY_WEIGHTS = 96  # columns of P with which its product begins


class ForwardSm100:
    """The forward kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: ForwardSm100Config) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.bounds = Bounds(
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            has_left=config.has_left,
            has_right=config.has_right,
            has_padding=config.has_padding,
            has_segments=config.has_segments,
        )
        self.scheduler = SingleTile(
            tile_m=config.tile_m,
            kv_bytes=(config.head_dim + config.head_dim_v) * config.element_bytes,
            longest_first=config.longest_first,
        )
        self.load = Load(config)
        self.issue = Issue(config, self.dtype, EARLY_WEIGHTS)
        self.softmax = Softmax(config, self.dtype, EARLY_WEIGHTS)
        self.correction = Correction(config, self.dtype)
        self.epilogue = Epilogue(config)

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor | GlobalRows,
        lse: cute.Pointer,
        inputs: Inputs,
        grid: Extents,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch), but `out` where TMA doesn't store it.

        The grid is a placeholder: plans compute their own.
        """
        config = self.config

        def atom(op: Any, array: cute.Tensor, rows: int, columns: int) -> cute.CopyAtom:
            return cpasync.make_tiled_tma_atom(op, array, mma.layout(self.dtype, rows, columns), (rows, columns))[0]

        group = tcgen05.CtaGroup.TWO if config.cta_group == 2 else tcgen05.CtaGroup.ONE
        load, store = cpasync.CopyBulkTensorTileG2SOp(group), cpasync.CopyBulkTensorTileS2GOp()
        maps = Maps(
            q=atom(load, q, config.map_rows, config.columns),
            k=atom(load, k, config.k_rows, config.columns),
            v=atom(load, v, config.tile_n, config.v_part_columns),
            out=atom(store, out, config.map_rows, config.v_columns) if config.out_by_tma else None,
        )
        self.kernel(maps, None if config.out_by_tma else out, lse, inputs, grid).launch(
            grid=(grid.batch * config.cta_group, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cta_group, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, maps: Maps, out: Any, lse: cute.Pointer, inputs: Inputs, grid: Extents) -> None:
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            maps.prefetch()
        self.announce()
        smem = allocate(config, self.dtype)
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(TMEM_COLUMNS, smem.tmem_address, is_two_cta=config.cta_group == 2)
        first_thread = cute.arch.thread_idx()[0] == 0
        barriers = make_barriers(config.barriers, config.cta_group, first_thread=first_thread)
        tmem = cute.make_tensor(smem.tmem_address, cute.make_layout(1))[0]

        cta = Cta(smem, barriers, inputs, grid)
        if warp < SOFTMAX_WARPS:
            self.set_registers(config.softmax_registers)
            self.each_tile(cta, self.softmax_of(0, lse, cta, tmem), Int32(0))
        elif warp < CORRECTION_WARP:
            self.set_registers(config.second_softmax_registers)
            if cutlass.const_expr(config.q_tiles == 2):
                self.each_tile(cta, self.softmax_of(1, lse, cta, tmem), Int32(0))
        elif warp < MMA_WARP:
            self.set_registers(config.correction_registers)
            self.each_tile(
                cta, lambda work, step: self.correction.tile(smem, barriers, out, work, tmem, step), Int32(0)
            )
            arrive(barriers.tmem_idle)
        else:
            self.set_registers(config.other_registers)
            if warp == MMA_WARP:
                self.multiply(cta, tmem)
            if warp == EPILOGUE_WARP:
                self.store(maps, cta)
            if warp == LOAD_WARP if config.load_warps == 1 else warp >= LOAD_WARP:
                self.each_tile(cta, lambda work, slot: self.load.tile(maps, smem, barriers, work, slot), Slot.first())
            if cutlass.const_expr(config.is_dynamic):
                schedule.ask(config, smem, barriers, warp == SCHEDULE_WARP)
        if cutlass.const_expr(config.cta_group == 2):
            meet(config.cta_group)  # neither CTA ends while the other may signal it or write its tensor memory
            if warp == MMA_WARP:
                self.free(smem)

    def set_registers(self, number: int) -> None:
        """Of each thread of the calling warpgroup."""
        if number > self.config.launch_registers:
            cute.arch.setmaxregister_increase(number)
        else:
            cute.arch.setmaxregister_decrease(number)

    @cute.jit
    def multiply(self, cta: Cta, tmem: Int32) -> None:
        """The MMA warp's part: of a pair, the first CTA's issues what both need. Waits: tmem.idle."""

        def compute(work: Work, state: State) -> State:
            return self.issue.tile(cta.smem, cta.barriers, work, tmem, state)

        if cutlass.const_expr(self.config.cta_group == 1):
            self.each_tile(cta, compute, State.first())
            wait(cta.barriers.tmem_idle, Int32(0))
            self.free(cta.smem)
        else:
            if cute.arch.block_idx()[0] % 2 == LEADER:
                self.each_tile(cta, compute, State.first())
            wait(cta.barriers.tmem_idle, Int32(0))

    def announce(self) -> None:
        """Says that the stream's next kernel may start early, if it is made for that."""

    def softmax_of(self, i: int, lse: cute.Pointer, cta: Cta, tmem: Int32) -> Callable[..., Int32]:
        """The softmax warps' part of query tile `i`, as `each_tile` takes it."""
        return lambda work, step: self.softmax.tile(lse, cta.smem, cta.barriers, work, tmem, i, step)

    def store(self, maps: Maps, cta: Cta) -> None:
        """The epilogue warp's part: nothing where the correction warps store O."""
        if self.config.out_by_tma:
            self.each_tile(
                cta, lambda work, tiles: self.epilogue.tile(maps, cta.smem, cta.barriers, work, tiles), Int32(0)
            )

    @cute.jit
    def each_tile(self, cta: Cta, compute: cutlass.Constexpr, state: Any) -> None:
        """Calls `state = compute(work, state)` for each tile of the CTA.

        Each role finds its tiles itself: what it knows of them then needs no registers while another role runs.
        """
        inputs, grid, ctas = cta.inputs, cta.grid, self.config.cta_group
        index, round = cute.arch.block_idx()[0] // ctas, Int32(0)
        if cutlass.const_expr(self.config.is_dynamic):
            exists, filled = Int32(1), Int32(0)
            while exists != 0:
                work = self.work(inputs, grid, index, round, filled)
                state = compute(work, state)
                filled = filled + cutlass.min(work.visit.num_n_blocks, 1)
                index, exists = schedule.told(self.config, cta.smem, cta.barriers, round)
                round = round + 1
        elif cutlass.const_expr(self.config.is_persistent):
            m_blocks = (grid.q_len + (self.config.tile_m - 1)) // self.config.tile_m
            tiles = m_blocks * grid.q_heads * grid.batch
            for tile in cutlass.range(index, tiles, cute.arch.grid_dim()[0] // ctas, unroll=1):
                state = compute(self.work(inputs, grid, tile, round, round), state)
                round = round + 1
        else:
            compute(self.work(inputs, grid, index, round, round), state)

    def work(self, inputs: Inputs, grid: Extents, index: Int32, round: Int32, filled: Int32) -> Work:
        """The tile at `index` of the order. Every role asks here, so that none can disagree on emptiness.

        Both CTAs of a pair compute it, and visit the same key blocks.
        """
        tile = self.scheduler.tile(index, grid.grid)
        seq = calls.sequence(inputs, grid, tile, calls.window(inputs))
        within = calls.key_blocks(inputs, grid.grid, tile, tile.m_block, self.config.tile_m)
        rank = cute.arch.block_idx()[0] % 2 if self.config.cta_group == 2 else 0
        visit = self.bounds.visit(tile.m_block, seq, within)
        rows = Rows(tile.m_block * self.config.tile_m)
        return Work(grid, tile, rows, seq, visit, calls.logits(inputs), inputs, round, filled, rank=rank)

    def free(self, smem: Smem) -> None:
        """Gives tensor memory back."""
        two = self.config.cta_group == 2
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two)
        start = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, smem.tmem_address)
        cute.arch.dealloc_tmem(start, TMEM_COLUMNS, is_two_cta=two)
