"""Hopper backward: a producer warp streams Q and dO past two consumer warpgroups that hold 64 keys each.

    load --k, v--> consume --dq--> add[i]     gmem -TMA-> smem -wgmma-> registers: dK, dV -stmatrix-> smem -TMA-> gmem
         --q----->                            dQ -smem-> added to gmem by bulk copies
         --dout-->
    smem: K, V tile_n x D, E | q_stages x (Q tile_m x D, lse) | dout_stages x (dO tile_m x E, delta)
          | ds_stages x dS tile_n x tile_m | dQ tile_m x D float32; dK and dV leave through K and V

    barrier      stages       arrives (count)        waits    true once it completes
    k.full       1            load (1 + bytes)       consume  the K tile is in smem; v likewise
    k.empty      1            nobody: a CTA computes one tile; v likewise
    q.full       q_stages     load (1 + bytes)       consume  that Q tile and the lse of its rows are in smem
    q.empty      q_stages     consume (1 a warp)     load     S and dK have read the slot
    dout.full    dout_stages  load (1 + bytes)       consume  that dO tile and the delta of its rows are in smem
    dout.empty   dout_stages  consume (1 a warp)     load     dP and dV have read the slot
    ds           named        both wgs (256)         both     all of dS(m) is in smem, and dQ(m+1) has been computed
    store        named        both wgs (256)         both     no wgmma reads K any more
    store[i]     named        wg i (128)             wg i     warpgroup i's part of dK and dV is in smem
    clear        named        both wgs (256)         both     rows of K, or of Q and dO, beyond the sequence are 0
    dq_full[i]   named        wg i, add[i] (160)     add[i]   warpgroup i's part of dQ is in smem
    dq_empty[i]  named        wg i, add[i] (160)     wg i     its part of the tile before has left smem

All products of a tile of queries m are computed with keys as rows, so that P^T and dS^T, once rounded, are A operands
in the registers where they lie:

    S^T = K Q^T    dP^T = V dO^T    P^T = exp2(scale_log2 S^T - lse)    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q     dQ += dS K

Only dQ sums over keys: dS goes through shared memory, each warpgroup computes a 64 x 64 quarter or half of dQ over all
keys of the tile, and a warp of its own adds it to float32 global memory. With stores_dq that is zeroed only where
dq_turn is 1 beforehand; elsewhere the first tile of keys that a tile of queries sees stores dQ, and the others wait
until it has. Query tiles are visited downwards:

    wg issues   | dQ(m+1) S(m) |                 | dP(m) |      |           | dK dV(m), a |           | dK dV(m), b |
    wg computes |              | dQ(m+1) to smem |       | P(m) | dS(m), a  |             | dS(m), b  |

a and b are halves of the tile's queries, over which dK and dV sum: products of one run beside the computation of the
other. dS goes to shared memory, too, before the products that read its registers are issued. A warpgroup waits for
dQ(m+1), S(m) and dP(m) where it needs them and for dK(m) at the end of a step; dV of half b runs on beside dQ(m).
With 64 queries S and dP read as much of shared memory as it gives in their time, half of it K and V: what of these
registers have room for is held there.

`dq_sum` holds tiles in the order of registers, see `hand_over`. Head dims are padded to D and E in shared memory: the
copies fill in zeros there, and drop them from the results.

Parameters in order, as `BackwardConfig.params` lists them (maps as in the forward, with a swizzle of 128 bytes; v, dv
and dout have head_dim_v columns):

    q, dout         map   (head_dim, q_len, q_heads, batch)      box (64, tile_m, 1, 1)
    k, v, dk, dv    map   (head_dim, kv_len, kv_heads, batch)    box (64, 64, 1, 1)
    lse_log2        float32*  [batch, q_heads, padded_q_len]     +inf in rows that see nothing and beyond q_len
    delta           float32*  [batch, q_heads, padded_q_len]     0 there
    dq_sum          float32*  [batch, q_heads, padded_q_len, sum_columns]  added to
    dq_turn         int32*    [batch, q_heads, ceil(q_len / tile_m), dq_parts]; only if deterministic or stores_dq
    dq_done         int32*    [batch, kv_heads]: how many warps have added all their parts of dq of its query heads;
                    only with counts_adders
    kv_schedule     int32*    as core/schedule.py lists tiles, in the order "sequences"; only with has_cu_seqlens, like
    dk dv           the config's type*  [batch, kv_len, kv_heads, head_dim] by strides: their addresses, again, and
    dk_*_stride dv_*_stride   int64 each, * batch, row, head: in elements
    q_slots         int32     places of a batch entry's tiles of queries
    softmax_scale ... bias_row_stride   as in the forward, without sinks (they are in lse), and with query_blocks in
                    place of key_blocks: int32* [batch, kv_heads, ceil(kv_len / tile_n), 4], unless deterministic
    q_len kv_len q_heads kv_heads batch    int32 each
    dk_sum, dv_sum  float32*  [batch, kv_heads, head_splits, padded_kv_len, head_dim]; only with splits_heads, in place
                    of the maps of dk and dv, like
    head_splits     int32     CTAs that share the query heads of a kv head for a tile of keys

Grid (ceil(kv_len / tile_n) * kv_heads * batch * head_splits, 1, 1), block (threads, 1, 1), no cluster. With q_len = 0
nothing is copied through the maps of q and dout. With splits_heads each CTA writes its part of dK, not scaled, and of
dV in tiles of registers as of dQ, and postprocess makes their sums.

With has_cu_seqlens q_len and kv_len are those of all sequences, lse_log2, delta, dq_sum and dq_turn have q_slots tiles
in place of those of q_len, and a CTA has a tile of the schedule, or none. A copy brings rows of the next sequence, too:
what could reach others is cleared, and dK and dV of a warpgroup that has some go to global memory row by row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from ..core import dense, mask, ptx, softcap
from ..core.barriers import NamedBarrierId, make_pipelines
from ..core.divide import divide, divide_with_rest
from ..core.inputs import Inputs, key_blocks, sequence, window
from ..core.packed import read_count, read_longest
from ..core.scheduler import Grid, SingleTile
from ..core.tma import Corner, fetch, partition
from . import mma
from .backward_keys import Features, KeysSm90, Maps, Packed, Producers, Rows, Work

if TYPE_CHECKING:
    from jax_fa4.configs import BackwardConfig

__all__ = ["BackwardSm90"]

WARPGROUP = 128
VECTOR = 4  # floats in 16 bytes
WARPGROUP_ROWS = 64
WARPGROUP_WARPS = 4
WARPGROUPS = 2
SLAB = 64  # columns of a swizzle atom
LOAD_WARP, ADD_WARP = 0, 1  # of the producer warpgroup, which comes first; from ADD_WARP one a consumer warpgroup
HANDOVER = WARPGROUP + 32  # threads at the barriers between a consumer warpgroup and the warp that adds its dQ
HALVES = 2  # of a tile's queries, as dK and dV sum over them


class Parts(NamedTuple):
    """Where float32 parts of dk and dv go, and how many there are of each."""

    dk: cute.Pointer
    dv: cute.Pointer
    count: Int32


class Turn(NamedTuple):
    """When a part of dQ is added."""

    counter: cute.Pointer  # int32: how many have been
    place: Int32  # how many come before
    stores: Boolean  # nobody has added, nor zeroed: what is there means nothing


class Smem(NamedTuple):
    """Tiles in shared memory."""

    k: cute.Tensor  # (64, D, warpgroups)
    v: cute.Tensor  # (64, E, warpgroups)
    k_slabs: cute.Tensor  # (64 columns, 64 keys, slabs * warpgroups), the bytes of k, slab fastest
    q: cute.Tensor  # (tile_m, D, q_stages)
    q_transposed: cute.Tensor  # (D, tile_m, q_stages), the same bytes
    dout: cute.Tensor  # (tile_m, E, dout_stages)
    dout_transposed: cute.Tensor  # (E, tile_m, dout_stages), the same bytes
    ds: cute.Tensor  # (64 keys, tile_m, warpgroups * ds_stages), warpgroup fastest
    ds_slabs: (
        cute.Tensor
    )  # (tile_m or 64 queries, 64 keys, slabs * warpgroups * ds_stages), the same bytes, slab fastest
    dq: cute.Tensor  # (floats of a part of dQ, warpgroups) as `hand_over` orders them
    lse_log2: cute.Tensor  # (tile_m, q_stages)
    delta: cute.Tensor  # (tile_m, dout_stages)


class Walk(NamedTuple):
    """A consumer warpgroup's ends, and where it stands."""

    k: PipelineConsumer
    v: PipelineConsumer
    q: PipelineConsumer  # at the slot of the tile in work
    dout: PipelineConsumer  # likewise
    head: Int32  # query head, over all of the batch
    m_block: Int32  # the tile in work
    ds_stage: Int32  # where its dS lies


