"""Hopper backward for head dims beyond 128: a cluster of two CTAs owns a tile of keys, each CTA half of them.

One warpgroup makes weights and holds dV, one makes dS and holds dK: each has registers for all columns of its 64 keys.
Only dQ sums over the cluster's keys: a third warpgroup computes half of its columns, from the CTA's dS and the other's.

    load --k, v--> all           gmem -TMA-> smem -wgmma-> registers: dK, dV -stmatrix-> smem -TMA-> gmem
         --q, dout--> weights,   smem: K 64 x D, the other CTA's K in the columns of which this one sums dQ, V 64 x E |
                      dscores          q_stages x (Q tile_m x D, lse) | dout_stages x (dO tile_m x E, delta) |
    weights --w--> dscores             ds_stages x (dS 64 x tile_m, the other CTA's)
    dscores --ds--> queries of both CTAs

    barrier      stages       arrives (count)                  waits      true once it completes
    k.full       1            load (1 + bytes)                 all        both tiles of K are in smem
    v.full       1            load (1 + bytes)                 dscores    V is in smem
    k.empty      1            nobody: a CTA computes one tile; v likewise
    q.full       q_stages     load (1 + bytes of both CTAs)    holders    that Q tile and the lse of its rows are there
    q.empty      q_stages     holders of both CTAs (1 a warp)  load       S and dK of both CTAs have read the slot
    dout.full    dout_stages  load (1 + bytes of both CTAs)    holders    that dO tile and its rows' delta are there
    dout.empty   dout_stages  holders of both CTAs (1 a warp)  load       dP and dV of both CTAs have read the slot
    ds.full      ds_stages    dscores (1 a warp + bytes)       queries    dS of both CTAs is in smem
    ds.free      ds_stages    queries of both CTAs (1 a warp)  weights    dQ of both CTAs has read it
    weights      ds_stages    weights, dscores (256), named    dscores    W is in smem
    turn         named        all three (384)                  holders    no wgmma reads K or V any more
    store[i]     named        holder i (128)                   holder i   dV or dK is in smem
    clear        named        holders (256)                    holders    rows beyond the sequence are 0
    order        named        queries (128)                    queries    it may add, or has added, to dQ

Holders are weights and dscores. Scores have keys as rows, so that P^T and dS^T, once rounded, are A operands where they
lie:

    S^T = K Q^T    P^T = exp2(scale_log2 S^T - lse)    dV += P^T dO      weights
    dP^T = V dO^T  dS^T = W^T (dP^T - delta)           dK += dS^T Q      dscores
    dQ = dS K                                                            queries

W is P, times the cap's slope if there is one, in 16 bit. It lies where dS will: a warp of dscores reads what it then
overwrites. A CTA copies its dS into the other's shared memory; with one stage of dS that exchange is what a tile waits
for. Query tiles are visited downwards; each CTA loads half of the slabs of Q and dO for both.

Parameters as of `BackwardSm90`, with boxes of tile_m = 64 rows. Grid (ceil(kv_len / tile_n) * kv_heads *
batch * 2, 1, 1), block (threads, 1, 1), cluster (2, 1, 1). With q_len = 0 nothing is copied through the maps of q and
dout. With has_cu_seqlens a cluster has a tile of the schedule, or none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineConsumer

from ..core import dense, mask, ptx, softcap
from ..core.barriers import NamedBarrierId, make_pipelines, release
from ..core.inputs import Inputs, key_blocks, sequence, window
from ..core.packed import read_count, read_longest
from ..core.rows import GlobalRows
from ..core.scheduler import Grid, SingleTile
from ..core.tma import Corner, fetch, partition
from . import mma
from .backward_keys import Features, KeysSm90, Maps, Packed, Producers, Rows, Work

if TYPE_CHECKING:
    from jax_fa4.configs.backward_wide import BackwardWideConfig

__all__ = ["BackwardWideSm90"]

WARP = 32
WARPGROUP = 128
KEYS = 64  # of a CTA
WARPGROUP_WARPS = 4
WARPGROUPS = 3
CLUSTER = 2
HOLDERS = 2  # warpgroups that hold dV and dK
EVERY_CTA = 0b11
SLAB = 64  # columns of a swizzle atom
LOAD_WARP = 0  # of the producer warpgroup, which comes first; its other warps only give their registers away
WORDS = 4  # in 16 bytes


class Smem(NamedTuple):
    """Tiles in shared memory. Where a mode counts slabs and stages, slabs are fastest."""

    k: cute.Tensor  # (64, D)
    v: cute.Tensor  # (64, E)
    k_slabs: cute.Tensor  # (64, 64, slabs), the same bytes
    peer_k: cute.Tensor  # (64, 64, slabs of the other CTA's K)
    q: cute.Tensor  # (tile_m, D, q_stages)
    q_slabs: cute.Tensor  # (tile_m, 64, slabs * q_stages), the same bytes
    q_transposed: cute.Tensor  # (D, tile_m, q_stages), the same bytes
    dout: cute.Tensor  # (tile_m, E, dout_stages)
    dout_slabs: cute.Tensor  # (tile_m, 64, slabs * dout_stages), the same bytes
    dout_transposed: cute.Tensor  # (E, tile_m, dout_stages), the same bytes
    ds: cute.Tensor  # (64 keys, tile_m, 2 * ds_stages), the other CTA's behind each of the own
    ds_transposed: cute.Tensor  # (tile_m, 64 keys, 2 * ds_stages), the same bytes
    lse_log2: cute.Tensor  # (tile_m, q_stages)
    delta: cute.Tensor  # (tile_m, dout_stages)


class Exchange(NamedTuple):
    """Barriers of dS: one for each stage."""

    full: cute.Pointer
    free: cute.Pointer


class Walk(NamedTuple):
    """A consumer warpgroup's ends, and where it stands."""

    k: PipelineConsumer
    v: PipelineConsumer
    q: PipelineConsumer
    dout: PipelineConsumer
    head: Int32  # query head, over all of the batch
    m_block: Int32  # the tile in work
    turn: Int32  # tiles before it


class Edges(NamedTuple):
    """What may cut a tile of scores."""

    right: bool  # of the transposed mask
    left: bool
    ragged: bool  # it may reach beyond the last query


