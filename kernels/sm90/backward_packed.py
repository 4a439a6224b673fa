"""Hopper backward of packed sequences: as `BackwardSm90`, but warpgroups add dQ to rows of global memory themselves.

A tile of queries begins anywhere among the rows, so no tile of dQ has a place of its own.


    load --k, v--> consume     gmem -TMA-> smem -wgmma-> registers: dK, dV -stmatrix-> smem -TMA-> gmem
         --q-----> consume     smem: K, V tile_n x D, E | q_stages x (Q tile_m x D, lse) | dout_stages x (dO tile_m x E,
         --dout-->                   delta) | ds_stages x dS tile_n x tile_m; dK and dV leave through K and V

    barrier      stages       arrives (count)        waits    true once it completes
    k.full       1            load (1 + bytes)       consume  the K tile is in smem; v likewise
    k.empty      1            nobody: a CTA computes one tile; v likewise
    q.full       q_stages     load (1 + bytes)       consume  that Q tile and the lse of its rows are in smem
    q.empty      q_stages     consume (1 a warp)     load     S and dK have read the slot
    dout.full    dout_stages  load (1 + bytes)       consume  that dO tile and the delta of its rows are in smem
    dout.empty   dout_stages  consume (1 a warp)     load     dP and dV have read the slot
    ds           named        both wgs (256)         both     all of dS(m) is in smem, and dQ(m-1) has been computed
    store        named        both wgs (256)         both     no wgmma reads K any more
    store[i]     named        wg i (128)             wg i     warpgroup i's part of dK and dV is in smem
    clear        named        both wgs (256)         both     rows of K, or of Q and dO, beyond the sequence are 0
    order[i]     named        wg i (128)             wg i     wg i may add, or has added, to dQ; if deterministic

All products of a tile of queries m are computed with keys as rows, so that P^T and dS^T, once rounded, are A operands
where they lie:

    S^T = K Q^T    dP^T = V dO^T    P^T = exp2(scale_log2 S^T - lse)    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q     dQ += dS K

Only dQ sums over keys: dS goes through shared memory, each warpgroup computes a 64 x 64 quarter or half of dQ over all
keys of the tile, and adds it to float32 global memory. Query tiles are visited downwards:

    wg issues   | dQ(m+1) dK(m+1) S(m) |           | dP(m) |         | dV(m) |          |
    wg computes |                      | add dQ(m+1)       | P(m)            | dS(m)    |   one wait before each

Head dims beyond 128 leave no registers for all columns of dK and dV: two CTAs (parts) then compute the same P and dS,
and half of the columns of dQ, dK and dV each. Their tiles of 32 queries are no M of a wgmma: a warpgroup computes 64
columns of dQ transposed, K^T dS^T.

`dq_sum` holds a row's columns permuted, see `add_rows`; `dq_tiles` tiles of registers, see `add_tile`. Head dims are
padded to D and E in shared memory: the copies fill in zeros there, and drop them from the results.

Parameters in order, as `BackwardConfig.params` lists them (maps as in the forward, with a swizzle of 128 bytes; v, dv
and dout have head_dim_v columns):

    q, dout         map   (head_dim, q_len, q_heads, batch)      box (64, tile_m, 1, 1)
    k, v, dk, dv    map   (head_dim, kv_len, kv_heads, batch)    box (64, 64, 1, 1)
    lse_log2        float32*  [batch, q_heads, padded_q_len]     +inf in rows that see nothing and beyond q_len
    delta           float32*  [batch, q_heads, padded_q_len]     0 there
    dq_sum          float32*  [batch, q_heads, q_len, sum_columns]  added to; or
    dq_tiles        float32*  [batch, q_heads, padded_q_len, sum_columns]
    dq_turn         int32*    [batch, q_heads, ceil(q_len / tile_m), dq_parts]; only if deterministic
    kv_schedule     int32*    as core/schedule.py lists tiles, in the order "sequences"; only with has_cu_seqlens, like
    dk dv           the config's type*  [batch, kv_len, kv_heads, head_dim] by strides: their addresses, again, and
    dk_*_stride dv_*_stride   int64 each, * batch, row, head: in elements
    softmax_scale ... bias_row_stride   as in the forward, without sinks (they are in lse), and with query_blocks in
                    place of key_blocks: int32* [batch, kv_heads, ceil(kv_len / tile_n), 2], unless deterministic
    q_len kv_len q_heads kv_heads batch    int32 each
    q_slots         int32     places of a batch entry's tiles of queries; only with has_cu_seqlens

With has_cu_seqlens q_len and kv_len are those of all sequences, lse_log2, delta and dq_turn have q_slots tiles, and a
CTA has a tile of the schedule, or none. A copy brings rows of the next sequence, too: what could reach others is
cleared, and dK and dV of a warpgroup that has some go to global memory row by row.

Grid (ceil(kv_len / tile_n) * kv_heads * batch * parts, 1, 1), block (threads, 1, 1), no cluster. With q_len = 0
nothing is copied through the maps of q and dout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from ..core import dense, mask, ptx, softcap
from ..core.barriers import Edge, NamedBarrierId, make_pipelines
from ..core.bounds import Bounds, Visit
from ..core.dense import Dense
from ..core.inputs import Inputs, key_blocks, read, sequence, window
from ..core.packed import PackedTile, read_count, read_tile
from ..core.scheduler import Grid, SingleTile, Tile
from ..core.seqlen import Sequence
from ..core.softmax import LOG2_E
from ..core.tma import Corner, fetch, partition
from . import mma
from .backward import Features, Fragments, Logits, Maps, Producers, Rows
from .rows import GlobalRows, store_rows

if TYPE_CHECKING:
    from jax_fa4.configs import BackwardConfig

__all__ = ["BackwardPackedSm90", "Packed"]

WARPGROUP = 128
WARPGROUP_ROWS = 64
WARPGROUP_WARPS = 4
WARPGROUPS = 2
SLAB = 64  # columns of a swizzle atom
LOAD_WARP = 0  # of the producer warpgroup, which comes first; its other warps only give their registers away
ALL_BITS = -1


class Packed(NamedTuple):
    """What a call with packed sequences has beside others."""

    schedule: cute.Pointer
    dk: GlobalRows
    dv: GlobalRows


class Smem(NamedTuple):
    """Tiles in shared memory."""

    k: cute.Tensor  # (64, D, warpgroups)
    v: cute.Tensor  # (64, E, warpgroups)
    k_slabs: cute.Tensor  # (64 columns, 64 keys, slabs * warpgroups), the bytes of k, slab fastest
    dk: cute.Tensor  # (64, D / parts, parts * warpgroups), the bytes of k, part fastest
    dv: cute.Tensor  # (64, E / parts, parts * warpgroups), the bytes of v, part fastest
    q: cute.Tensor  # (tile_m, D, q_stages)
    q_transposed: cute.Tensor  # (D / parts, tile_m, parts * q_stages), the same bytes, part fastest
    dout: cute.Tensor  # (tile_m, E, dout_stages)
    dout_transposed: cute.Tensor  # (E / parts, tile_m, parts * dout_stages), the same bytes, part fastest
    ds: cute.Tensor  # (64 keys, tile_m, warpgroups * ds_stages), warpgroup fastest
    ds_slabs: (
        cute.Tensor
    )  # (tile_m or 64 queries, 64 keys, slabs * warpgroups * ds_stages), the same bytes, slab fastest
    lse_log2: cute.Tensor  # (tile_m, q_stages)
    delta: cute.Tensor  # (tile_m, dout_stages)


class Work(NamedTuple):
    """One tile of keys and the tiles of queries that see it, in each of the kv head's query heads."""

    grid: Grid
    tile: Tile  # its m_block counts tiles of keys, its q_head kv heads
    part: Int32 | int  # of the columns of dQ, dK and dV
    seq: Sequence  # of the transposed problem, where a key sees queries
    visit: Visit
    group: Int32
    logits: Logits
    m_blocks: Int32  # tiles of queries of a head in lse_log2, delta and dq_turn
    packed: PackedTile | None

    @property
    def begin(self) -> Int32 | int:
        """Where the sequence's keys begin among all."""
        return 0 if self.packed is None else self.packed.begin

    @property
    def q_begin(self) -> Int32 | int:
        """Where the sequence's queries begin among all."""
        return 0 if self.packed is None else self.packed.other_begin

    def q_tile(self, head: Int32, m_block: Int32) -> Int64:
        """Place of a tile of queries in what has some for each tile; `head` counts those of all the batch."""
        first = 0 if self.packed is None else self.packed.other_slot
        return Int64(head) * self.m_blocks + (m_block + first)