class Fragments(NamedTuple):
    """What a consumer thread computes with."""

    k: cute.Tensor  # descriptors (MMA, 1, K) of the warpgroup's keys
    v: cute.Tensor  # likewise
    q: cute.Tensor  # descriptors (MMA, 1, K, q_stages)
    q_transposed: cute.Tensor
    dout: cute.Tensor  # descriptors (MMA, 1, K, dout_stages)
    dout_transposed: cute.Tensor
    k_slabs: cute.Tensor  # descriptors (MMA, 1, K, slabs * warpgroups)
    ds_slabs: cute.Tensor  # descriptors (MMA, 1, K, slabs * warpgroups * ds_stages)
    scores: cute.Tensor  # accumulators, float32
    dweights: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dq: cute.Tensor
    weights: cute.Tensor  # A operand (MMA, 1, K), 16 bit
    dscores: cute.Tensor  # likewise
    k_start: cute.Tensor | None  # A operand: the columns of the warpgroup's K that are held in registers
    v_start: cute.Tensor | None  # likewise
    place: mask.Place
    is_key: tuple[Int32, ...]  # all bits set for the thread's rows that lie within kv_len, else none
    features: Features


class BackwardSm90(KeysSm90):
    """The main backward kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: BackwardConfig) -> None:
        super().__init__(config)
        # a tile of keys knows its blocks of queries but where all must visit it in turn
        self.bounds = dataclasses.replace(self.bounds, has_segments=config.has_segments and not config.deterministic)
        self.query_slabs, self.column_slabs = config.tile_m // SLAB, config.columns // SLAB
        self.scheduler = SingleTile(
            tile_m=config.tile_n,
            kv_bytes=2 * self.bytes_a_query,  # half of L2: what a section still needs when the next begins
            longest_first=config.longest_first,
            first_is_longest=True,
            even_sections=True,
        )

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        dout: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        rows: Rows,
        inputs: Inputs,
        grid: Grid,
        parts: Parts | None = None,
        packed: Packed | None = None,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        maps = Maps(
            q=mma.tma_atom(load, q, config.tile_m, config.columns),
            dout=mma.tma_atom(load, dout, config.tile_m, config.v_columns),
            k=mma.tma_atom(load, k, WARPGROUP_ROWS, config.columns),
            v=mma.tma_atom(load, v, WARPGROUP_ROWS, config.v_columns),
            dk=mma.tma_atom(store, dk, WARPGROUP_ROWS, config.columns) if parts is None else None,
            dv=mma.tma_atom(store, dv, WARPGROUP_ROWS, config.v_columns) if parts is None else None,
        )
        self.kernel(maps, rows, packed, inputs, grid, parts).launch(
            grid=(grid.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self, maps: Maps, rows: Rows, packed: Packed | None, inputs: Inputs, grid: Grid, parts: Parts | None
    ) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        if cutlass.const_expr(rows.dq_done is None):
            cute.arch.griddepcontrol_launch_dependents()  # they wait for this grid's end by themselves
        if cutlass.const_expr(packed is not None):
            self.begin(rows)  # the schedule is complete
        index = cute.arch.block_idx()[0]
        count, longest = (0, 0) if packed is None else (read_count(packed.schedule), read_longest(packed.schedule))
        if cutlass.const_expr(packed is None):
            self.run(maps, rows, packed, inputs, self.work(inputs, grid, parts, index), parts, warp_index)
        else:
            if index < count * grid.kv_heads:
                transposed = Grid(grid.kv_len, longest, grid.kv_heads, grid.kv_heads, 1)
                work = self.listed(packed, inputs, grid, transposed, index, count)
                self.run(maps, rows, packed, inputs, work, parts, warp_index)

    def begin(self, rows: Rows) -> None:
        """Waits until all that preprocess has written is seen."""
        cute.arch.griddepcontrol_wait()
        if rows.dq_done is not None:
            cute.arch.griddepcontrol_launch_dependents()  # they go by dq_done, which was anything before

    @cute.jit
    def run(
        self,
        maps: Maps,
        rows: Rows,
        packed: Packed | None,
        inputs: Inputs,
        work: Work,
        parts: Parts | None,
        warp_index: Int32,
    ) -> None:
        """A tile, in the role of the calling warp."""
        tile, grid = work.tile, work.grid
        smem = self.allocate()
        ends = make_pipelines(self.edges)
        if cutlass.const_expr(packed is None):
            self.begin(rows)

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, rows, smem, Producers(*(ends[name][0] for name in Producers._fields)), work)
            for wg in cutlass.range_constexpr(WARPGROUPS):
                if warp_index == ADD_WARP + wg:
                    self.add_queries(rows, smem, work, wg)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            wg = warp_index // WARPGROUP_WARPS - 1
            walk = Walk(
                **{name: ends[name][1] for name in ("k", "v", "q", "dout")},
                head=tile.batch * grid.q_heads + work.first_head,
                m_block=Int32(0),
                ds_stage=Int32(0),
            )
            self.consume(maps, packed, parts, smem, walk, work, wg, inputs)

    def work(self, inputs: Inputs, grid: Grid, parts: Parts | None, index: Int32) -> Work:
        """The tile of CTA `index`, and its share of the query heads."""
        logits = self.logits(inputs)
        # the scheduler sees the transposed problem: tiles of keys, a head for each share of query heads, one of which
        # is in L2 at a time
        group = heads = grid.q_heads // grid.kv_heads
        shares = grid.kv_heads
        if parts is not None:
            heads, shares = divide(group + (parts.count - 1), parts.count), grid.kv_heads * parts.count
        transposed = Grid(grid.kv_len, grid.q_len, shares, shares, grid.batch)
        tile = self.scheduler.tile(index, transposed)
        first_head, split = tile.q_head * group, 0
        if parts is not None:
            kv_head, split = divide_with_rest(tile.q_head, parts.count)
            tile = tile._replace(q_head=kv_head, kv_head=kv_head)
            first_head, heads = kv_head * group + split * heads, cutlass.min(heads, group - split * heads)
        seq = sequence(inputs, grid, tile, window(inputs)).transposed()
        within = key_blocks(inputs, grid._replace(q_len=grid.kv_len), tile, tile.m_block, self.config.tile_n)
        visit = self.bounds.visit(tile.m_block, seq, within)
        m_blocks = (grid.q_len + (self.config.tile_m - 1)) // self.config.tile_m
        return Work(grid, tile, first_head, heads, m_blocks, None, seq, visit, logits, split=split)

    def allocate(self) -> Smem:
        """Tiles on 1024-byte boundaries as the swizzle wants them, then the statistics."""
        config, smem = self.config, cutlass.memory.SmemAllocator()
        tiles = functools.partial(mma.tiles, smem, self.dtype)
        k = tiles(WARPGROUP_ROWS, config.columns, WARPGROUPS)
        v = tiles(WARPGROUP_ROWS, config.v_columns, WARPGROUPS)
        q = tiles(config.tile_m, config.columns, config.q_stages)
        dout = tiles(config.tile_m, config.v_columns, config.dout_stages)
        ds_tiles = WARPGROUPS * config.ds_stages
        ds = tiles(WARPGROUP_ROWS, config.tile_m, ds_tiles)
        return Smem(
            k=k,
            v=v,
            k_slabs=mma.transposed(k, WARPGROUP_ROWS, SLAB, self.column_slabs * WARPGROUPS),
            q=q,
            q_transposed=mma.transposed(q, config.tile_m, config.columns, config.q_stages),
            dout=dout,
            dout_transposed=mma.transposed(dout, config.tile_m, config.v_columns, config.dout_stages),
            ds=ds,
            ds_slabs=mma.transposed(ds, WARPGROUP_ROWS, SLAB, self.query_slabs * ds_tiles),
            dq=smem.allocate_tensor(Float32, cute.make_layout((config.dq_part_floats, WARPGROUPS)), 128),
            lse_log2=smem.allocate_tensor(Float32, cute.make_layout((config.tile_m, config.q_stages)), 16),
            delta=smem.allocate_tensor(Float32, cute.make_layout((config.tile_m, config.dout_stages)), 16),
        )

    @cute.jit
    def load(self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work) -> None:
        """Waits: k.empty, v.empty, q.empty, dout.empty. Signals: the full ones (TMA counts the bytes)."""
        visit = work.visit
        if visit.num_n_blocks > 0:
            self.load_keys(maps.k, smem.k, pipes.k, work, self.config.columns)
            for h in cutlass.range(work.heads, unroll=1):
                head = work.first_head + h
                for i in cutlass.range(visit.num_n_blocks, unroll=1):
                    pipes = self.load_queries(maps, rows, smem, pipes, work, head, visit.first - i)
                    if h + i == 0:
                        self.load_keys(maps.v, smem.v, pipes.v, work, self.config.v_columns)
                    # before the next Q, whose slot is free only once dO has been waited for
                    pipes = self.load_dout(maps, rows, smem, pipes, work, head, visit.first - i)
        # no tail: the consumers wait for every copy, so none lands after the CTA has gone

    def load_keys(
        self, atom: cute.CopyAtom, target: cute.Tensor, pipe: PipelineProducer, work: Work, columns: int
    ) -> None:
        """K or V of the tile. The ring has one slot, which is free."""
        slot, tile = pipe.acquire(), work.tile
        for wg in range(WARPGROUPS):
            row = tile.m_block * self.config.tile_n + wg * WARPGROUP_ROWS + work.begin
            corner = Corner(row, tile.q_head, tile.batch)
            fetch(atom, (WARPGROUP_ROWS, columns), corner, target[None, None, wg], slot)

    @cute.jit
    def load_queries(
        self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work, head: Int32, m_block: Int32
    ) -> Producers:
        """Waits: q.empty. Signals: q.full."""
        slot = pipes.q.acquire_and_advance()
        corner = Corner(m_block * self.config.tile_m + work.q_begin, head, work.tile.batch)
        fetch(maps.q, (self.config.tile_m, self.config.columns), corner, smem.q[None, None, slot.index], slot)
        self.load_row(rows.lse_log2, smem.lse_log2[None, slot.index], work, head, m_block, slot.barrier)
        return pipes

    @cute.jit
    def load_dout(
        self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work, head: Int32, m_block: Int32
    ) -> Producers:
        """Waits: dout.empty. Signals: dout.full."""
        slot = pipes.dout.acquire_and_advance()
        corner = Corner(m_block * self.config.tile_m + work.q_begin, head, work.tile.batch)
        fetch(maps.dout, (self.config.tile_m, self.config.v_columns), corner, smem.dout[None, None, slot.index], slot)
        self.load_row(rows.delta, smem.delta[None, slot.index], work, head, m_block, slot.barrier)
        return pipes

    @cute.jit
    def consume(
        self,
        maps: Maps,
        packed: Packed | None,
        parts: Parts | None,
        smem: Smem,
        walk: Walk,
        work: Work,
        wg: Int32,
        inputs: Inputs,
    ) -> None:
        """Waits: all the full ones, ds, clear, store. Signals: q.empty, dout.empty, ds, clear, store."""
        first_row = work.tile.m_block * self.config.tile_n + wg * WARPGROUP_ROWS
        fragments = self.fragments(smem, work, wg, first_row, inputs)
        zero = ptx.zero()
        fragments.dk.fill(zero)
        fragments.dv.fill(zero)
        visit = work.visit
        if visit.num_n_blocks > 0:
            walk.k.wait()
            if cutlass.const_expr(self.config.has_padding):
                self.clear_keys(smem, work)
            self.hold(fragments.k_start, smem.k[None, None, wg])
            for _ in cutlass.range(work.heads, unroll=1):
                walk = self.first_step(fragments, smem, walk, work, wg, visit.first)
                for span in visit.spans:
                    in_span = fragments._replace(features=fragments.features.in_span(span))
                    for i in cutlass.range(span.num_n_blocks, unroll=1):
                        walk = self.step(in_span, smem, walk, work, wg, span.first - i, span.right, span.left)
                walk = self.last_step(fragments, smem, walk, wg)
        if self.config.has_padding:
            present = [row < work.seq.q_len for row in fragments.place.rows]
            mma.keep_rows(fragments.dk, present)
            mma.keep_rows(fragments.dv, present)
        if cutlass.const_expr(parts is None):
            self.finish(maps, packed, smem, fragments, work, wg, first_row)
        else:
            self.store_parts(parts, fragments, work, wg)

    def fragments(self, smem: Smem, work: Work, wg: Int32, first_row: Int32, inputs: Inputs) -> Fragments:
        """Descriptors and registers of the calling thread; `first_row`: key of the warpgroup."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        scores_mma = mma.scores_mma(self.dtype, config.tile_m)
        values_mma = mma.values_mma(self.dtype, config.v_columns)
        keys_mma = mma.values_mma(self.dtype, config.columns)
        queries_mma = mma.queries_mma(self.dtype, SLAB)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        tiled = (scores_mma, values_mma, keys_mma, queries_mma)
        by_scores, by_values, by_keys, by_queries = (each.get_slice(0) for each in tiled)
        scores_shape = scores_mma.partition_shape_C((WARPGROUP_ROWS, config.tile_m))
        weights_shape = values_mma.partition_shape_A((WARPGROUP_ROWS, config.tile_m))
        # without columns beyond head dims, which operands in smem have
        keys_shape, values_shape = (
            mma.values_mma(self.dtype, columns).partition_shape_C((WARPGROUP_ROWS, columns))
            for columns in (config.dk_columns, config.dv_columns)
        )
        queries_shape = queries_mma.partition_shape_C((SLAB, SLAB))
        place = mma.place(first_row, thread, config.tile_m)
        return Fragments(
            k=scores_mma.make_fragment_A(by_scores.partition_A(smem.k))[None, None, None, wg],
            v=scores_mma.make_fragment_A(by_scores.partition_A(smem.v))[None, None, None, wg],
            q=scores_mma.make_fragment_B(by_scores.partition_B(smem.q)),
            q_transposed=keys_mma.make_fragment_B(by_keys.partition_B(smem.q_transposed)),
            dout=scores_mma.make_fragment_B(by_scores.partition_B(smem.dout)),
            dout_transposed=values_mma.make_fragment_B(by_values.partition_B(smem.dout_transposed)),
            k_slabs=queries_mma.make_fragment_B(by_queries.partition_B(smem.k_slabs)),
            ds_slabs=queries_mma.make_fragment_A(by_queries.partition_A(smem.ds_slabs)),
            scores=cute.make_rmem_tensor(scores_shape, Float32),
            dweights=cute.make_rmem_tensor(scores_shape, Float32),
            dk=cute.make_rmem_tensor(keys_shape, Float32),
            dv=cute.make_rmem_tensor(values_shape, Float32),
            dq=cute.make_rmem_tensor(queries_shape, Float32),
            weights=cute.make_rmem_tensor(weights_shape, self.dtype),
            dscores=cute.make_rmem_tensor(weights_shape, self.dtype),
            k_start=self.held(config.k_register_steps),
            v_start=self.held(config.v_register_steps),
            place=place,
            is_key=self.is_key(work, place),
            features=self.features(inputs, work, place),
        )

    def held(self, steps: int) -> cute.Tensor | None:
        """Registers for so many steps of a warpgroup's K or V."""
        if not steps:
            return None
        rows_mma = mma.scores_mma(self.dtype, self.config.tile_m, in_registers=True)
        return cute.make_rmem_tensor(rows_mma.partition_shape_A((WARPGROUP_ROWS, steps * mma.K_EXTENT)), self.dtype)

    def hold(self, start: cute.Tensor | None, tile: cute.Tensor) -> None:
        """Shared memory -> registers: the first columns of a warpgroup's rows of K or V."""
        if start is None:
            return
        rows_mma = mma.scores_mma(self.dtype, self.config.tile_m, in_registers=True)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_A(atom, rows_mma)
        part = copy.get_slice(cute.arch.thread_idx()[0] % WARPGROUP)
        one = rows_mma.partition_shape_A((WARPGROUP_ROWS, mma.K_EXTENT))
        for step in range(cute.size(start, mode=[2])):
            source = cute.local_tile(tile, (WARPGROUP_ROWS, mma.K_EXTENT), (0, step))
            target = cute.make_tensor(start[None, None, step].iterator, cute.make_layout(one))
            cute.copy(copy, part.partition_S(source), part.retile(target))

    @cute.jit
    def clear_keys(self, smem: Smem, work: Work) -> None:
        """Zeroes rows of K beyond the sequence: their dS is 0, but 0 * NaN is NaN. Waits: clear. Signals: clear.

        What V holds there reaches its own rows of dV alone, and what lies beyond the array was filled in as zeros.
        """
        config, seq = self.config, work.seq
        seen = seq.q_len - work.tile.m_block * config.tile_n
        if seen < config.tile_n and work.begin + seq.q_len < work.grid.kv_len:
            for wg in cutlass.range_constexpr(WARPGROUPS):
                first = cutlass.max(seen - wg * WARPGROUP_ROWS, 0)
                self.clear_rows(smem.k[None, None, wg], first, WARPGROUP_ROWS, config.columns)
            self.cleared()

    @cute.jit
    def clear_queries(self, smem: Smem, walk: Walk, work: Work, m_block: Int32) -> None:
        """Zeroes rows of Q and dO beyond the sequence, as of K. Waits: dout.full, clear. Signals: clear."""
        config, seq = self.config, work.seq
        seen = seq.kv_len - m_block * config.tile_m
        if seen < config.tile_m and work.q_begin + seq.kv_len < work.grid.q_len:
            walk.dout.wait()  # dO(m) has landed, as Q(m) has
            q, dout = walk.q.current_handle().index, walk.dout.current_handle().index
            self.clear_rows(smem.q[None, None, q], seen, config.tile_m, config.columns)
            self.clear_rows(smem.dout[None, None, dout], seen, config.tile_m, config.v_columns)
            self.cleared()

    @cute.jit
    def first_step(self, fragments: Fragments, smem: Smem, walk: Walk, work: Work, wg: Int32, m_block: Int32) -> Walk:
        """All of a head's first tile of queries but dQ; that tile may be cut by any edge of the mask."""
        walk.q.wait()  # Q(m) has landed
        walk = walk._replace(m_block=m_block)
        if cutlass.const_expr(self.config.clears_queries):
            self.clear_queries(smem, walk, work, m_block)
        warpgroup.fence()
        self.issue_scores(fragments, walk)
        edges = {"right": self.config.has_left, "left": self.config.has_right}
        return self.weigh(fragments, smem, walk, work, wg, **edges, first=True)

    @cute.jit
    def step(
        self,
        fragments: Fragments,
        smem: Smem,
        walk: Walk,
        work: Work,
        wg: Int32,
        m_block: Int32,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
    ) -> Walk:
        """dQ of tile m+1 beside S of tile m, then all else of tile m but dQ."""
        warpgroup.fence()
        self.issue_queries(fragments, walk, wg)
        walk.q.wait()  # Q(m) has landed
        self.issue_scores(fragments, walk)
        warpgroup.wait_group(1)  # dV(m+1) and dQ(m+1) are complete; S(m) may still run
        walk.dout.release()
        walk.dout.advance()
        self.hand_over(fragments, smem, wg)
        walk = walk._replace(m_block=m_block, ds_stage=walk.ds_stage ^ 1)
        return self.weigh(fragments, smem, walk, work, wg, right=right, left=left, first=False)

    @cute.jit
    def last_step(self, fragments: Fragments, smem: Smem, walk: Walk, wg: Int32) -> Walk:
        """dQ of a head's last tile of queries."""
        warpgroup.fence()
        self.issue_queries(fragments, walk, wg)
        warpgroup.wait_group(0)  # dV and dQ are complete
        walk.dout.release()
        walk.dout.advance()
        self.hand_over(fragments, smem, wg)
        return walk._replace(head=walk.head + 1, ds_stage=walk.ds_stage ^ 1)

    @cute.jit
    def weigh(
        self,
        fragments: Fragments,
        smem: Smem,
        walk: Walk,
        work: Work,
        wg: Int32,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
        first: cutlass.Constexpr,
    ) -> Walk:
        """P(m), dP(m) and dS(m), dV += P dO and dK += dS Q; at the end dS(m) is in smem, and half of dV may still run.

        `first`: of a head. Waits: dout.full, ds. Signals: ds, q.empty.
        """
        seen = self.seen(fragments, walk, work, first)
        if cutlass.const_expr(first):
            walk.v.wait()  # V has landed
            self.hold(fragments.v_start, smem.v[None, None, wg])
        walk.dout.wait()  # dO(m) has landed
        warpgroup.fence()
        self.issue_dweights(fragments, walk)
        warpgroup.wait_group(1)  # S(m) is in registers; dP(m) may still run
        scores = mma.rows_and_columns(fragments.scores)
        blocks = self.config.tile_m // 8
        edges, late = {"right": right, "left": left, "ragged": first, "seen": seen}, self.config.weights_late
        if cutlass.const_expr(work.logits.capped is not None):
            softcap.cap(scores, work.logits.capped)  # tanh: the cap's slope is 1 - tanh^2
        if cutlass.const_expr(not late):
            self.exponentiate(scores, range(blocks), fragments, smem, walk, work, **edges)
        warpgroup.wait_group(0)  # dP(m) is in registers
        for half in cutlass.range_constexpr(HALVES):
            part = range(half * blocks // HALVES, (half + 1) * blocks // HALVES)
            for block in cutlass.range_constexpr(part.start, part.stop):
                weights = mma.block_of(scores, block)
                if cutlass.const_expr(late):
                    self.exponentiate(weights, range(block, block + 1), fragments, smem, walk, work, **edges)
                self.differentiate(weights, block, fragments, smem, walk, work)
            self.store_dscores(fragments, smem, walk, wg, part)  # before wgmma has these registers
            self.pack(fragments.scores, fragments.weights, part)
            warpgroup.fence()
            self.issue_keys(fragments, walk, part)
            self.issue_values(fragments, walk, part)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.TURN, number_of_threads=WARPGROUPS * WARPGROUP)
        warpgroup.wait_group(1)  # dK(m) is complete; the last half of dV(m) may still run
        walk.q.release()
        walk.q.advance()
        return walk

    def differentiate(
        self, weights: cute.Tensor, block: int, fragments: Fragments, smem: Smem, walk: Walk, work: Work
    ) -> None:
        """dS in 16 bit of a block of eight queries from its weights [2, 2]; under a cap they replace tanh in scores."""
        scores, dweights = mma.rows_and_columns(fragments.scores), mma.rows_and_columns(fragments.dweights)
        rounded = cute.recast_tensor(cute.coalesce(fragments.dscores), Int32)
        delta = self.of_queries(smem.delta[None, walk.dout.current_handle().index], block, fragments.place)
        for r in range(2):
            ds = []
            for pair in range(2):
                c = 2 * block + pair
                dscore = weights[r, pair] * (dweights[r, c] - delta[pair])
                if work.logits.capped is not None:
                    dscore = dscore * cute.math.fma(-scores[r, c], scores[r, c], Float32(1.0))
                    scores[r, c] = weights[r, pair]
                ds.append(dscore)
            # beyond kv_len P = exp2(-lse) may be inf, and dQ sums over keys
            rounded[2 * block + r] = ptx.cvt_pair(self.dtype, *ds) & fragments.is_key[r]

    def exponentiate(
        self,
        scores: cute.Tensor,
        blocks: range,
        fragments: Fragments,
        smem: Smem,
        walk: Walk,
        work: Work,
        *,
        right: bool,
        left: bool,
        ragged: bool,
        seen: tuple[Int32, ...] | None,
    ) -> None:
        """Scores [2 keys, queries in `blocks` of eight] of the tile in work become weights in place, 0 where hidden.

        `ragged`: the tile may reach beyond the last query.
        """
        features, grid = fragments.features, work.grid
        place = fragments.place._replace(columns=fragments.place.columns[2 * blocks.start : 2 * blocks.stop])
        start = ptx.here(walk.m_block * self.config.tile_m)
        if features.bias is not None:
            bias = self.columns_of(features.bias, place, walk, work)
            dense.add(scores, work.logits.biased, bias, place, start, ragged=ragged)
        lse_log2 = smem.lse_log2[None, walk.q.current_handle().index]
        for i, block in enumerate(blocks):
            lse = self.of_queries(lse_log2, block, fragments.place)
            for pair in range(2):
                c = 2 * i + pair
                for r in range(2):
                    power = cute.math.fma(scores[r, c], work.logits.scale_log2, -lse[pair])
                    scores[r, c] = cute.math.exp2(power, fastmath=True)
        if right or left:
            mask.hide(scores, place, start, work.seq, right=right, left=left, hidden=0.0)
        if features.kv_ids is not None:
            ids = (features.kv_ids, features.q_ids)
            mask.hide_other_segments(scores, place, start, *ids, grid.q_len, ragged=ragged, hidden=0.0)
        if seen is not None:
            dense.hide_unset(scores, seen, 2 * blocks.start, hidden=0.0)

    def issue_scores(self, fragments: Fragments, walk: Walk) -> None:
        """Starts S^T = K Q^T."""
        q = fragments.q[None, None, None, walk.q.current_handle().index]
        self.issue_rows(fragments.scores, fragments.k_start, fragments.k, q, self.config.k_steps)

    def issue_dweights(self, fragments: Fragments, walk: Walk) -> None:
        """Starts dP^T = V dO^T."""
        dout = fragments.dout[None, None, None, walk.dout.current_handle().index]
        self.issue_rows(fragments.dweights, fragments.v_start, fragments.v, dout, self.config.v_steps)

    def issue_rows(
        self, acc: cute.Tensor, start: cute.Tensor | None, a: cute.Tensor, b: cute.Tensor, steps: int
    ) -> None:
        """Starts acc = a b; registers hold `start`, a's first steps."""
        held, tile_m = 0, self.config.tile_m
        if start is not None:
            held = cute.size(start, mode=[2])
            from_registers = mma.scores_mma(self.dtype, tile_m, in_registers=True)
            mma.products(from_registers, acc, start, b, range(held), accumulate=False)
        mma.products(mma.scores_mma(self.dtype, tile_m), acc, a, b, range(held, steps), accumulate=held > 0)
        warpgroup.commit_group()

    def issue_values(self, fragments: Fragments, walk: Walk, blocks: range) -> None:
        """Starts dV += P^T dO over blocks of eight queries."""
        dout = fragments.dout_transposed[None, None, None, walk.dout.current_handle().index]
        self.issue_sum(self.config.dv_columns, fragments.dv, fragments.weights, dout, blocks)

    def issue_keys(self, fragments: Fragments, walk: Walk, blocks: range) -> None:
        """Starts dK += dS^T Q over blocks of eight queries."""
        q = fragments.q_transposed[None, None, None, walk.q.current_handle().index]
        self.issue_sum(self.config.dk_columns, fragments.dk, fragments.dscores, q, blocks)

    def issue_sum(self, columns: int, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, blocks: range) -> None:
        """Starts acc += a b over blocks of eight queries; `a` is in registers."""
        steps = range(8 * blocks.start // mma.K_EXTENT, 8 * blocks.stop // mma.K_EXTENT)
        mma.products(mma.values_mma(self.dtype, columns), acc, a, b, steps, accumulate=True)
        warpgroup.commit_group()

    def issue_queries(self, fragments: Fragments, walk: Walk, wg: Int32) -> None:
        """Starts dQ = dS K of the tile in work: the warpgroup's slab of queries or columns, over all keys."""
        queries_mma = mma.queries_mma(self.dtype, SLAB)
        query_slab, column_slab = self.slabs(wg)
        steps = cute.size(fragments.ds_slabs, mode=[2])
        for keys in range(WARPGROUPS):
            ds = fragments.ds_slabs[
                None, None, None, (walk.ds_stage * WARPGROUPS + keys) * self.query_slabs + query_slab
            ]
            k = fragments.k_slabs[None, None, None, keys * self.column_slabs + column_slab]
            for step in range(steps):
                queries_mma.set(warpgroup.Field.ACCUMULATE, keys > 0 or step > 0)
                cute.gemm(queries_mma, fragments.dq, ds[None, None, step], k[None, None, step], fragments.dq)
        warpgroup.commit_group()

    def slabs(self, wg: Int32) -> tuple[Int32 | int, Int32 | int]:
        """(slab of queries, slab of columns) of dQ that a warpgroup computes."""
        return (wg, 0) if self.query_slabs == WARPGROUPS else (0, wg)

    def of_queries(self, values: cute.Tensor, block: int, place: mask.Place) -> tuple[Float32, Float32]:
        """A statistic, in smem, of the thread's two neighbouring queries in a block of eight."""
        return ptx.ld_shared_v2(values.iterator + (8 * block + place.first_column))

    def pack(self, acc: cute.Tensor, rounded: cute.Tensor, blocks: range) -> None:
        """Blocks of eight columns of an accumulator in 16 bit.

        A thread's elements of it are its elements of the A operand, in the same order.
        """
        elements = cute.coalesce(acc)
        pairs = cute.recast_tensor(cute.coalesce(rounded), Int32)
        for i in range(2 * blocks.start, 2 * blocks.stop):
            pairs[i] = ptx.cvt_pair(self.dtype, elements[2 * i], elements[2 * i + 1])

    def store_dscores(self, fragments: Fragments, smem: Smem, walk: Walk, wg: Int32, blocks: range) -> None:
        """dS(m) over some blocks of eight queries goes to smem, for dQ."""
        # no wait before overwriting the stage: the barrier of tile m+1 said that dQ(m+2), which read it, is complete
        columns = 8 * len(blocks)
        tiled = mma.scores_mma(self.dtype, columns)
        shape = tiled.partition_shape_C((WARPGROUP_ROWS, columns))
        values = fragments.dscores.iterator + blocks.start * (8 * WARPGROUP_ROWS // WARPGROUP)
        tile = smem.ds[None, None, walk.ds_stage * WARPGROUPS + wg]
        target = cute.local_tile(tile, (WARPGROUP_ROWS, columns), (0, 8 * blocks.start // columns))
        self.copy_to_smem(tiled, cute.make_tensor(values, cute.make_layout(shape)), target)

    def hand_over(self, fragments: Fragments, smem: Smem, wg: Int32) -> None:
        """The warpgroup's part of dQ goes to smem, for its adding warp. Waits: dq.empty. Signals: dq.full.

        In the order of registers: four floats of each thread of block 0 of eight columns, then of block 1, ...
        """
        cute.arch.barrier(barrier_id=NamedBarrierId.DQ_EMPTY + wg, number_of_threads=HANDOVER)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        dq, place = cute.coalesce(fragments.dq), (smem.dq[None, wg].iterator + VECTOR * thread).toint()
        for first in range(0, self.config.dq_part_floats // WARPGROUP, VECTOR):
            values = tuple(dq[first + i] for i in range(VECTOR))
            ptx.st_shared_v4(place, values, first * WARPGROUP * Float32.width // 8)
        cute.arch.barrier_arrive(barrier_id=NamedBarrierId.DQ_FULL + wg, number_of_threads=HANDOVER)

    @cute.jit
    def add_queries(self, rows: Rows, smem: Smem, work: Work, wg: int) -> None:
        """A warp adds warpgroup wg's parts of dQ to global memory. Waits: dq.full, its turn. Signals: dq.empty.

        When all have arrived it counts itself in dq_done, if there is that.
        """
        visit, config = work.visit, self.config
        for h in cutlass.range(work.heads, unroll=1):
            for i in cutlass.range(visit.num_n_blocks, unroll=1):
                m_block = visit.first - i
                tile = work.q_tile(work.first_head + h, m_block)
                target = rows.dq_sum + (tile * config.dq_tile_floats + wg * config.dq_part_floats)
                cute.arch.barrier_arrive(barrier_id=NamedBarrierId.DQ_EMPTY + wg, number_of_threads=HANDOVER)
                turn = self.take_turn(rows, tile * config.dq_parts + wg, m_block, work)
                cute.arch.barrier(barrier_id=NamedBarrierId.DQ_FULL + wg, number_of_threads=HANDOVER)
                cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what the warpgroup wrote
                if cute.arch.lane_idx() == 0:
                    if cutlass.const_expr(turn is None):
                        self.add(target, smem, wg)
                        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the sum has left smem
                    else:
                        self.add_in_turn(target, turn, smem, wg)
                cute.arch.sync_warp()
        if cutlass.const_expr(rows.dq_done is not None):
            self.count(rows.dq_done + work.kv_head)

    @cute.jit
    def count(self, done: cute.Pointer) -> None:
        """Counts the calling warp once all that it has added is there."""
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)  # all sums have arrived
            ptx.red_release_inc(done)

    @cute.jit
    def take_turn(self, rows: Rows, part: Int64, m_block: Int32, work: Work) -> Turn | None:
        """Waits until all tiles of earlier keys have added to a part of dQ, or the first if any order will do.

        Their CTAs come earlier in the grid, so they run or have run.
        """
        turn = None
        if cutlass.const_expr(rows.dq_turn is not None):
            counter, place, count = rows.dq_turn + part, work.tile.m_block - self.first_tile(m_block, work), Int32(0)
            if cute.arch.lane_idx() == 0:
                count = ptx.ld_acquire(counter)
                if cutlass.const_expr(self.config.deterministic):
                    while count != place:
                        count = ptx.ld_acquire(counter)
                else:
                    while (count == 0) & (place > 0):
                        count = ptx.ld_acquire(counter)
            cute.arch.sync_warp()
            turn = Turn(counter, place, count == 0)
        return turn

    @cute.jit
    def add_in_turn(self, target: cute.Pointer, turn: Turn, smem: Smem, wg: cutlass.Constexpr) -> None:
        """Stores warpgroup wg's part of dQ or adds it, and counts it where somebody waits for it."""
        config = self.config
        if turn.stores:
            self.store(target, smem, wg)
            cute.arch.cp_async_bulk_wait_group(0, read=False)  # it has arrived
            ptx.red_release_inc(turn.counter)
        else:
            self.add(target, smem, wg)
            cute.arch.cp_async_bulk_wait_group(0, read=not config.deterministic)  # it has left smem, or has arrived
            if cutlass.const_expr(config.deterministic):
                ptx.red_release_inc(turn.counter)

    def add(self, target: cute.Pointer, smem: Smem, wg: int) -> None:
        """Starts to add warpgroup wg's part of dQ."""
        if size := self.part_bytes(wg):
            ptx.bulk_add(target, smem.dq[None, wg].iterator, size)
        cute.arch.cp_async_bulk_commit_group()

    def store(self, target: cute.Pointer, smem: Smem, wg: int) -> None:
        """Starts to store it."""
        if size := self.part_bytes(wg):
            ptx.bulk_store(target, smem.dq[None, wg].iterator, size)
        cute.arch.cp_async_bulk_commit_group()

    def part_bytes(self, wg: int) -> int:
        """Of a warpgroup's part of a tile of dQ, without columns beyond head_dim."""
        first_column = wg * SLAB if self.query_slabs == 1 else 0
        return min(max(self.config.sum_columns - first_column, 0), SLAB) * SLAB * Float32.width // 8

    @cute.jit
    def finish(
        self,
        maps: Maps,
        packed: Packed | None,
        smem: Smem,
        fragments: Fragments,
        work: Work,
        wg: Int32,
        first_row: Int32,
    ) -> None:
        """Scales dK and stores dK and dV; keys past the array are not written. Waits: store. Signals: store."""
        mma.scale_rows(fragments.dk, [work.logits.softmax_scale] * 2)
        # no wait before overwriting V: only this warpgroup's wgmma read its rows, and all have retired
        config = self.config
        self.round_to_smem(fragments.dv, smem.v[None, None, wg], config.v_columns)
        cute.arch.barrier(barrier_id=NamedBarrierId.TURN, number_of_threads=WARPGROUPS * WARPGROUP)  # K is read no more
        self.round_to_smem(fragments.dk, smem.k[None, None, wg], config.columns)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        barrier = NamedBarrierId.STORE + wg
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        is_whole = Boolean(True)
        if cutlass.const_expr(packed is not None):
            rows = self.rows_left(work, first_row)
            dv, dk = (None, None) if packed is None else (packed.dv, packed.dk)
            of_dv, of_dk = (config.v_columns, config.head_dim_v), (config.columns, config.head_dim)
            is_whole = rows >= WARPGROUP_ROWS
            if (rows > 0) & (rows < WARPGROUP_ROWS):
                self.store_rows(dv, smem.v[None, None, wg], work, first_row, rows, *of_dv, barrier)
                self.store_rows(dk, smem.k[None, None, wg], work, first_row, rows, *of_dk, barrier)
        if (cute.arch.thread_idx()[0] % WARPGROUP // 32 == 0) & is_whole:
            for atom, tiles, columns in (
                (maps.dv, smem.v, config.v_columns),
                (maps.dk, smem.k, config.columns),
            ):
                corner = Corner(first_row + work.begin, work.tile.q_head, work.tile.batch)
                source, destination = partition(atom, (WARPGROUP_ROWS, columns), corner, tiles[None, None, wg])
                cute.copy(atom, source, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copies have left smem, so the CTA may go

    def store_parts(self, parts: Parts | None, fragments: Fragments, work: Work, wg: Int32) -> None:
        """Stores the warpgroup's part of dK, not scaled, and of dV from registers, in their order."""
        assert parts is not None, "only then are there parts"
        config, tile, grid = self.config, work.tile, work.grid
        m_blocks = divide(grid.kv_len + (config.tile_n - 1), config.tile_n)
        part = Int64(tile.batch * grid.kv_heads + tile.q_head) * parts.count + work.split
        slab = (part * m_blocks + tile.m_block) * WARPGROUPS + wg
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        for pointer, acc, columns in (
            (parts.dv, fragments.dv, config.head_dim_v),
            (parts.dk, fragments.dk, config.head_dim),
        ):
            place = pointer + (slab * (WARPGROUP_ROWS * columns) + VECTOR * thread)
            elements = cute.coalesce(acc)
            for block in range(columns // 8):
                values = cute.make_rmem_tensor(VECTOR, Float32)
                for i in range(VECTOR):
                    values[i] = elements[VECTOR * block + i]
                target = (place + block * (VECTOR * WARPGROUP)).align(16)
                cute.make_tensor(target, cute.make_layout(VECTOR)).store(values.load())

    def round_to_smem(self, acc: cute.Tensor, target: cute.Tensor, columns: int) -> None:
        """dK or dV of the warpgroup to its rows of smem, in 16 bit; zeros where it has fewer columns."""
        whole = mma.values_mma(self.dtype, columns)
        rounded = cute.make_rmem_tensor(whole.partition_shape_C((WARPGROUP_ROWS, columns)), self.dtype)
        rounded.fill(0.0)
        cute.make_tensor(rounded.iterator, acc.layout).store(acc.load().to(self.dtype))
        self.copy_to_smem(whole, rounded, target)