class Weights(NamedTuple):
    """What a thread of `weights` computes with."""

    k: cute.Tensor  # descriptors (MMA, 1, K)
    q: cute.Tensor  # descriptors (MMA, 1, K, q_stages)
    dout: cute.Tensor  # descriptors (MMA, 1, K, dout_stages), transposed
    scores: cute.Tensor  # accumulator
    weights: cute.Tensor  # A operand, 16 bit
    slopes: cute.Tensor  # W: the same registers, or with a cap others
    dv: cute.Tensor  # accumulator
    place: mask.Place
    features: Features


class Scores(NamedTuple):
    """What a thread of `dscores` computes with."""

    v: cute.Tensor  # descriptors (MMA, 1, K)
    dout: cute.Tensor  # descriptors (MMA, 1, K, dout_stages)
    q: cute.Tensor  # descriptors (MMA, 1, K, q_stages), transposed
    dweights: cute.Tensor  # accumulator
    dscores: cute.Tensor  # A operand, 16 bit
    dk: cute.Tensor  # accumulator
    place: mask.Place
    is_key: tuple[Int32, ...]  # all bits set for the thread's rows that lie within kv_len, else none


class Leaving(NamedTuple):
    """How dK or dV leaves."""

    atom: cute.CopyAtom  # all rows of the tile
    rows: GlobalRows | None  # or some of them; None: sequences are not packed
    tile: cute.Tensor  # in smem