class Walk(NamedTuple):
    """A consumer warpgroup's ends, and where it stands."""

    k: PipelineConsumer
    v: PipelineConsumer
    q: PipelineConsumer
    q_read: PipelineConsumer  # a step behind q: at the slot of the tile in work
    dout: PipelineConsumer  # at the slot of the tile in work
    head: Int32  # query head, over all of the batch
    m_block: Int32  # the tile in work
    ds_stage: Int32  # where its dS lies


class BackwardPackedSm90:
    """The main backward kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.query_slabs, self.column_slabs = max(config.tile_m // SLAB, 1), config.columns // SLAB
        # of the transposed problem: rows are keys, columns are queries
        self.bounds = Bounds(
            tile_m=config.tile_n,
            tile_n=config.tile_m,
            has_left=config.has_right,
            has_right=config.has_left,
            has_padding=config.has_padding,
        )
        bytes_a_query = (config.head_dim + config.head_dim_v) * config.element_bytes + 4 * config.sum_columns
        self.scheduler = SingleTile(
            tile_m=config.tile_n,
            kv_bytes=bytes_a_query,
            longest_first=config.longest_first,
            first_is_longest=True,
        )
        warps = WARPGROUPS * WARPGROUP_WARPS
        q_bytes, dout_bytes = config.q_bytes + config.row_bytes, config.dout_bytes + config.row_bytes
        self.edges = (
            Edge(name="k", stages=1, tx_bytes=config.k_bytes, consumer_warps=warps),
            Edge(name="v", stages=1, tx_bytes=config.v_bytes, consumer_warps=warps),
            Edge(name="q", stages=config.q_stages, tx_bytes=q_bytes, consumer_warps=warps),
            Edge(name="dout", stages=config.dout_stages, tx_bytes=dout_bytes, consumer_warps=warps),
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
        q_slots: Int32 | None = None,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config

        def atom(op: Any, array: cute.Tensor, rows: int, columns: int) -> cute.CopyAtom:
            return cpasync.make_tiled_tma_atom(op, array, mma.k_major(self.dtype, rows, columns, 1), (rows, columns))[0]

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        maps = Maps(
            q=atom(load, q, config.tile_m, config.columns),
            dout=atom(load, dout, config.tile_m, config.v_columns),
            k=atom(load, k, WARPGROUP_ROWS, config.columns),
            v=atom(load, v, WARPGROUP_ROWS, config.v_columns),
            dk=atom(store, dk, WARPGROUP_ROWS, config.part_columns),
            dv=atom(store, dv, WARPGROUP_ROWS, config.v_part_columns),
        )
        self.kernel(maps, rows, packed, inputs, grid, q_slots).launch(
            grid=(grid.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self, maps: Maps, rows: Rows, packed: Packed | None, inputs: Inputs, grid: Grid, q_slots: Int32 | None
    ) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                cpasync.prefetch_descriptor(atom)
        logits = self.logits(inputs)
        # the scheduler and the bounds see the transposed problem: tiles of keys, one head for each kv head
        group = grid.q_heads // grid.kv_heads
        transposed = Grid(grid.kv_len, grid.q_len * group, grid.kv_heads, grid.kv_heads, grid.batch)
        index = cute.arch.block_idx()[0]
        count = 0 if packed is None else read_count(packed.schedule)
        if cutlass.const_expr(packed is None):
            work = self.work(inputs, grid, transposed, group, logits, index)
            self.run(maps, rows, packed, inputs, work, warp_index)
        else:
            if index < count * grid.kv_heads:
                work = self.listed(packed, inputs, grid, transposed, group, logits, q_slots, index, count)
                self.run(maps, rows, packed, inputs, work, warp_index)

    def work(self, inputs: Inputs, grid: Grid, transposed: Grid, group: Int32, logits: Logits, index: Int32) -> Work:
        """The tile of CTA `index`."""
        parts = self.config.parts
        tile = self.scheduler.tile(index if parts == 1 else index // parts, transposed)
        part = 0 if parts == 1 else index % parts
        seq = sequence(inputs, grid, tile, window(inputs)).transposed()
        within = key_blocks(inputs, transposed, tile, tile.m_block, self.config.tile_n)
        visit = self.bounds.visit(tile.m_block, seq, within)
        m_blocks = (grid.q_len + (self.config.tile_m - 1)) // self.config.tile_m
        return Work(grid, tile, part, seq, visit, group, logits, m_blocks, None)

    def listed(
        self,
        packed: Packed | None,
        inputs: Inputs,
        grid: Grid,
        transposed: Grid,
        group: Int32,
        logits: Logits,
        q_slots: Int32 | None,
        index: Int32,
        count: Int32,
    ) -> Work:
        """The tile of CTA `index`, from a schedule of `count`."""
        assert packed is not None, "only packed sequences have a schedule"
        assert q_slots is not None, "whose tiles of queries have places of their own"
        position, head = self.scheduler.listed(index, count, transposed)
        found = read_tile(packed.schedule, position)
        tile = Tile(found.first_row(self.config.tile_n) // self.config.tile_n, head, head, found.batch)
        left, right = window(inputs)
        seq = found.sequence(right, left)  # it is the keys that see
        return Work(grid, tile, 0, seq, self.bounds.visit(tile.m_block, seq), group, logits, q_slots, found)

    @cute.jit
    def run(self, maps: Maps, rows: Rows, packed: Packed | None, inputs: Inputs, work: Work, warp_index: Int32) -> None:
        """A tile, in the role of the calling warp."""
        tile, grid, group = work.tile, work.grid, work.group
        smem = self.allocate()
        ends = make_pipelines(self.edges)

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, rows, smem, Producers(*(ends[name][0] for name in Producers._fields)), work)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            wg = warp_index // WARPGROUP_WARPS - 1
            walk = Walk(
                **{name: ends[name][1] for name in ("k", "v", "q", "dout")},
                q_read=ends["q"][1].clone(),
                head=tile.batch * grid.q_heads + tile.q_head * group,
                m_block=Int32(0),
                ds_stage=Int32(0),
            )
            self.consume(maps, rows, packed, smem, walk, work, wg, inputs)

    def logits(self, inputs: Inputs) -> Logits:
        """Cap and scale of the call, as the steps from a score to a weight use them."""
        softmax_scale = scale = read(inputs.softmax_scale)
        capped = biased = None
        if inputs.softcap is not None:
            cap = read(inputs.softcap)
            capped, scale = scale / cap, cap
        if self.config.bias is not None:
            biased, scale = scale, Float32(1.0)
        return Logits(softmax_scale, capped, biased, scale * LOG2_E)

    def allocate(self) -> Smem:
        """Tiles on 1024-byte boundaries as the swizzle wants them, then the statistics."""
        config, smem = self.config, cutlass.memory.SmemAllocator()

        def tiles(rows: int, columns: int, count: int) -> cute.Tensor:
            layout = mma.k_major(self.dtype, rows, columns, count)
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)

        def transposed(tile: cute.Tensor, rows: int, columns: int, count: int) -> cute.Tensor:
            return cute.make_tensor(tile.iterator, mma.mn_major(self.dtype, rows, columns, count).outer)

        def parts_of(tile: cute.Tensor, columns: int) -> cute.Tensor:
            layout = mma.k_major(self.dtype, WARPGROUP_ROWS, columns, config.parts * WARPGROUPS)
            return cute.make_tensor(tile.iterator, layout.outer)

        k = tiles(WARPGROUP_ROWS, config.columns, WARPGROUPS)
        v = tiles(WARPGROUP_ROWS, config.v_columns, WARPGROUPS)
        q = tiles(config.tile_m, config.columns, config.q_stages)
        dout = tiles(config.tile_m, config.v_columns, config.dout_stages)
        ds_tiles = WARPGROUPS * config.ds_stages
        ds = tiles(WARPGROUP_ROWS, config.tile_m, ds_tiles)
        return Smem(
            k=k,
            v=v,
            k_slabs=transposed(k, WARPGROUP_ROWS, SLAB, self.column_slabs * WARPGROUPS),
            dk=parts_of(k, config.part_columns),
            dv=parts_of(v, config.v_part_columns),
            q=q,
            q_transposed=transposed(q, config.tile_m, config.part_columns, config.parts * config.q_stages),
            dout=dout,
            dout_transposed=transposed(dout, config.tile_m, config.v_part_columns, config.parts * config.dout_stages),
            ds=ds,
            ds_slabs=transposed(ds, WARPGROUP_ROWS, min(SLAB, config.tile_m), self.query_slabs * ds_tiles),
            lse_log2=smem.allocate_tensor(Float32, cute.make_layout((config.tile_m, config.q_stages)), 16),
            delta=smem.allocate_tensor(Float32, cute.make_layout((config.tile_m, config.dout_stages)), 16),
        )

    @cute.jit
    def load(self, maps: Maps, rows: Rows, smem: Smem, pipes: Producers, work: Work) -> None:
        """Waits: k.empty, v.empty, q.empty, dout.empty. Signals: the full ones (TMA counts the bytes)."""
        tile, visit = work.tile, work.visit
        if visit.num_n_blocks > 0:
            self.load_keys(maps.k, smem.k, pipes.k, work, self.config.columns)
            for h in cutlass.range(work.group, unroll=1):
                head = tile.q_head * work.group + h
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
    def load_row(
        self,
        source: cute.Pointer,
        target: cute.Tensor,
        work: Work,
        head: Int32,
        m_block: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Starts the copy of one statistic of a tile's queries."""
        tile_m = self.config.tile_m
        first = work.q_tile(work.tile.batch * work.grid.q_heads + head, m_block)
        row = cute.make_tensor((source + first * tile_m).align(16), cute.make_layout(tile_m))
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=tile_m * Float32.width)
        with cute.arch.elect_one():
            cute.copy(atom, row, target, mbar_ptr=barrier)

    @cute.jit
    def consume(
        self,
        maps: Maps,
        rows: Rows,
        packed: Packed | None,
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
            walk.v.wait()
            if cutlass.const_expr(self.config.has_padding):
                self.clear_keys(smem, work)
            for _ in cutlass.range(work.group, unroll=1):
                walk = self.first_step(fragments, smem, rows, walk, work, wg, visit.first)
                for span in visit.spans:
                    for i in cutlass.range(span.num_n_blocks, unroll=1):
                        walk = self.step(fragments, smem, rows, walk, work, wg, span.first - i, span.right, span.left)
                walk = self.last_step(fragments, rows, walk, work, wg)
        self.finish(maps, packed, smem, fragments, work, wg, first_row)

    def fragments(self, smem: Smem, work: Work, wg: Int32, first_row: Int32, inputs: Inputs) -> Fragments:
        """Descriptors and registers of the calling thread; `first_row`: key of the warpgroup."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        scores_mma = mma.scores_mma(self.dtype, config.tile_m)
        values_mma = mma.values_mma(self.dtype, config.v_part_columns)
        keys_mma = mma.keys_mma(self.dtype, config.part_columns)
        queries_mma = mma.queries_mma(self.dtype, min(SLAB, config.tile_m))
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        tiled = (scores_mma, values_mma, keys_mma, queries_mma)
        by_scores, by_values, by_keys, by_queries = (each.get_slice(0) for each in tiled)
        scores_shape = scores_mma.partition_shape_C((WARPGROUP_ROWS, config.tile_m))
        weights_shape = values_mma.partition_shape_A((WARPGROUP_ROWS, config.tile_m))
        keys_shape = keys_mma.partition_shape_C((WARPGROUP_ROWS, config.part_columns))
        values_shape = values_mma.partition_shape_C((WARPGROUP_ROWS, config.v_part_columns))
        queries_shape = queries_mma.partition_shape_C((SLAB, min(SLAB, config.tile_m)))
        # dQ = dS K, or its transpose K^T dS^T
        if config.sums_columns:
            k_slabs = queries_mma.make_fragment_A(by_queries.partition_A(smem.k_slabs))
            ds_slabs = queries_mma.make_fragment_B(by_queries.partition_B(smem.ds_slabs))
        else:
            k_slabs = queries_mma.make_fragment_B(by_queries.partition_B(smem.k_slabs))
            ds_slabs = queries_mma.make_fragment_A(by_queries.partition_A(smem.ds_slabs))
        place = mma.place(first_row, thread, config.tile_m)
        return Fragments(
            k=scores_mma.make_fragment_A(by_scores.partition_A(smem.k))[None, None, None, wg],
            v=scores_mma.make_fragment_A(by_scores.partition_A(smem.v))[None, None, None, wg],
            q=scores_mma.make_fragment_B(by_scores.partition_B(smem.q)),
            q_transposed=keys_mma.make_fragment_B(by_keys.partition_B(smem.q_transposed)),
            dout=scores_mma.make_fragment_B(by_scores.partition_B(smem.dout)),
            dout_transposed=values_mma.make_fragment_B(by_values.partition_B(smem.dout_transposed)),
            k_slabs=k_slabs,
            ds=keys_mma.make_fragment_A(by_keys.partition_A(smem.ds)),
            ds_slabs=ds_slabs,
            scores=cute.make_rmem_tensor(scores_shape, Float32),
            dweights=cute.make_rmem_tensor(scores_shape, Float32),
            dk=cute.make_rmem_tensor(keys_shape, Float32),
            dv=cute.make_rmem_tensor(values_shape, Float32),
            dq=cute.make_rmem_tensor(queries_shape, Float32),
            weights=cute.make_rmem_tensor(weights_shape, self.dtype),
            place=place,
            is_key=tuple(Int32(cutlass.select_(row < work.seq.q_len, Int32(ALL_BITS), Int32(0))) for row in place.rows),
            features=self.features(inputs, work, place),
        )

    def features(self, inputs: Inputs, work: Work, place: mask.Place) -> Features:
        """What the calling thread needs of the call's extras."""
        tile, grid = work.tile, work.grid
        kv_ids = q_ids = None
        if inputs.q_segment_ids is not None:
            entry = Int64(tile.batch * grid.kv_heads + tile.q_head)
            q_ids = inputs.q_segment_ids + entry * grid.q_len
            ids = inputs.kv_segment_ids + entry * grid.kv_len
            kv_ids = tuple(read(ids + cutlass.min(row, grid.kv_len - 1)) for row in place.rows)
        return Features(
            kv_ids=kv_ids,
            q_ids=q_ids,
            mask=dense.present(inputs.mask, inputs.mask_strides),
            bias=dense.present(inputs.bias, inputs.bias_strides),
        )

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
            q, dout = walk.q_read.current_handle().index, walk.dout.current_handle().index
            self.clear_rows(smem.q[None, None, q], seen, config.tile_m, config.columns)
            self.clear_rows(smem.dout[None, None, dout], seen, config.tile_m, config.v_columns)
            self.cleared()

    @cute.jit
    def clear_rows(self, tile: cute.Tensor, first: Int32, rows: int, columns: int) -> None:
        """Zeroes rows [first, rows) of a tile; all consumer threads take part."""
        words, row_words = cute.recast_tensor(tile, Int32), columns * self.config.element_bytes // 4
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        for word in cutlass.range(thread, (rows - first) * row_words, WARPGROUPS * WARPGROUP, unroll=1):
            words[first + word // row_words, word % row_words] = Int32(0)

    def cleared(self) -> None:
        """Waits until all consumer threads have cleared their part. Waits: clear. Signals: clear."""
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.CLEAR, number_of_threads=WARPGROUPS * WARPGROUP)

    @cute.jit
    def first_step(
        self, fragments: Fragments, smem: Smem, rows: Rows, walk: Walk, work: Work, wg: Int32, m_block: Int32
    ) -> Walk:
        """S, P and dS of a head's first tile of queries; that tile may be cut by any edge of the mask."""
        slot = walk.q.wait_and_advance()  # Q(m) has landed
        if cutlass.const_expr(self.config.clears_queries):
            self.clear_queries(smem, walk, work, m_block)
        warpgroup.fence()
        self.issue_scores(fragments, slot.index)
        walk = walk._replace(m_block=m_block)
        edges = {"right": self.config.has_left, "left": self.config.has_right}
        return self.weigh(fragments, smem, walk, work, wg, **edges, first=True)

    @cute.jit
    def step(
        self,
        fragments: Fragments,
        smem: Smem,
        rows: Rows,
        walk: Walk,
        work: Work,
        wg: Int32,
        m_block: Int32,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
    ) -> Walk:
        """dQ and dK of tile m+1 beside S of tile m, then P and dS of tile m."""
        warpgroup.fence()
        if cutlass.const_expr(not self.config.values_early):
            self.issue_values(fragments, walk.dout.current_handle().index, work.part)
        self.issue_queries(fragments, walk, wg, work.part)
        self.issue_keys(fragments, walk, wg, work.part)
        warpgroup.wait_group(2)  # dV(m+1) is complete: the registers of P(m+1) are free for S(m)
        walk.dout.release()
        walk.dout.advance()
        slot = walk.q.wait_and_advance()  # Q(m) has landed
        self.issue_scores(fragments, slot.index)
        warpgroup.wait_group(2)  # dQ(m+1) is complete; dK(m+1) and S(m) may still run
        self.reduce_queries(fragments, rows, walk, work, wg)
        walk = walk._replace(m_block=m_block, ds_stage=walk.ds_stage ^ 1)
        return self.weigh(fragments, smem, walk, work, wg, right=right, left=left, first=False)

    @cute.jit
    def last_step(self, fragments: Fragments, rows: Rows, walk: Walk, work: Work, wg: Int32) -> Walk:
        """dQ and dK of a head's last tile of queries."""
        warpgroup.fence()
        if cutlass.const_expr(not self.config.values_early):
            self.issue_values(fragments, walk.dout.current_handle().index, work.part)
        self.issue_queries(fragments, walk, wg, work.part)
        self.issue_keys(fragments, walk, wg, work.part)
        warpgroup.wait_group(1)  # dV and dQ are complete
        walk.dout.release()
        walk.dout.advance()
        self.reduce_queries(fragments, rows, walk, work, wg)
        warpgroup.wait_group(0)  # dK is complete
        walk.q_read.release()
        walk.q_read.advance()
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
        """P(m), dP(m) and dS(m), and dV += P dO; dS(m) is in smem at the end. `first`: of a head's tiles."""
        seen = self.seen(fragments, walk, work, first)
        walk.dout.wait()  # dO(m) has landed
        dout_index = walk.dout.current_handle().index
        warpgroup.fence()
        self.issue_dweights(fragments, dout_index)
        warpgroup.wait_group(1)  # dK(m+1) is complete and S(m) in registers; dP(m) may still run
        if cutlass.const_expr(not first):
            walk.q_read.release()  # the tile before was of the same head
            walk.q_read.advance()
        scores, dweights = mma.rows_and_columns(fragments.scores), mma.rows_and_columns(fragments.dweights)
        capped, blocks = work.logits.capped, self.config.tile_m // 8
        edges, late = {"right": right, "left": left, "ragged": first, "seen": seen}, self.config.weights_late
        if cutlass.const_expr(capped is not None):
            softcap.cap(scores, capped)  # tanh: the cap's slope is 1 - tanh^2
        if cutlass.const_expr(not late):
            self.exponentiate(scores, range(blocks), fragments, smem, walk, work, **edges)
        if cutlass.const_expr(self.config.values_early):
            self.pack(fragments.scores, fragments.weights)
            warpgroup.fence()
            self.issue_values(fragments, dout_index, work.part)

        # dP(m) is in registers; dV += P(m) dO(m) may still run
        warpgroup.wait_group(1 if self.config.values_early else 0)
        dscores = cute.make_rmem_tensor_like(fragments.dweights, self.dtype)
        rounded = cute.recast_tensor(cute.coalesce(dscores), Int32)
        for block in cutlass.range_constexpr(blocks):
            weights = mma.block_of(scores, block)
            if cutlass.const_expr(late):
                self.exponentiate(weights, range(block, block + 1), fragments, smem, walk, work, **edges)
            delta = self.of_queries(smem.delta[None, dout_index], block, fragments.place)
            for r in cutlass.range_constexpr(2):
                ds = []
                for pair in cutlass.range_constexpr(2):
                    c = 2 * block + pair
                    dscore = weights[r, pair] * (dweights[r, c] - delta[pair])
                    if cutlass.const_expr(capped is not None):
                        dscore = dscore * cute.math.fma(-scores[r, c], scores[r, c], Float32(1.0))
                        scores[r, c] = weights[r, pair]
                    ds.append(dscore)
                # beyond kv_len P = exp2(-lse) may be inf, and dQ sums over keys
                rounded[2 * block + r] = ptx.cvt_pair(self.dtype, *ds) & fragments.is_key[r]
        if cutlass.const_expr(not self.config.values_early):
            self.pack(fragments.scores, fragments.weights)
        self.store_dscores(dscores, smem, walk, wg)
        return walk

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
        start = walk.m_block * self.config.tile_m
        if features.bias is not None:
            bias = self.columns_of(features.bias, place, walk, work)
            dense.add(scores, work.logits.biased, bias, place, start, ragged=ragged)
        lse_log2 = smem.lse_log2[None, walk.q_read.current_handle().index]
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

    def seen(self, fragments: Fragments, walk: Walk, work: Work, ragged: bool) -> tuple[Int32, ...] | None:
        """What a mask array lets be seen of the tile in work, read while S runs; None without one."""
        array, place = fragments.features.mask, fragments.place
        if array is None:
            return None
        columns = self.columns_of(array, place, walk, work)
        return dense.bits(columns, place, walk.m_block * self.config.tile_m, ragged=ragged)

    def columns_of(self, array: Dense, place: mask.Place, walk: Walk, work: Work) -> dense.Rows:
        """What an array has for the thread's keys, in the head in work."""
        tile, grid = work.tile, work.grid
        head = walk.head - tile.batch * grid.q_heads
        return dense.columns_of(array, place, tile.batch, head, grid.q_len, grid.kv_len)

    def issue_scores(self, fragments: Fragments, stage: Int32) -> None:
        """Starts S^T = K Q^T."""
        scores_mma = mma.scores_mma(self.dtype, self.config.tile_m)
        q = fragments.q[None, None, None, stage]
        mma.batch(scores_mma, fragments.scores, fragments.k, q, accumulate=False)

    def issue_dweights(self, fragments: Fragments, stage: Int32) -> None:
        """Starts dP^T = V dO^T."""
        scores_mma = mma.scores_mma(self.dtype, self.config.tile_m)
        dout = fragments.dout[None, None, None, stage]
        mma.batch(scores_mma, fragments.dweights, fragments.v, dout, accumulate=False)

    def issue_values(self, fragments: Fragments, stage: Int32, part: Int32 | int) -> None:
        """Starts dV += P^T dO."""
        values_mma = mma.values_mma(self.dtype, self.config.v_part_columns)
        dout = fragments.dout_transposed[None, None, None, stage * self.config.parts + part]
        mma.batch(values_mma, fragments.dv, fragments.weights, dout, accumulate=True)

    def issue_keys(self, fragments: Fragments, walk: Walk, wg: Int32, part: Int32 | int) -> None:
        """Starts dK += dS^T Q of the tile in work."""
        keys_mma = mma.keys_mma(self.dtype, self.config.part_columns)
        ds = fragments.ds[None, None, None, walk.ds_stage * WARPGROUPS + wg]
        stage = walk.q_read.current_handle().index
        q = fragments.q_transposed[None, None, None, stage * self.config.parts + part]
        mma.batch(keys_mma, fragments.dk, ds, q, accumulate=True)

    def issue_queries(self, fragments: Fragments, walk: Walk, wg: Int32, part: Int32 | int) -> None:
        """Starts dQ = dS K of the tile in work: the warpgroup's slab of queries or columns, over all keys."""
        queries_mma = mma.queries_mma(self.dtype, min(SLAB, self.config.tile_m))
        query_slab, column_slab = self.slabs(wg, part)
        steps = cute.size(fragments.ds_slabs, mode=[2])
        for keys in range(WARPGROUPS):
            ds = fragments.ds_slabs[
                None, None, None, (walk.ds_stage * WARPGROUPS + keys) * self.query_slabs + query_slab
            ]
            k = fragments.k_slabs[None, None, None, keys * self.column_slabs + column_slab]
            for step in range(steps):
                queries_mma.set(warpgroup.Field.ACCUMULATE, keys > 0 or step > 0)
                a, b = (k, ds) if self.config.sums_columns else (ds, k)
                cute.gemm(queries_mma, fragments.dq, a[None, None, step], b[None, None, step], fragments.dq)
        warpgroup.commit_group()

    def slabs(self, wg: Int32, part: Int32 | int) -> tuple[Int32 | int, Int32 | int]:
        """(slab of queries, slab of columns) of dQ that a warpgroup computes."""
        if self.config.sums_columns:
            return 0, part * WARPGROUPS + wg
        return (wg, 0) if self.query_slabs == WARPGROUPS else (0, wg)

    def of_queries(self, values: cute.Tensor, block: int, place: mask.Place) -> tuple[Float32, Float32]:
        """A statistic, in smem, of the thread's two neighbouring queries in a block of eight."""
        return ptx.ld_shared_v2(values.iterator + (8 * block + place.first_column))

    def pack(self, acc: cute.Tensor, rounded: cute.Tensor) -> None:
        """An accumulator in 16 bit: a thread's elements of it are its elements of the A operand, in the same order."""
        elements = cute.coalesce(acc)
        pairs = cute.recast_tensor(cute.coalesce(rounded), Int32)
        for i in range(cute.size(pairs)):
            pairs[i] = ptx.cvt_pair(self.dtype, elements[2 * i], elements[2 * i + 1])

    def store_dscores(self, dscores: cute.Tensor, smem: Smem, walk: Walk, wg: Int32) -> None:
        """dS(m) goes to smem for both warpgroups. Waits: ds. Signals: ds."""
        # no wait before overwriting the stage: the barrier of tile m+1 said that dQ(m+2), which read it, is complete
        target = smem.ds[None, None, walk.ds_stage * WARPGROUPS + wg]
        self.copy_to_smem(mma.scores_mma(self.dtype, self.config.tile_m), dscores, target)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.TURN, number_of_threads=WARPGROUPS * WARPGROUP)

    def copy_to_smem(self, tiled: cute.TiledMma, accumulator: cute.Tensor, target: cute.Tensor) -> None:
        """A 16-bit accumulator of `tiled` to a tile whose rows lie apart."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled).get_slice(thread)
        cute.copy(copy, copy.retile(accumulator), copy.partition_D(target))

    def reduce_queries(self, fragments: Fragments, rows: Rows, walk: Walk, work: Work, wg: Int32) -> None:
        """Adds the warpgroup's part of dQ to global memory, if deterministic in its turn."""
        turn = self.take_turn(rows, walk, work, wg)
        if self.config.sums_columns:
            self.add_tile(fragments, rows, walk, work, wg)
        else:
            self.add_rows(fragments, rows, walk, work, wg)
        self.pass_turn(turn, wg)

    def add_tile(self, fragments: Fragments, rows: Rows, walk: Walk, work: Work, wg: Int32) -> None:
        """Adds 64 columns of a tile: four floats of a thread beside those of its neighbour.

        Those of block j of 8 queries are columns c and c + 8 of queries 8 j + 2 t and the next, t = lane % 4 and
        c = 16 warp + lane / 4: [slab, j, warp, lane / 4, t, column half, query] is the order of a tile.
        """
        tile_m, slabs = self.config.tile_m, self.config.sum_columns // SLAB
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        _, slab = self.slabs(wg, work.part)
        m_blocks = (work.grid.q_len + (tile_m - 1)) // tile_m
        tile = Int64(walk.head) * m_blocks + walk.m_block
        first = (tile * slabs + slab) * (SLAB * tile_m) + 4 * thread
        present = Int32(cutlass.select_(slab < slabs, Int32(1), Int32(0)))
        dq = mma.rows_and_columns(fragments.dq)
        for j in range(tile_m // 8):
            values = tuple(dq[half, 2 * j + pair] for half in range(2) for pair in range(2))
            ptx.red_add_v4(rows.dq_sum + (first + 4 * WARPGROUP * j), values, present)

    def add_rows(self, fragments: Fragments, rows: Rows, walk: Walk, work: Work, wg: Int32) -> None:
        """Adds 64 rows or 64 columns of a tile, four neighbouring floats at a time.

        A thread has columns 16 j + 2 t + (0, 1, 8, 9) of a row, t = lane % 4. They go to places 16 j + 4 t + (0, 1, 2,
        3): what a warp adds then lies in whole 32-byte sectors.
        """
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        query_slab, column_slab = self.slabs(wg, work.part)
        first = walk.m_block * self.config.tile_m + query_slab * SLAB
        place = mma.place(first, thread, SLAB)
        dq = mma.rows_and_columns(fragments.dq)
        head_row = Int64(walk.head) * work.grid.q_len + work.q_begin
        rows_here = work.grid.q_len if work.packed is None else work.packed.other_length
        for r, row in enumerate(place.rows):
            offset = (head_row + row) * self.config.sum_columns + (column_slab * SLAB + 2 * place.first_column)
            present = Int32(cutlass.select_(row < rows_here, Int32(1), Int32(0)))
            for j in range(SLAB // 16):
                values = tuple(dq[r, 4 * j + c] for c in range(4))
                ptx.red_add_v4(rows.dq_sum + (offset + 16 * j), values, self.within(column_slab, 16 * j, present))

    @cute.jit
    def take_turn(self, rows: Rows, walk: Walk, work: Work, wg: Int32) -> cute.Pointer | None:
        """Waits until all tiles of earlier keys have added to the warpgroup's part of the tile's dQ, if deterministic.

        Their CTAs come earlier in the grid, so they run or have run. Returns where turns are counted. Waits: order.
        """
        turn = None
        if cutlass.const_expr(rows.dq_turn is not None):
            tile = work.q_tile(walk.head, walk.m_block)
            turn = rows.dq_turn + (tile * self.config.dq_parts + (work.part * WARPGROUPS + wg))
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                own = work.tile.m_block - self.first_tile(walk.m_block, work)
                while ptx.ld_acquire(turn) != own:
                    pass
            cute.arch.barrier(barrier_id=NamedBarrierId.ORDER + wg, number_of_threads=WARPGROUP)
        return turn

    def first_tile(self, m_block: Int32, work: Work) -> Int32 | int:
        """The first tile of keys that a tile of queries sees some of: those from there on visit it, if they see it."""
        seq = work.seq
        if seq.window_right is None:
            return 0
        first_key = m_block * self.config.tile_m - seq.diagonal - seq.window_right
        return cutlass.max(first_key, 0) // self.config.tile_n

    @cute.jit
    def pass_turn(self, turn: cute.Pointer | None, wg: Int32) -> None:
        """The next tile of keys may add. Waits: order."""
        if cutlass.const_expr(turn is not None):
            cute.arch.barrier(barrier_id=NamedBarrierId.ORDER + wg, number_of_threads=WARPGROUP)
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                ptx.red_release_inc(turn)

    def within(self, column_slab: Int32 | int, column: int, present: Int32) -> Int32:
        """`present`, but 0 for a slab's column that is padding."""
        if SLAB * (self.column_slabs - 1) + column < self.config.sum_columns:
            return present  # no padding in any slab
        if isinstance(column_slab, int):
            return Int32(0)
        return Int32(cutlass.select_(column_slab * SLAB + column < self.config.sum_columns, present, Int32(0)))

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
        if self.config.has_padding:
            present = [row < work.seq.q_len for row in fragments.place.rows]
            mma.keep_rows(fragments.dk, present)
            mma.keep_rows(fragments.dv, present)
        # no wait before overwriting V: only this warpgroup's wgmma read its rows, and all have retired
        config = self.config
        place = wg * config.parts + work.part
        self.round_to_smem(fragments.dv, smem.dv[None, None, place], config.v_part_columns)
        cute.arch.barrier(barrier_id=NamedBarrierId.TURN, number_of_threads=WARPGROUPS * WARPGROUP)  # K is read no more
        self.round_to_smem(fragments.dk, smem.dk[None, None, place], config.part_columns)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        barrier = NamedBarrierId.STORE + wg
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        is_whole = cutlass.Boolean(True)
        if cutlass.const_expr(packed is not None):
            rows = self.rows_left(work, first_row)
            is_whole = rows >= WARPGROUP_ROWS
            if (rows > 0) & (rows < WARPGROUP_ROWS):
                self.store_rows(packed, smem, work, first_row, rows, place, barrier)
        if (cute.arch.thread_idx()[0] % WARPGROUP // 32 == 0) & is_whole:
            for atom, tiles, columns in (
                (maps.dv, smem.dv, config.v_part_columns),
                (maps.dk, smem.dk, config.part_columns),
            ):
                corner = Corner(first_row + work.begin, work.tile.q_head, work.tile.batch, work.part * columns)
                source, destination = partition(atom, (WARPGROUP_ROWS, columns), corner, tiles[None, None, place])
                cute.copy(atom, source, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copies have left smem, so the CTA may go

    def rows_left(self, work: Work, first_row: Int32) -> Int32:
        """How many of its keys a packed sequence still has at `first_row`."""
        assert work.packed is not None, "others have all rows of an array"
        return work.packed.room - first_row

    def store_rows(
        self,
        packed: Packed | None,
        smem: Smem,
        work: Work,
        first_row: Int32,
        rows: Int32,
        place: Int32,
        barrier: Int32,
    ) -> None:
        """The first `rows` of the warpgroup's rows of dK and dV."""
        assert packed is not None, "only then are rows stored one by one"
        config, tile = self.config, work.tile
        for array, tiles, columns, head_dim in (
            (packed.dv, smem.dv, config.v_part_columns, config.head_dim_v),
            (packed.dk, smem.dk, config.part_columns, config.head_dim),
        ):
            start = array.row(tile.batch, work.begin + first_row, tile.q_head)
            store_rows(tiles[None, None, place], start, array.row_stride, rows, columns, head_dim, barrier)

    def round_to_smem(self, acc: cute.Tensor, target: cute.Tensor, columns: int) -> None:
        """dK or dV of the warpgroup to its rows of smem, in 16 bit."""
        rounded = cute.make_rmem_tensor_like(acc, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        self.copy_to_smem(mma.values_mma(self.dtype, columns), rounded, target)