class BackwardWideSm90(KeysSm90):
    """The main backward kernel of one config. `launch` is compiled for its device code only."""

    config: BackwardWideConfig

    def __init__(self, config: BackwardWideConfig) -> None:
        super().__init__(config)
        self.scheduler = SingleTile(
            tile_m=config.tile_n,
            kv_bytes=self.bytes_a_query,
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
        packed: Packed | None = None,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        multicast, store = cpasync.CopyBulkTensorTileG2SMulticastOp(), cpasync.CopyBulkTensorTileS2GOp()
        load = cpasync.CopyBulkTensorTileG2SOp()
        maps = Maps(
            q=mma.tma_atom(multicast, q, config.tile_m, SLAB),
            dout=mma.tma_atom(multicast, dout, config.tile_m, SLAB),
            k=mma.tma_atom(load, k, KEYS, SLAB),
            v=mma.tma_atom(load, v, KEYS, config.v_columns),
            dk=mma.tma_atom(store, dk, KEYS, config.columns),
            dv=mma.tma_atom(store, dv, KEYS, config.v_columns),
        )
        self.kernel(maps, rows, packed, inputs, grid).launch(
            grid=(CLUSTER * grid.batch, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(CLUSTER, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, maps: Maps, rows: Rows, packed: Packed | None, inputs: Inputs, grid: Grid) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                cpasync.prefetch_descriptor(atom)
        cute.arch.griddepcontrol_launch_dependents()  # they wait for what they read by themselves
        index = cute.arch.block_idx()[0]
        # the scheduler and the bounds see the transposed problem: tiles of keys, one head for each kv head
        group = grid.q_heads // grid.kv_heads
        transposed = Grid(grid.kv_len, grid.q_len * group, grid.kv_heads, grid.kv_heads, grid.batch)
        cluster, rank = index // CLUSTER, index % CLUSTER
        count, longest = (0, 0) if packed is None else (read_count(packed.schedule), read_longest(packed.schedule))
        if cutlass.const_expr(packed is None):
            work = self.work(inputs, grid, transposed, cluster)
            self.run(maps, rows, packed, inputs, work._replace(rank=rank), warp_index)
        else:
            if cluster < count * grid.kv_heads:
                listed = transposed._replace(kv_len=longest * group, batch=1)
                work = self.listed(packed, inputs, grid, listed, cluster, count)
                self.run(maps, rows, packed, inputs, work._replace(rank=rank), warp_index)

    def work(self, inputs: Inputs, grid: Grid, transposed: Grid, index: Int32) -> Work:
        """The tile of cluster `index`."""
        logits = self.logits(inputs)
        tile = self.scheduler.tile(index, transposed)
        group = grid.q_heads // grid.kv_heads
        seq = sequence(inputs, grid, tile, window(inputs)).transposed()
        within = key_blocks(inputs, transposed, tile, tile.m_block, self.config.tile_n)
        visit = self.bounds.visit(tile.m_block, seq, within)
        m_blocks = (grid.q_len + (self.config.tile_m - 1)) // self.config.tile_m
        return Work(grid, tile, tile.q_head * group, group, m_blocks, None, seq, visit, logits)

    def first_key(self, work: Work) -> Int32:
        """Of the CTA, in its sequence."""
        return work.tile.m_block * self.config.tile_n + work.rank * KEYS

    def peer_key(self, work: Work) -> Int32:
        """Of the other CTA of the cluster."""
        return work.tile.m_block * self.config.tile_n + (1 - work.rank) * KEYS

    @cute.jit
    def run(self, maps: Maps, rows: Rows, packed: Packed | None, inputs: Inputs, work: Work, warp_index: Int32) -> None:
        """A tile, in the role of the calling warp."""
        smem = self.allocate()
        exchange = self.make_exchange()
        ends = make_pipelines(self.edges)

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, rows, smem, Producers(*(ends[name][0] for name in Producers._fields)), work)
        else:
            walk = Walk(
                **{name: ends[name][1] for name in ("k", "v", "q", "dout")},
                head=work.tile.batch * work.grid.q_heads + work.first_head,
                m_block=Int32(0),
                turn=Int32(0),
            )
            if warp_index < 2 * WARPGROUP_WARPS:
                cute.arch.setmaxregister_increase(self.config.consumer_registers)
                self.make_weights(maps, packed, smem, exchange, walk, work, inputs)
            elif warp_index < 3 * WARPGROUP_WARPS:
                cute.arch.setmaxregister_increase(self.config.consumer_registers)
                self.make_dscores(maps, packed, smem, exchange, walk, work)
            else:
                cute.arch.setmaxregister_decrease(self.config.queries_registers)
                self.make_queries(rows, smem, exchange, walk, work)
        # the other CTA may still arrive at barriers of this one
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def allocate(self) -> Smem:
        """Tiles on 1024-byte boundaries as the swizzle wants them, then the statistics."""
        config, smem = self.config, cutlass.memory.SmemAllocator()
        tiles = functools.partial(mma.tiles, smem, self.dtype)

        def slabs(tile: cute.Tensor, rows: int, count: int) -> cute.Tensor:
            return cute.make_tensor(tile.iterator, mma.k_major(self.dtype, rows, SLAB, count).outer)

        k = tiles(KEYS, config.columns, 1)
        peer_k = tiles(KEYS, SLAB, config.peer_slabs)
        v = tiles(KEYS, config.v_columns, 1)
        q = tiles(config.tile_m, config.columns, config.q_stages)
        dout = tiles(config.tile_m, config.v_columns, config.dout_stages)
        ds = tiles(KEYS, config.tile_m, CLUSTER * config.ds_stages)
        return Smem(
            k=k,
            v=v,
            k_slabs=slabs(k, KEYS, config.slabs),
            peer_k=peer_k,
            q=q,
            q_slabs=slabs(q, config.tile_m, config.slabs * config.q_stages),
            q_transposed=mma.transposed(q, config.tile_m, config.columns, config.q_stages),
            dout=dout,
            dout_slabs=slabs(dout, config.tile_m, config.v_slabs * config.dout_stages),
            dout_transposed=mma.transposed(dout, config.tile_m, config.v_columns, config.dout_stages),
            ds=ds,
            ds_transposed=mma.transposed(ds, KEYS, config.tile_m, CLUSTER * config.ds_stages),
            lse_log2=smem.allocate_tensor(Float32, cute.make_layout((config.tile_m, config.q_stages)), 16),
            delta=smem.allocate_tensor(Float32, cute.make_layout((config.tile_m, config.dout_stages)), 16),
        )

    @cute.jit
    def make_exchange(self) -> Exchange:
        """Initialises the barriers of dS; `make_pipelines` makes that visible."""
        smem, stages = cutlass.memory.SmemAllocator(), self.config.ds_stages
        exchange = Exchange(smem.allocate_array(Int64, stages), smem.allocate_array(Int64, stages))
        if cute.arch.thread_idx()[0] == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(exchange.full + stage, WARPGROUP_WARPS)
                cute.arch.mbarrier_init(exchange.free + stage, CLUSTER * WARPGROUP_WARPS)
        return exchange

    @cute.jit
    def load(self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work) -> None:
        """Waits: k.empty, v.empty, q.empty, dout.empty. Signals: the full ones (TMA counts the bytes)."""
        visit = work.visit
        if visit.num_n_blocks > 0:
            self.load_keys(maps, smem, pipes, work)
            for h in cutlass.range(work.heads, unroll=1):
                head = work.first_head + h
                for i in cutlass.range(visit.num_n_blocks, unroll=1):
                    pipes = self.load_queries(maps, rows, smem, pipes, work, head, visit.first - i)
                    if h + i == 0:
                        slot = pipes.v.acquire()
                        corner = Corner(self.first_key(work) + work.begin, work.tile.q_head, work.tile.batch)
                        fetch(maps.v, (KEYS, self.config.v_columns), corner, smem.v[None, None, 0], slot)
                    # before the next Q, whose slot is free only once dO has been waited for
                    pipes = self.load_dout(maps, rows, smem, pipes, work, head, visit.first - i)
        # no tail: the consumers wait for every copy, so none lands after the CTA has gone

    def load_keys(self, maps: Maps, smem: Smem, pipes: Producers, work: Work) -> None:
        """K of the CTA, and what it needs of the other's. The ring has one slot, which is free."""
        config, tile = self.config, work.tile
        slot = pipes.k.acquire()
        for slab in range(config.slabs):
            corner = Corner(self.first_key(work) + work.begin, tile.q_head, tile.batch, slab * SLAB)
            fetch(maps.k, (KEYS, SLAB), corner, smem.k_slabs[None, None, slab], slot)
        for i in range(config.peer_slabs):
            column = (self.first_slab(work.rank) + i) * SLAB
            corner = Corner(self.peer_key(work) + work.begin, tile.q_head, tile.batch, column)
            fetch(maps.k, (KEYS, SLAB), corner, smem.peer_k[None, None, i], slot)

    def first_slab(self, rank: Int32) -> Int32:
        """Where those slabs of columns begin of which a CTA sums dQ; of three slabs, both CTAs have the middle one."""
        slabs = self.config.slabs
        return rank * {1: 0, 2: 1, 3: 1, 4: 2}[slabs]

    @cute.jit
    def load_queries(
        self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work, head: Int32, m_block: Int32
    ) -> Producers:
        """Half of the slabs of Q for both CTAs, and lse for this one. Waits: q.empty. Signals: q.full."""
        slot, slabs = pipes.q.acquire_and_advance(), self.config.slabs
        half = (slabs + 1) // 2
        first, end = work.rank * half, half + work.rank * (slabs - half)
        for slab in cutlass.range(first, end, unroll=1):
            target = smem.q_slabs[None, None, slot.index * slabs + slab]
            self.share(maps.q, target, m_block, head, slab, slot, work)
        self.load_row(rows.lse_log2, smem.lse_log2[None, slot.index], work, head, m_block, slot.barrier)
        return pipes

    @cute.jit
    def load_dout(
        self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work, head: Int32, m_block: Int32
    ) -> Producers:
        """Half of the slabs of dO for both CTAs, delta for this one. Waits: dout.empty. Signals: dout.full."""
        slot, slabs = pipes.dout.acquire_and_advance(), self.config.v_slabs
        half = slabs // 2
        first, end = work.rank * half, half + work.rank * (slabs - half)
        for slab in cutlass.range(first, end, unroll=1):
            target = smem.dout_slabs[None, None, slot.index * slabs + slab]
            self.share(maps.dout, target, m_block, head, slab, slot, work)
        self.load_row(rows.delta, smem.delta[None, slot.index], work, head, m_block, slot.barrier)
        return pipes

    def share(
        self, atom: cute.CopyAtom, target: cute.Tensor, m_block: Int32, head: Int32, slab: Int32, slot: Any, work: Work
    ) -> None:
        """Starts the copy of one slab of a tile of queries into both CTAs."""
        corner = Corner(m_block * self.config.tile_m + work.q_begin, head, work.tile.batch, slab * SLAB)
        destination, source = partition(atom, (self.config.tile_m, SLAB), corner, target)
        cute.copy(atom, source, destination, tma_bar_ptr=slot.barrier, mcast_mask=Int16(EVERY_CTA))

    @cute.jit
    def make_weights(
        self,
        maps: Maps,
        packed: Packed | None,
        smem: Smem,
        exchange: Exchange,
        walk: Walk,
        work: Work,
        inputs: Inputs,
    ) -> None:
        """Waits: k.full, q.full, dout.full, ds.free. Signals: q.empty, dout.empty, weights."""
        fragments = self.weights_fragments(smem, work, inputs)
        fragments.dv.fill(ptx.zero())
        visit = work.visit
        if visit.num_n_blocks > 0:
            walk.k.wait()
            self.clear_keys(smem, work)
            for _ in cutlass.range(work.heads, unroll=1):
                walk = self.first_weights(fragments, smem, walk, work, visit.first)
                for span in visit.spans:
                    for i in cutlass.range(span.num_n_blocks, unroll=1):
                        m_block = span.first - i
                        edges = (span.right, span.left)
                        walk = self.next_weights(fragments, smem, exchange, walk, work, m_block, *edges)
                walk = self.last_weights(fragments, smem, exchange, walk)
        leaves = Leaving(maps.dv, None if packed is None else packed.dv, smem.v[None, None, 0])
        config, place = self.config, fragments.place
        self.finish(leaves, fragments.dv, config.v_columns, config.head_dim_v, work, place, 0, None)

    @cute.jit
    def make_dscores(
        self, maps: Maps, packed: Packed | None, smem: Smem, exchange: Exchange, walk: Walk, work: Work
    ) -> None:
        """Waits: k.full, v.full, q.full, dout.full, weights. Signals: q.empty, dout.empty, ds.full."""
        fragments = self.scores_fragments(smem, work)
        fragments.dk.fill(ptx.zero())
        visit = work.visit
        if visit.num_n_blocks > 0:
            walk.k.wait()  # for the one that clears
            walk.v.wait()
            self.clear_keys(smem, work)
            for _ in cutlass.range(work.heads, unroll=1):
                walk = self.first_dscores(fragments, smem, exchange, walk, work, visit.first)
                for i in cutlass.range(1, visit.num_n_blocks, unroll=1):
                    walk = self.next_dscores(fragments, smem, exchange, walk, work, visit.first - i)
                walk = self.last_dscores(fragments, walk)
        leaves = Leaving(maps.dk, None if packed is None else packed.dk, smem.k[None, None, 0])
        config, place, scale = self.config, fragments.place, work.logits.softmax_scale
        self.finish(leaves, fragments.dk, config.columns, config.head_dim, work, place, 1, scale)

    def weights_fragments(self, smem: Smem, work: Work, inputs: Inputs) -> Weights:
        """Descriptors and registers of a thread of `weights`."""
        config = self.config
        scores_mma = mma.scores_mma(self.dtype, config.tile_m)
        values_mma = self.holder_mma(config.v_columns)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        by_scores, by_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = mma.place(self.first_key(work), thread, config.tile_m)
        weights = cute.make_rmem_tensor(values_mma.partition_shape_A((KEYS, config.tile_m)), self.dtype)
        return Weights(
            k=scores_mma.make_fragment_A(by_scores.partition_A(smem.k))[None, None, None, 0],
            q=scores_mma.make_fragment_B(by_scores.partition_B(smem.q)),
            dout=values_mma.make_fragment_B(by_values.partition_B(smem.dout_transposed)),
            scores=cute.make_rmem_tensor(scores_mma.partition_shape_C((KEYS, config.tile_m)), Float32),
            weights=weights,
            slopes=cute.make_rmem_tensor_like(weights) if config.has_softcap else weights,
            dv=cute.make_rmem_tensor(values_mma.partition_shape_C((KEYS, config.v_columns)), Float32),
            place=place,
            features=self.features(inputs, work, place),
        )

    def scores_fragments(self, smem: Smem, work: Work) -> Scores:
        """Descriptors and registers of a thread of `dscores`."""
        config = self.config
        scores_mma = mma.scores_mma(self.dtype, config.tile_m)
        keys_mma = self.holder_mma(config.columns)
        by_scores, by_keys = scores_mma.get_slice(0), keys_mma.get_slice(0)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = mma.place(self.first_key(work), thread, config.tile_m)
        dscores_shape = keys_mma.partition_shape_A((KEYS, config.tile_m))
        return Scores(
            v=scores_mma.make_fragment_A(by_scores.partition_A(smem.v))[None, None, None, 0],
            dout=scores_mma.make_fragment_B(by_scores.partition_B(smem.dout)),
            q=keys_mma.make_fragment_B(by_keys.partition_B(smem.q_transposed)),
            dweights=cute.make_rmem_tensor(scores_mma.partition_shape_C((KEYS, config.tile_m)), Float32),
            dscores=cute.make_rmem_tensor(dscores_shape, self.dtype),
            dk=cute.make_rmem_tensor(keys_mma.partition_shape_C((KEYS, config.columns)), Float32),
            place=place,
            is_key=self.is_key(work, place),
        )

    @cute.jit
    def clear_keys(self, smem: Smem, work: Work) -> None:
        """Zeroes rows of K beyond the sequence: their dS is 0, but 0 * NaN is NaN. Waits: clear. Signals: clear.

        What V holds there reaches its own rows of dV alone, and what lies beyond the array was filled in as zeros.
        """
        if cutlass.const_expr(self.config.has_padding):
            config, seq = self.config, work.seq
            seen = seq.q_len - work.tile.m_block * config.tile_n
            if seen < config.tile_n and work.begin + seq.q_len < work.grid.kv_len:
                own, peer = (cutlass.max(seq.q_len - key, 0) for key in (self.first_key(work), self.peer_key(work)))
                self.clear_rows(smem.k[None, None, 0], own, KEYS, config.columns)
                for i in cutlass.range_constexpr(config.peer_slabs):
                    self.clear_rows(smem.peer_k[None, None, i], peer, KEYS, SLAB)
                self.cleared()

    @cute.jit
    def clear_queries(self, smem: Smem, walk: Walk, work: Work, m_block: Int32) -> None:
        """Zeroes rows of Q and dO beyond the sequence, as of K. Waits: q.full, dout.full, clear. Signals: clear."""
        if cutlass.const_expr(self.config.clears_queries):
            config, seq = self.config, work.seq
            seen = seq.kv_len - m_block * config.tile_m
            if seen < config.tile_m and work.q_begin + seq.kv_len < work.grid.q_len:
                walk.q.wait()
                walk.dout.wait()
                q, dout = walk.q.current_handle().index, walk.dout.current_handle().index
                self.clear_rows(smem.q[None, None, q], seen, config.tile_m, config.columns)
                self.clear_rows(smem.dout[None, None, dout], seen, config.tile_m, config.v_columns)
                self.cleared()

    @cute.jit
    def first_weights(self, fragments: Weights, smem: Smem, walk: Walk, work: Work, m_block: Int32) -> Walk:
        """S and P of a head's first tile of queries; that tile may be cut by any edge of the mask."""
        self.clear_queries(smem, walk, work, m_block)
        walk.q.wait()  # Q(m) has landed
        warpgroup.fence()
        self.issue_scores(fragments, walk)
        walk = walk._replace(m_block=m_block)
        seen = self.seen(fragments, walk, work, True)
        warpgroup.wait_group(0)
        edges = Edges(right=self.config.has_left, left=self.config.has_right, ragged=True)
        return self.exponentiate(fragments, smem, walk, work, edges, seen, first=True)

    @cute.jit
    def next_weights(
        self,
        fragments: Weights,
        smem: Smem,
        exchange: Exchange,
        walk: Walk,
        work: Work,
        m_block: Int32,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
    ) -> Walk:
        """W of tile m+1 goes to the other warpgroup; its dV runs beside S and P of tile m."""
        self.pass_weights(fragments, smem, exchange, walk)
        walk.dout.wait()  # dO(m+1) has landed
        walk.q.wait()  # Q(m) has landed
        warpgroup.fence()
        self.issue_scores(fragments, walk)
        self.issue_values(fragments, walk)
        walk = walk._replace(m_block=m_block, turn=walk.turn + 1)
        seen = self.seen(fragments, walk, work, False)
        warpgroup.wait_group(1)  # S(m) is complete; dV(m+1) may still run
        edges = Edges(right=right, left=left, ragged=False)
        return self.exponentiate(fragments, smem, walk, work, edges, seen, first=False)

    @cute.jit
    def last_weights(self, fragments: Weights, smem: Smem, exchange: Exchange, walk: Walk) -> Walk:
        """W and dV of a head's last tile of queries."""
        self.pass_weights(fragments, smem, exchange, walk)
        walk.dout.wait()
        warpgroup.fence()
        self.issue_values(fragments, walk)
        warpgroup.wait_group(0)
        release(walk.dout, CLUSTER)
        walk.dout.advance()
        return walk._replace(head=walk.head + 1, turn=walk.turn + 1)

    def exponentiate(
        self,
        fragments: Weights,
        smem: Smem,
        walk: Walk,
        work: Work,
        edges: Edges,
        seen: tuple[Int32, ...] | None,
        *,
        first: bool,
    ) -> Walk:
        """Scores of the tile in work become P, and W where there is a cap; unless `first`, dV(m+1) ends meanwhile."""
        capped, blocks = work.logits.capped, range(self.config.tile_m // 8)
        scores = mma.rows_and_columns(fragments.scores)
        weights, slopes = (cute.recast_tensor(cute.coalesce(t), Int32) for t in (fragments.weights, fragments.slopes))
        lse_log2 = smem.lse_log2[None, walk.q.current_handle().index]

        def weigh(block: int) -> cute.Tensor:
            part = mma.block_of(scores, block)
            self.weigh(part, block, lse_log2, fragments, walk, work, edges, seen)
            return part

        if capped is not None:
            softcap.cap(scores, capped)  # tanh: the cap's slope is 1 - tanh^2
        else:
            for block in blocks:
                part = weigh(block)
                for r in range(2):
                    for c in range(2):
                        scores[r, 2 * block + c] = part[r, c]
        if not first:
            warpgroup.wait_group(0)  # dV(m+1) is complete: the registers of P(m+1) are free
            release(walk.dout, CLUSTER)
            walk.dout.advance()
        for block in blocks:
            part = mma.block_of(scores, block) if capped is None else weigh(block)
            for r in range(2):
                weights[2 * block + r] = ptx.cvt_pair(self.dtype, part[r, 0], part[r, 1])
                if capped is not None:
                    tanh = [scores[r, 2 * block + c] for c in range(2)]
                    product = [part[r, c] * cute.math.fma(-tanh[c], tanh[c], Float32(1.0)) for c in range(2)]
                    slopes[2 * block + r] = ptx.cvt_pair(self.dtype, *product)
        cute.arch.sync_warp()  # all lanes have read lse
        release(walk.q, CLUSTER)
        walk.q.advance()
        return walk

    def weigh(
        self,
        part: cute.Tensor,
        block: int,
        lse_log2: cute.Tensor,
        fragments: Weights,
        walk: Walk,
        work: Work,
        edges: Edges,
        seen: tuple[Int32, ...] | None,
    ) -> None:
        """Scores [2 keys, 2 queries] of a block of eight queries become weights in place, 0 where hidden."""
        features, grid, logits = fragments.features, work.grid, work.logits
        start = walk.m_block * self.config.tile_m
        place = fragments.place._replace(columns=fragments.place.columns[2 * block : 2 * block + 2])
        if features.bias is not None:
            bias = self.columns_of(features.bias, place, walk, work)
            dense.add(part, logits.biased, bias, place, start, ragged=edges.ragged)
        lse = ptx.ld_shared_v2(lse_log2.iterator + (8 * block + place.first_column))
        for r in range(2):
            for c in range(2):
                power = cute.math.fma(part[r, c], logits.scale_log2, -lse[c])
                part[r, c] = cute.math.exp2(power, fastmath=True)
        if edges.right or edges.left:
            mask.hide(part, place, start, work.seq, right=edges.right, left=edges.left, hidden=0.0)
        if features.kv_ids is not None:
            ids = (features.kv_ids, features.q_ids)
            mask.hide_other_segments(part, place, start, *ids, grid.q_len, ragged=edges.ragged, hidden=0.0)
        if seen is not None:
            dense.hide_unset(part, seen, 2 * block, hidden=0.0)

    def pass_weights(self, fragments: Weights, smem: Smem, exchange: Exchange, walk: Walk) -> None:
        """Hands W of the tile in work to the other warpgroup. Waits: ds.free. Signals: weights."""
        stage, parity = self.stage(walk)
        words = cute.recast_tensor(cute.coalesce(fragments.slopes), Int32)
        cute.arch.mbarrier_wait(exchange.free + stage, parity ^ 1)
        address = self.own_words(smem, stage)
        for i in range(0, cute.size(words), WORDS):
            ptx.st_shared_v4(address + WORDS * WARP * i, tuple(words[i + j] for j in range(WORDS)))
        cute.arch.barrier_arrive(barrier_id=NamedBarrierId.WEIGHTS + stage, number_of_threads=HOLDERS * WARPGROUP)

    def stage(self, walk: Walk) -> tuple[Int32 | int, Int32]:
        """(stage of dS of the tile in work, parity of the phase in which it is filled)."""
        if self.config.ds_stages == 1:
            return 0, walk.turn & 1
        return walk.turn & 1, (walk.turn >> 1) & 1

    def own_words(self, smem: Smem, stage: Int32 | int) -> Int32:
        """Address of the calling thread's first four words of W: its warp's 2 KB are the rows of its warp's dS."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        base = smem.ds.iterator.toint() + stage * self.config.ds_bytes
        return base + thread // WARP * self.warp_bytes + thread % WARP * (4 * WORDS)

    @property
    def warp_bytes(self) -> int:
        """Of the rows of dS that a warp has."""
        return KEYS // WARPGROUP_WARPS * self.config.tile_m * self.config.element_bytes

    @cute.jit
    def first_dscores(
        self, fragments: Scores, smem: Smem, exchange: Exchange, walk: Walk, work: Work, m_block: Int32
    ) -> Walk:
        """dP and dS of a head's first tile of queries."""
        self.clear_queries(smem, walk, work, m_block)
        walk.dout.wait()  # dO(m) has landed
        warpgroup.fence()
        self.issue_dweights(fragments, walk)
        warpgroup.wait_group(0)
        return self.differentiate(fragments, smem, exchange, walk._replace(m_block=m_block), work, dk_runs=False)

    @cute.jit
    def next_dscores(
        self, fragments: Scores, smem: Smem, exchange: Exchange, walk: Walk, work: Work, m_block: Int32
    ) -> Walk:
        """dK of tile m+1, dP and dS of tile m."""
        walk.q.wait()  # Q(m+1) has landed
        if cutlass.const_expr(self.config.keys_first):
            warpgroup.fence()
            self.issue_keys(fragments, walk)
            walk.dout.wait()  # dO(m) has landed
            self.issue_dweights(fragments, walk)
            warpgroup.wait_group(1)  # dK(m+1) is complete; dP(m) may still run
            self.free_queries(walk)
            warpgroup.wait_group(0)
        else:
            walk.dout.wait()  # dO(m) has landed
            warpgroup.fence()
            self.issue_dweights(fragments, walk)
            self.issue_keys(fragments, walk)
            warpgroup.wait_group(1)  # dP(m) is complete; dK(m+1) may still run
        walk = walk._replace(m_block=m_block, turn=walk.turn + 1)
        dk_runs = not self.config.keys_first
        return self.differentiate(fragments, smem, exchange, walk, work, dk_runs=dk_runs)

    def free_queries(self, walk: Walk) -> None:
        """dK of the tile is complete: the registers of its dS are free. Signals: q.empty."""
        release(walk.q, CLUSTER)
        walk.q.advance()

    @cute.jit
    def last_dscores(self, fragments: Scores, walk: Walk) -> Walk:
        """dK of a head's last tile of queries."""
        walk.q.wait()
        warpgroup.fence()
        self.issue_keys(fragments, walk)
        warpgroup.wait_group(0)
        self.free_queries(walk)
        return walk._replace(turn=walk.turn + 1)

    def differentiate(
        self, fragments: Scores, smem: Smem, exchange: Exchange, walk: Walk, work: Work, *, dk_runs: bool
    ) -> Walk:
        """dS of the tile in work, for both CTAs; meanwhile dK(m+1) ends, if it still runs.

        Waits: weights. Signals: ds.full.
        """
        stage, _ = self.stage(walk)
        dweights = mma.rows_and_columns(fragments.dweights)
        delta_row = smem.delta[None, walk.dout.current_handle().index]
        cute.arch.barrier(barrier_id=NamedBarrierId.WEIGHTS + stage, number_of_threads=HOLDERS * WARPGROUP)
        address = self.own_words(smem, stage)
        blocks = self.config.tile_m // 8
        pairs = cute.recast_tensor(cute.coalesce(fragments.dscores), Int32)
        words: tuple[Int32, ...] = ()
        for block in range(blocks):
            if not words:  # as late as possible: four registers, not all
                words = ptx.ld_shared_v4(address + WORDS * WARP * 2 * block)
            delta = ptx.ld_shared_v2(delta_row.iterator + (8 * block + fragments.place.first_column))
            for r in range(2):
                weights = ptx.unpack_pair(self.dtype, words[r])
                for c in range(2):
                    dweights[r, 2 * block + c] = weights[c] * (dweights[r, 2 * block + c] - delta[c])
            words = words[2:]
        if dk_runs:
            warpgroup.wait_group(0)
            self.free_queries(walk)
        for block in range(blocks):
            for r in range(2):
                pair = ptx.cvt_pair(self.dtype, dweights[r, 2 * block], dweights[r, 2 * block + 1])
                # beyond kv_len P = exp2(-lse) may be inf, and dQ sums over keys
                pairs[2 * block + r] = pair & fragments.is_key[r]
        cute.arch.sync_warp()  # all lanes have read W, and delta
        release(walk.dout, CLUSTER)
        walk.dout.advance()
        target = smem.ds[None, None, CLUSTER * stage]
        # a thread's elements of the A operand are its elements of the accumulator, in the same order
        rounded = cute.make_tensor(fragments.dscores.iterator, fragments.dweights.layout)
        self.copy_to_smem(mma.scores_mma(self.dtype, self.config.tile_m), rounded, target)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma and the copy may read what this thread wrote
        cute.arch.sync_warp()
        self.send(smem, exchange, work, stage)
        return walk

    @cute.jit
    def send(self, smem: Smem, exchange: Exchange, work: Work, stage: Int32 | int) -> None:
        """The warp's rows of dS go to the other CTA. Signals: ds.full, of both CTAs."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        full, size = exchange.full + stage, self.config.ds_bytes // CLUSTER
        source = smem.ds.iterator.toint() + (stage * self.config.ds_bytes + thread // WARP * self.warp_bytes)
        if thread % WARP == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.warp_bytes)
            ptx.copy_to_peer(source + size, source, self.warp_bytes, full, 1 - work.rank)

    def wait_dscores(self, exchange: Exchange, walk: Walk) -> None:
        """Waits: ds.full."""
        stage, parity = self.stage(walk)
        cute.arch.mbarrier_wait(exchange.full + stage, parity)

    @cute.jit
    def free_dscores(self, exchange: Exchange, walk: Walk) -> None:
        """dQ has read dS. Signals: ds.free, of both CTAs."""
        stage, _ = self.stage(walk)
        lane = cute.arch.lane_idx()
        if lane < CLUSTER:
            ptx.arrive_at(exchange.free + stage, lane)

    def issue_scores(self, fragments: Weights, walk: Walk) -> None:
        """Starts S^T = K Q^T."""
        scores_mma = mma.scores_mma(self.dtype, self.config.tile_m)
        q = fragments.q[None, None, None, walk.q.current_handle().index]
        mma.batch(scores_mma, fragments.scores, fragments.k, q, accumulate=False)

    def issue_values(self, fragments: Weights, walk: Walk) -> None:
        """Starts dV += P^T dO."""
        dout = fragments.dout[None, None, None, walk.dout.current_handle().index]
        values_mma = self.holder_mma(self.config.v_columns)
        mma.batch(values_mma, fragments.dv, fragments.weights, dout, accumulate=True)

    def issue_keys(self, fragments: Scores, walk: Walk) -> None:
        """Starts dK += dS^T Q."""
        q = fragments.q[None, None, None, walk.q.current_handle().index]
        keys_mma = self.holder_mma(self.config.columns)
        mma.batch(keys_mma, fragments.dk, fragments.dscores, q, accumulate=True)

    def issue_dweights(self, fragments: Scores, walk: Walk) -> None:
        """Starts dP^T = V dO^T."""
        scores_mma = mma.scores_mma(self.dtype, self.config.tile_m)
        dout = fragments.dout[None, None, None, walk.dout.current_handle().index]
        mma.batch(scores_mma, fragments.dweights, fragments.v, dout, accumulate=False)

    def holder_mma(self, columns: int) -> cute.TiledMma:
        """dV += P^T dO and dK += dS^T Q: two instructions of half the columns where one would leave too few registers.

        The operand in registers costs no bandwidth, so that two read no more shared memory than one.
        """
        return mma.values_mma(self.dtype, columns if columns <= 3 * SLAB else columns // 2)

    @cute.jit
    def make_queries(self, rows: Rows, smem: Smem, exchange: Exchange, walk: Walk, work: Work) -> None:
        """Waits: k.full, ds.full. Signals: ds.free, turn."""
        visit = work.visit
        if visit.num_n_blocks > 0:
            walk.k.wait()
            for _ in cutlass.range(work.heads, unroll=1):
                for i in cutlass.range(visit.num_n_blocks, unroll=1):
                    walk = walk._replace(m_block=visit.first - i)
                    self.sum_queries(rows, smem, exchange, walk, work)
                    walk = walk._replace(turn=walk.turn + 1)
                walk = walk._replace(head=walk.head + 1)
        cute.arch.barrier_arrive(barrier_id=NamedBarrierId.TURN, number_of_threads=WARPGROUPS * WARPGROUP)
        self.pass_turn(None if rows.dq_done is None else rows.dq_done + work.kv_head)

    @cute.jit
    def sum_queries(self, rows: Rows, smem: Smem, exchange: Exchange, walk: Walk, work: Work) -> None:
        """dQ = dS K of the tile in work: the CTA's columns, over the keys of both CTAs."""
        slabs = self.config.slabs
        if cutlass.const_expr(slabs == 4):
            self.sum_slabs(rows, smem, exchange, walk, work, 0, 2)
        elif cutlass.const_expr(slabs == 2):
            self.sum_slabs(rows, smem, exchange, walk, work, 0, 1)
        else:  # the CTAs take turns with the odd slab
            takes_odd = (walk.turn + work.rank) % 2 == 0
            if takes_odd:
                self.sum_slabs(rows, smem, exchange, walk, work, 0, self.config.peer_slabs)
            elif cutlass.const_expr(slabs == 3):
                self.sum_slabs(rows, smem, exchange, walk, work, work.rank, 1)
            else:
                self.wait_dscores(exchange, walk)
                self.free_dscores(exchange, walk)

    @cute.jit
    def sum_slabs(
        self,
        rows: Rows,
        smem: Smem,
        exchange: Exchange,
        walk: Walk,
        work: Work,
        first: Int32 | int,
        count: cutlass.Constexpr,
    ) -> None:
        """dQ of `count` slabs from `first` on, of those that the CTA has."""
        config, at_once = self.config, min(count, self.config.slabs_at_once)
        columns = at_once * SLAB
        queries_mma = mma.queries_mma(self.dtype, columns)
        by_queries = queries_mma.get_slice(0)
        stage, _ = self.stage(walk)
        ds = queries_mma.make_fragment_A(by_queries.partition_A(smem.ds_transposed))
        own, peer = (
            queries_mma.make_fragment_B(by_queries.partition_B(self.columns_from_slabs(tile, columns, slabs)))
            for tile, slabs in ((smem.k, config.slabs), (smem.peer_k, config.peer_slabs))
        )
        dq = cute.make_rmem_tensor(queries_mma.partition_shape_C((config.tile_m, columns)), Float32)
        self.wait_dscores(exchange, walk)
        for done in cutlass.range_constexpr(0, count, at_once):
            slab = self.first_slab(work.rank) + first + done
            warpgroup.fence()
            for source, k in enumerate((own[None, None, None, slab], peer[None, None, None, first + done])):
                a = ds[None, None, None, CLUSTER * stage + source]
                for step in range(cute.size(a, mode=[2])):
                    queries_mma.set(warpgroup.Field.ACCUMULATE, source > 0 or step > 0)
                    cute.gemm(queries_mma, dq, a[None, None, step], k[None, None, step], dq)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if cutlass.const_expr(done + at_once == count):
                self.free_dscores(exchange, walk)
            for i in cutlass.range_constexpr(at_once):
                self.add_slab(dq, i, rows, walk, work, slab + i)

    def columns_from_slabs(self, tile: cute.Tensor, columns: int, slabs: int) -> cute.Tensor:
        """(columns, 64 keys, slabs - columns / 64 + 1): so many columns of K from each slab on."""
        layout = mma.mn_major(self.dtype, KEYS, columns, 1).outer
        count = slabs - columns // SLAB + 1
        shape, stride = (*layout.shape[:2], count), (*layout.stride[:2], SLAB * KEYS)
        return cute.make_tensor(tile.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def add_slab(self, dq: cute.Tensor, i: cutlass.Constexpr, rows: Rows, walk: Walk, work: Work, slab: Int32) -> None:
        """Adds the `i`-th 64 columns of dQ to global memory, if deterministic in their turn.

        Four floats of a thread lie beside those of its neighbour: those of block j of 8 columns are columns 2 t and the
        next of queries q and q + 8, t = lane % 4 and q = 16 warp + lane / 4. [slab, j, warp, lane / 4, t, query half,
        column] is the order of a tile.
        """
        config = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        tile = work.place_of(Int64(walk.head), walk.m_block)
        turn = self.take_turn(rows, tile, walk, work, slab)
        first = (tile * config.slabs + slab) * (SLAB * config.tile_m) + 4 * thread
        elements = mma.rows_and_columns(dq)
        for j in cutlass.range_constexpr(SLAB // 8):
            column = 2 * (i * SLAB // 8 + j)
            values = tuple(elements[half, column + pair] for half in range(2) for pair in range(2))
            ptx.red_add_v4(rows.dq_sum + (first + 4 * WARPGROUP * j), values, Int32(1))
        self.pass_turn(turn)

    @cute.jit
    def take_turn(self, rows: Rows, tile: Int64, walk: Walk, work: Work, slab: Int32) -> cute.Pointer | None:
        """Waits until all tiles of earlier keys have added to the slab of the tile's dQ, if deterministic.

        Their CTAs come earlier in the grid, so they run or have run. Returns where turns are counted. Waits: order.
        """
        turn = None
        if cutlass.const_expr(rows.dq_turn is not None):
            turn = rows.dq_turn + (tile * self.config.dq_parts + slab)
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                own = work.tile.m_block - self.first_tile(walk.m_block, work)
                while ptx.ld_acquire(turn) != own:
                    pass
            cute.arch.barrier(barrier_id=NamedBarrierId.ORDER, number_of_threads=WARPGROUP)
        return turn

    @cute.jit
    def pass_turn(self, turn: cute.Pointer | None) -> None:
        """Counts what has been added: the next tile of keys may add, or postprocess may read. Waits: order."""
        if cutlass.const_expr(turn is not None):
            cute.arch.barrier(barrier_id=NamedBarrierId.ORDER, number_of_threads=WARPGROUP)
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                ptx.red_release_inc(turn)

    def round(self, acc: cute.Tensor, scale: Float32 | None) -> cute.Tensor:
        """dK or dV in 16 bit, pair by pair: all products at once would need registers that other roles then lack."""
        rounded = cute.make_rmem_tensor_like(acc, self.dtype)
        words = cute.recast_tensor(cute.coalesce(rounded), Int32)
        for i in range(cute.size(words)):
            pair = [acc[2 * i + c] if scale is None else acc[2 * i + c] * scale for c in range(2)]
            words[i] = ptx.cvt_pair(self.dtype, *pair)
        return rounded

    @cute.jit
    def finish(
        self,
        leaves: Leaving,
        acc: cute.Tensor,
        columns: cutlass.Constexpr,
        head_dim: cutlass.Constexpr,
        work: Work,
        place: mask.Place,
        wg: cutlass.Constexpr,
        scale: Float32 | None,
    ) -> None:
        """Scales dK or dV, if it must be, and stores it by way of K's or V's tile; keys past the array are not written.

        Waits: turn, store. Signals: turn, store.
        """
        if cutlass.const_expr(self.config.has_padding):
            _keep_rows(acc, [row < work.seq.q_len for row in place.rows])
        rounded = self.round(acc, scale)
        cute.arch.barrier(barrier_id=NamedBarrierId.TURN, number_of_threads=WARPGROUPS * WARPGROUP)
        self.copy_to_smem(self.holder_mma(columns), rounded, leaves.tile)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        barrier, first_key = NamedBarrierId.STORE + wg, self.first_key(work)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        is_whole = Boolean(True)
        if cutlass.const_expr(leaves.rows is not None):
            rows = self.rows_left(work, first_key)
            is_whole = rows >= KEYS
            if (rows > 0) & (rows < KEYS):
                self.store_rows(leaves.rows, leaves.tile, work, first_key, rows, columns, head_dim, barrier)
        if (cute.arch.thread_idx()[0] % WARPGROUP // WARP == 0) & is_whole:
            corner = Corner(first_key + work.begin, work.tile.q_head, work.tile.batch)
            source, destination = partition(leaves.atom, (KEYS, columns), corner, leaves.tile)
            cute.copy(leaves.atom, source, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copies have left smem, so the CTA may go


def _keep_rows(acc: cute.Tensor, kept: list[Boolean]) -> None:
    """Zeroes the rows of dK or dV that are not kept, even where they hold NaN."""
    for i in range(cute.size(acc)):
        acc[i] = Float32(cutlass.select_(kept[i // 2 % 2], acc[i], Float32(0.0)))
