"""Hopper backward: the gradients of scores once more, for what scores depend on beside q and k: a bias, a softcap.

    load --k, v----> consume --> kept     gmem -TMA-> smem -wgmma-> registers -> gmem
         --q, dout->                      smem: q_stages x (Q 64 x D, dO 64 x E) | kv_stages x (K, V 128 x D, E)

    barrier      stages      arrives (count)        waits    true once it completes
    q.full       q_stages    load (1 + bytes)       consume  that Q tile is in smem; dout, k, v likewise
    q.empty      q_stages    consume (1 a warp)     load     S has read the slot; dout likewise of dP
    k.empty      kv_stages   consume (1 a warp)     load     another head's keys are in work; v likewise
    kept         named       both wgs (256)         both     the sums of all warps are in smem

    S = Q K^T    dP = dO V^T    P = exp2(scale_log2 S - lse)    dS = P (dP - delta), 0 where a query sees no key

A CTA owns 128 keys, 64 for each of two consumer warpgroups, and visits tiles of 64 queries. Queries that see none of
its keys are skipped; both roles ask `pair` which. What it makes of dS is what `ScoresConfig.kept` says:

    tiles   a bias [1 or batch, 1 or q_heads, q_len, kv_len]: for each of a CTA's tiles of queries the sum over all
            batch entries and heads that share the bias, in order, written once
    rows    a bias with one row: for each head the sum over all queries, float32; heads are summed later
    total   a softcap c: the sum of dS (t - x (1 - t^2)), t = tanh(x), x = softmax_scale s / c, a number a CTA

Nothing is added in global memory, so results are the same bits in every run.

Parameters in order, as `ScoresConfig.params` lists them (maps as in the backward, with a swizzle of 128 bytes):

    q, dout         map   (head_dim, q_len, q_heads, batch)      box (64, 64, 1, 1); dout and v have head_dim_v columns
    k, v            map   (head_dim, kv_len, kv_heads, batch)    box (64, 64, 1, 1)
    lse_log2        float32*  [batch, q_heads, padded_q_len]     +inf in rows that see nothing
    delta           float32*  [batch, q_heads, padded_q_len]
    dbias           the bias's type*  in the bias's own order; only if tiles
    dbias_rows      float32*  [batch, q_heads, kv_len]; only if rows
    dsoftcap_parts  float32*  [batch, q_heads, ceil(kv_len / 128)], a CTA's at its index; only if total
    kv_schedule     int32*    as core/schedule.py lists tiles of 128 keys; only with has_cu_seqlens
    softmax_scale ... bias_row_stride   as in the forward, without sinks (they are in lse)
    q_len kv_len q_heads kv_heads batch    int32 each
    bias_batches bias_heads query_shares   int32 each; only if tiles: extents of the bias, and CTAs a tile of keys
    q_slots         int32     places of a batch entry's tiles of queries; only with has_cu_seqlens

Grid (ceil(kv_len / 128) * query_shares * bias_heads * bias_batches, 1, 1) if tiles, else (ceil(kv_len / 128) * q_heads
* batch, 1, 1); with has_cu_seqlens (places in the schedule * q_heads, 1, 1), lse_log2 and delta have q_slots tiles and
dsoftcap_parts a number for each place. Block (384, 1, 1).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from ..core import dense, mask, softcap
from ..core.barriers import Edge, NamedBarrierId, make_pipelines
from ..core.bounds import Bounds
from ..core.divide import divide, divide_with_rest
from ..core.inputs import Features, Inputs, Logits, Window, key_blocks, logits, read, sequence, window
from ..core.packed import PackedTile, read_count, read_tile
from ..core.scheduler import Grid, Tile
from ..core.seqlen import Sequence
from ..core.tma import Corner, fetch
from . import mma

if TYPE_CHECKING:
    from jax_fa4.configs import ScoresConfig

__all__ = ["BackwardScoresSm90", "Rows", "Shares"]

LANES = 32
WARPGROUP = 128
WARPGROUP_ROWS = 64
WARPGROUP_WARPS = 4
WARPGROUPS = 2
WARPS = WARPGROUPS * WARPGROUP_WARPS
WARP_ROWS = 16
COLUMNS = 16  # of a thread, in each of its two rows of scores
HALF = COLUMNS // 2
LOAD_WARP = WARPS  # of the warpgroup behind those that compute, whose other warps only give their registers away
STAGED_PITCH = 40
NONE = -1


class Maps(NamedTuple):
    """TMA copies of one tile each."""

    q: cute.CopyAtom
    dout: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom


class Rows(NamedTuple):
    """Addresses of float32 numbers a query."""

    lse_log2: cute.Pointer
    delta: cute.Pointer


class Shares(NamedTuple):
    """How the batch entries, heads and queries that a bias serves are shared out among CTAs."""

    bias_batches: Int32
    bias_heads: Int32
    query_shares: Int32


class Smem(NamedTuple):
    """Tiles in shared memory."""

    q: cute.Tensor  # (64, D, q_stages)
    dout: cute.Tensor  # (64, E, q_stages)
    k: cute.Tensor  # (64, D, warpgroups * kv_stages), warpgroup fastest
    v: cute.Tensor  # (64, E, warpgroups * kv_stages)
    staged: cute.Tensor  # (floats of a warp, warps)


class Work(NamedTuple):
    """What a CTA computes: its keys against tiles [first_m, end_m) of queries of a range of batch entries and heads."""

    grid: Grid
    inputs: Inputs
    window: Window
    n_block: Int32
    batch: Int32  # the first
    head: Int32
    batches: Int32  # how many
    heads: Int32
    first_m: Int32
    end_m: Int32
    packed: PackedTile | None
    q_slots: Int32 | None

    @property
    def begin(self) -> Int32 | int:
        """Where the sequence's keys begin among all."""
        return 0 if self.packed is None else self.packed.begin

    @property
    def q_begin(self) -> Int32 | int:
        """Where the sequence's queries begin among all."""
        return 0 if self.packed is None else self.packed.other_begin

    def first_row(self, head: Int32, tile_m: int) -> Int64:
        """Place of the sequence's first query in numbers a query; `head` counts those of all the batch."""
        if self.packed is None:
            return Int64(head) * (divide(self.grid.q_len + (tile_m - 1), tile_m) * tile_m)
        return (Int64(head) * self.q_slots + self.packed.other_slot) * tile_m


class Pair(NamedTuple):
    """A tile of queries of one head, beside the CTA's keys."""

    tile: Tile
    seq: Sequence
    entry: Int32  # kv head, over all of the batch
    is_seen: Boolean  # whether some query sees some key


class Producers(NamedTuple):
    """The load warp's ends."""

    q: PipelineProducer
    dout: PipelineProducer
    k: PipelineProducer
    v: PipelineProducer


class Walk(NamedTuple):
    """A consumer warpgroup's ends."""

    q: PipelineConsumer
    dout: PipelineConsumer
    k: PipelineConsumer  # at the slot in work
    v: PipelineConsumer
    entry: Int32  # whose keys are in it; NONE: nobody's


class Fragments(NamedTuple):
    """What a consumer thread computes with."""

    q: cute.Tensor  # descriptors (MMA, 1, K, q_stages)
    dout: cute.Tensor
    k: cute.Tensor  # descriptors (MMA, 1, K, warpgroups * kv_stages)
    v: cute.Tensor
    scores: cute.Tensor  # accumulators, float32
    dweights: cute.Tensor
    kept: cute.Tensor  # sums of an accumulator's elements, [2 rows, 16 columns]


class BackwardScoresSm90:
    """The kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: ScoresConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.bounds = Bounds(
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            has_left=config.has_left,
            has_right=config.has_right,
            has_padding=config.has_padding,
        )
        self.edges = (
            Edge(name="q", stages=config.q_stages, tx_bytes=config.q_bytes, consumer_warps=WARPS),
            Edge(name="dout", stages=config.q_stages, tx_bytes=config.dout_bytes, consumer_warps=WARPS),
            Edge(name="k", stages=config.kv_stages, tx_bytes=config.k_bytes, consumer_warps=WARPS),
            Edge(name="v", stages=config.kv_stages, tx_bytes=config.v_bytes, consumer_warps=WARPS),
        )

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        dout: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        rows: Rows,
        result: cute.Pointer,
        schedule: cute.Pointer | None,
        inputs: Inputs,
        grid: Grid,
        shares: Shares | None,
        q_slots: Int32 | None,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config, load = self.config, cpasync.CopyBulkTensorTileG2SOp()
        arrays = ((q, config.columns), (dout, config.v_columns), (k, config.columns), (v, config.v_columns))
        maps = Maps(*(mma.tma_atom(load, array, WARPGROUP_ROWS, columns) for array, columns in arrays))
        self.kernel(maps, rows, result, schedule, inputs, grid, shares, q_slots).launch(
            grid=(grid.batch, 1, 1), block=(config.threads, 1, 1), smem=config.smem_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        rows: Rows,
        result: cute.Pointer,
        schedule: cute.Pointer | None,
        inputs: Inputs,
        grid: Grid,
        shares: Shares | None,
        q_slots: Int32 | None,
    ) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                cpasync.prefetch_descriptor(atom)
        index = cute.arch.block_idx()[0]
        if cutlass.const_expr(schedule is not None):
            work = self.listed(schedule, inputs, grid, q_slots, index)
        elif cutlass.const_expr(shares is not None):
            work = self.shared(shares, inputs, grid, index)
        else:
            work = self.head(inputs, grid, index)
        smem = self.allocate()
        ends = make_pipelines(self.edges)
        if warp_index >= WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, smem, Producers(*(ends[name][0] for name in Producers._fields)), work)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            walk = Walk(**{name: ends[name][1] for name in ("q", "dout", "k", "v")}, entry=Int32(NONE))
            self.consume(smem, walk, rows, result, work, warp_index // WARPGROUP_WARPS)

    def head(self, inputs: Inputs, grid: Grid, index: Int32) -> Work:
        """CTA `index` has all queries of one head."""
        m_blocks, n_blocks = self.blocks(grid)
        head, n_block = divide_with_rest(index, n_blocks)
        batch, head = divide_with_rest(head, grid.q_heads)
        one = Int32(1)
        return Work(grid, inputs, window(inputs), n_block, batch, head, one, one, Int32(0), m_blocks, None, None)

    def shared(self, shares: Shares | None, inputs: Inputs, grid: Grid, index: Int32) -> Work:
        """CTA `index` has some tiles of queries of all heads and batch entries that share its part of the bias."""
        assert shares is not None, "whose bias says so"
        m_blocks, n_blocks = self.blocks(grid)
        rest, n_block = divide_with_rest(index, n_blocks)
        rest, share = divide_with_rest(rest, shares.query_shares)
        batch, head = divide_with_rest(rest, shares.bias_heads)
        batches, heads = divide(grid.batch, shares.bias_batches), divide(grid.q_heads, shares.bias_heads)
        blocks = divide(m_blocks + (shares.query_shares - 1), shares.query_shares)
        first_m = share * blocks
        end_m = cutlass.min(first_m + blocks, m_blocks)
        return Work(grid, inputs, window(inputs), n_block, batch, head, batches, heads, first_m, end_m, None, None)

    def listed(
        self, schedule: cute.Pointer | None, inputs: Inputs, grid: Grid, q_slots: Int32 | None, index: Int32
    ) -> Work:
        """CTA `index` has all queries of one head of a packed sequence; behind the last listed tile there are none."""
        assert schedule is not None, "only packed sequences have a schedule"
        count = read_count(schedule)
        position, head = divide_with_rest(index, grid.q_heads)
        found = read_tile(schedule, cutlass.min(position, cutlass.max(count - 1, 0)))
        n_block = divide(found.first_row(self.config.tile_n), self.config.tile_n)
        m_blocks = divide(cutlass.max(found.other_length, 0) + (self.config.tile_m - 1), self.config.tile_m)
        end_m = Int32(cutlass.select_(position < count, m_blocks, Int32(0)))
        one = Int32(1)
        return Work(grid, inputs, window(inputs), n_block, found.batch, head, one, one, Int32(0), end_m, found, q_slots)

    def blocks(self, grid: Grid) -> tuple[Int32, Int32]:
        """Tiles of queries, and of keys."""
        config = self.config
        m_blocks = divide(grid.q_len + (config.tile_m - 1), config.tile_m)
        return m_blocks, divide(grid.kv_len + (config.tile_n - 1), config.tile_n)

    def allocate(self) -> Smem:
        """Tiles on 1024-byte boundaries as the swizzle wants them, then what leaves."""
        config, smem = self.config, cutlass.memory.SmemAllocator()
        tiles = functools.partial(mma.tiles, smem, self.dtype, WARPGROUP_ROWS)
        return Smem(
            q=tiles(config.columns, config.q_stages),
            dout=tiles(config.v_columns, config.q_stages),
            k=tiles(config.columns, WARPGROUPS * config.kv_stages),
            v=tiles(config.v_columns, WARPGROUPS * config.kv_stages),
            staged=smem.allocate_tensor(Float32, cute.make_layout((config.staged_floats, WARPS)), 128),
        )

    def pair(self, work: Work, m_block: Int32, index: Int32) -> Pair:
        """The queries of tile `m_block` of batch entry and head `index` of the CTA's."""
        grid = work.grid
        batch, head = divide_with_rest(index, work.heads)
        batch, head = work.batch + batch, work.head + head
        kv_head = divide(head, divide(grid.q_heads, grid.kv_heads))
        tile = Tile(m_block, head, kv_head, batch)
        if work.packed is None:
            seq = sequence(work.inputs, grid, tile, work.window)
        else:
            # the schedule lists keys, and what queries see them
            seq = work.packed.sequence(work.window.right, work.window.left).transposed()
        within = key_blocks(work.inputs, grid, tile, m_block, self.config.tile_m)
        visit = self.bounds.visit(m_block, seq, within)
        is_seen = (work.n_block <= visit.first) & (work.n_block > visit.first - visit.num_n_blocks)
        return Pair(tile, seq, batch * grid.kv_heads + kv_head, is_seen)

    @cute.jit
    def load(self, maps: Maps, smem: Smem, pipes: Producers, work: Work) -> None:
        """Waits: q.empty, dout.empty, k.empty, v.empty. Signals: the full ones (TMA counts the bytes)."""
        config, entry = self.config, Int32(NONE)
        for m_block in cutlass.range(work.first_m, work.end_m, unroll=1):
            for index in cutlass.range(work.batches * work.heads, unroll=1):
                pair = self.pair(work, m_block, index)
                if pair.is_seen:
                    is_new = pair.entry != entry
                    if is_new:
                        pipes = self.load_keys(maps.k, smem.k, pipes, "k", work, pair, config.columns)
                    pipes = self.load_queries(maps.q, smem.q, pipes, "q", work, pair, config.columns)
                    if is_new:
                        pipes = self.load_keys(maps.v, smem.v, pipes, "v", work, pair, config.v_columns)
                    pipes = self.load_queries(maps.dout, smem.dout, pipes, "dout", work, pair, config.v_columns)
                    entry = pair.entry
        # no tail: the consumers wait for every copy, so none lands after the CTA has gone

    @cute.jit
    def load_keys(
        self,
        atom: cute.CopyAtom,
        target: cute.Tensor,
        pipes: Producers,
        name: cutlass.Constexpr,
        work: Work,
        pair: Pair,
        columns: cutlass.Constexpr,
    ) -> Producers:
        """K or V of the CTA. Waits: its empty barrier. Signals: its full one."""
        slot = getattr(pipes, name).acquire_and_advance()
        for wg in cutlass.range_constexpr(WARPGROUPS):
            row = work.begin + work.n_block * self.config.tile_n + wg * WARPGROUP_ROWS
            tile = target[None, None, slot.index * WARPGROUPS + wg]
            fetch(atom, (WARPGROUP_ROWS, columns), Corner(row, pair.tile.kv_head, pair.tile.batch), tile, slot)
        return pipes

    @cute.jit
    def load_queries(
        self,
        atom: cute.CopyAtom,
        target: cute.Tensor,
        pipes: Producers,
        name: cutlass.Constexpr,
        work: Work,
        pair: Pair,
        columns: cutlass.Constexpr,
    ) -> Producers:
        """A tile of Q or dO. Waits: its empty barrier. Signals: its full one."""
        slot = getattr(pipes, name).acquire_and_advance()
        corner = Corner(work.q_begin + pair.tile.m_block * self.config.tile_m, pair.tile.q_head, pair.tile.batch)
        fetch(atom, (self.config.tile_m, columns), corner, target[None, None, slot.index], slot)
        return pipes

    @cute.jit
    def consume(self, smem: Smem, walk: Walk, rows: Rows, result: cute.Pointer, work: Work, wg: Int32) -> None:
        """Waits: all the full ones, kept. Signals: the empty ones, kept."""
        fragments, scale = self.fragments(smem), logits(work.inputs)
        fragments.kept.fill(0.0)
        for m_block in cutlass.range(work.first_m, work.end_m, unroll=1):
            for index in cutlass.range(work.batches * work.heads, unroll=1):
                pair = self.pair(work, m_block, index)
                if pair.is_seen:
                    walk = self.step(fragments, walk, rows, scale, work, pair, wg)
            if cutlass.const_expr(self.config.kept == "tiles"):
                self.store_tile(smem, fragments, result, work, m_block, wg)
                fragments.kept.fill(0.0)
        if cutlass.const_expr(self.config.kept == "rows"):
            self.store_row(smem, fragments, result, work, wg)
        if cutlass.const_expr(self.config.kept == "total"):
            self.store_total(smem, fragments, result)

    def fragments(self, smem: Smem) -> Fragments:
        """Descriptors and registers of the calling thread."""
        scores_mma = mma.scores_mma(self.dtype, WARPGROUP_ROWS)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        own = scores_mma.get_slice(0)
        shape = scores_mma.partition_shape_C((WARPGROUP_ROWS, WARPGROUP_ROWS))
        return Fragments(
            q=scores_mma.make_fragment_A(own.partition_A(smem.q)),
            dout=scores_mma.make_fragment_A(own.partition_A(smem.dout)),
            k=scores_mma.make_fragment_B(own.partition_B(smem.k)),
            v=scores_mma.make_fragment_B(own.partition_B(smem.v)),
            scores=cute.make_rmem_tensor(shape, Float32),
            dweights=cute.make_rmem_tensor(shape, Float32),
            kept=mma.rows_and_columns(cute.make_rmem_tensor(shape, Float32)),
        )

    @cute.jit
    def step(
        self, fragments: Fragments, walk: Walk, rows: Rows, scale: Logits, work: Work, pair: Pair, wg: Int32
    ) -> Walk:
        """Adds what a tile of queries gives. Waits: all the full ones. Signals: the empty ones."""
        config, tile = self.config, pair.tile
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = mma.place(tile.m_block * config.tile_m, thread, WARPGROUP_ROWS)
        start = work.n_block * config.tile_n + wg * WARPGROUP_ROWS
        features = Features.of(work.inputs, work.grid, tile, place)
        lse_log2, delta = self.statistics(rows, work, pair, place)
        # what lies in global memory is asked for before the first wait, so that it comes while S is computed
        seen = None if features.mask is None else dense.bits(features.mask, place, start, ragged=True)
        bias = None if features.bias is None else self.read_bias(features.bias, place, start)
        walk = self.next_keys(walk, pair)
        slot = walk.q.wait_and_advance()  # Q has landed
        warpgroup.fence()
        self.issue(fragments.scores, fragments.q, fragments.k, slot.index, walk.k, wg, config.k_steps)
        dout_slot = walk.dout.wait_and_advance()  # dO has landed
        self.issue(fragments.dweights, fragments.dout, fragments.v, dout_slot.index, walk.v, wg, config.v_steps)
        warpgroup.wait_group(1)  # S is in registers; dP may still run
        slot.release()
        scores, dweights = mma.rows_and_columns(fragments.scores), mma.rows_and_columns(fragments.dweights)
        slopes = self.prepare(scores, scale, bias)
        self.exponentiate(scores, scale, lse_log2)
        warpgroup.wait_group(0)  # dP is in registers
        dout_slot.release()
        self.differentiate(scores, dweights, delta, slopes)
        self.hide(scores, features, seen, place, start, pair.seq, work.grid.kv_len)
        for r in cutlass.range_constexpr(2):
            is_live = lse_log2[r] != Float32.inf
            for c in cutlass.range_constexpr(COLUMNS):
                score = Float32(cutlass.select_(is_live, scores[r, c], Float32(0.0)))
                fragments.kept[r, c] = fragments.kept[r, c] + score
        return walk

    @cute.jit
    def next_keys(self, walk: Walk, pair: Pair) -> Walk:
        """K and V are those of the pair. Waits: k.full, v.full. Signals: k.empty, v.empty."""
        if pair.entry != walk.entry:
            if walk.entry != NONE:
                walk.k.release()
                walk.k.advance()
                walk.v.release()
                walk.v.advance()
            walk.k.wait()
            walk.v.wait()
        return walk._replace(entry=pair.entry)

    def statistics(self, rows: Rows, work: Work, pair: Pair, place: mask.Place) -> tuple[list[Float32], list[Float32]]:
        """lse_log2, +inf beyond the last query, and delta of the thread's queries."""
        head, q_len = pair.tile.batch * work.grid.q_heads + pair.tile.q_head, pair.seq.q_len
        first = work.first_row(head, self.config.tile_m)
        places = [first + cutlass.max(cutlass.min(row, q_len - 1), 0) for row in place.rows]
        lse_log2 = [
            Float32(cutlass.select_(row < q_len, read(rows.lse_log2 + at), Float32(Float32.inf)))
            for row, at in zip(place.rows, places, strict=True)
        ]
        return lse_log2, [read(rows.delta + at) for at in places]

    def issue(
        self,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        stage: Int32,
        keys: PipelineConsumer,
        wg: Int32,
        steps: int,
    ) -> None:
        """Starts S = Q K^T or dP = dO V^T."""
        scores_mma = mma.scores_mma(self.dtype, WARPGROUP_ROWS)
        b = b[None, None, None, keys.current_handle().index * WARPGROUPS + wg]
        mma.batch(scores_mma, acc, a[None, None, None, stage], b, accumulate=False, steps=steps)

    def read_bias(self, rows: dense.Rows, place: mask.Place, start: Int32) -> cute.Tensor:
        """The bias of the thread's scores [2, 16], in its own type."""
        bias, first = cute.make_rmem_tensor((2, COLUMNS), rows.pointers[0].dtype), start + place.first_column
        for r in range(2):
            for c, column in enumerate(place.columns):
                bias[r, c] = dense.element(rows, r, cutlass.min(first + column, rows.last))
        return bias

    def prepare(self, scores: cute.Tensor, scale: Logits, bias: cute.Tensor | None) -> cute.Tensor | None:
        """Cap and bias. Returns the derivatives of the scores by the cap, if `kept` is their total."""
        slopes = None
        if scale.capped is not None:
            if self.config.kept == "total":
                slopes = cute.make_rmem_tensor(scores.shape, Float32)
                softcap.slopes_by_cap(scores, slopes, scale.capped)
            softcap.cap(scores, scale.capped)
        if bias is not None:
            for r in range(2):
                for c in range(COLUMNS):
                    scores[r, c] = cute.math.fma(scores[r, c], scale.biased, Float32(bias[r, c]))
        return slopes

    def exponentiate(self, scores: cute.Tensor, scale: Logits, lse_log2: list[Float32]) -> None:
        """Scores [2, 16] become weights in place."""
        for r in range(2):
            for c in range(COLUMNS):
                power = cute.math.fma(scores[r, c], scale.scale_log2, -lse_log2[r])
                scores[r, c] = cute.math.exp2(power, fastmath=True)

    def differentiate(
        self, weights: cute.Tensor, dweights: cute.Tensor, delta: list[Float32], slopes: cute.Tensor | None
    ) -> None:
        """Weights become gradients of scores in place, or what those give to the cap."""
        for r in range(2):
            for c in range(COLUMNS):
                dscore = weights[r, c] * (dweights[r, c] - delta[r])
                weights[r, c] = dscore if slopes is None else dscore * slopes[r, c]

    def hide(
        self,
        scores: cute.Tensor,
        features: Features,
        seen: tuple[Int32, ...] | None,
        place: mask.Place,
        start: Int32,
        seq: Sequence,
        kv_len: Int32,
    ) -> None:
        """Zeroes what belongs to keys that a query doesn't see: after all arithmetic, since it may be NaN."""
        mask.hide(scores, place, start, seq, right=True, left=self.config.has_left, hidden=0.0)
        if features.q_ids is not None and features.kv_ids is not None:
            ids = (features.q_ids, features.kv_ids)
            mask.hide_other_segments(scores, place, start, *ids, kv_len, ragged=True, hidden=0.0)
        if seen is not None:
            dense.hide_unset(scores, seen, 0, hidden=0.0)

    @cute.jit
    def store_tile(
        self, smem: Smem, fragments: Fragments, result: cute.Pointer, work: Work, m_block: Int32, wg: Int32
    ) -> None:
        """A warp's 16 rows of the tile, through its part of shared memory, so that lanes write neighbouring keys."""
        thread, lane = cute.arch.thread_idx()[0] % WARPGROUP, cute.arch.lane_idx()
        warp = wg * WARPGROUP_WARPS + thread // LANES
        source, row_stride = self.part(result, work)
        first_row = m_block * self.config.tile_m + thread // LANES * WARP_ROWS
        first_key = work.n_block * self.config.tile_n + wg * WARPGROUP_ROWS + lane
        for half in cutlass.range_constexpr(WARPGROUP_ROWS // LANES):
            cute.arch.sync_warp()  # the half before has been read
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(HALF):
                    column = c // 2 * 8 + lane % 4 * 2 + c % 2
                    smem.staged[(lane // 4 + 8 * r) * STAGED_PITCH + column, warp] = fragments.kept[r, half * HALF + c]
            cute.arch.sync_warp()
            key = first_key + half * LANES
            for i in cutlass.range_constexpr(WARP_ROWS):
                row = first_row + i
                if (row < work.grid.q_len) & (key < work.grid.kv_len):
                    place = cute.make_tensor(source + (row * row_stride + key), cute.make_layout(1))
                    place[0] = smem.staged[i * STAGED_PITCH + lane, warp].to(result.dtype)

    def part(self, result: cute.Pointer, work: Work) -> tuple[cute.Pointer, Int64]:
        """Where the CTA's part of the bias's gradient starts, and elements from one of its rows to the next."""
        assert work.inputs.bias_strides is not None, "it has a bias"
        batch_stride, head_stride, row_stride = work.inputs.bias_strides
        return result + (work.batch * batch_stride + work.head * head_stride), row_stride

    @cute.jit
    def store_row(self, smem: Smem, fragments: Fragments, result: cute.Pointer, work: Work, wg: Int32) -> None:
        """The sums of all queries. Waits: kept. Signals: kept."""
        thread, lane = cute.arch.thread_idx()[0] % WARPGROUP, cute.arch.lane_idx()
        warp = wg * WARPGROUP_WARPS + thread // LANES
        for c in cutlass.range_constexpr(COLUMNS):
            total = fragments.kept[0, c] + fragments.kept[1, c]
            for distance in (4, 8, 16):  # lanes that have the same column
                total = total + cute.arch.shuffle_sync_bfly(total, distance)
            if lane < 4:
                smem.staged[c // 2 * 8 + lane * 2 + c % 2, warp] = total
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE, number_of_threads=WARPGROUPS * WARPGROUP)
        key = work.n_block * self.config.tile_n + wg * WARPGROUP_ROWS + thread
        if (thread < WARPGROUP_ROWS) & (key < work.grid.kv_len):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(WARPGROUP_WARPS):
                total = total + smem.staged[thread, wg * WARPGROUP_WARPS + i]
            head = Int64(work.batch) * work.grid.q_heads + work.head
            cute.make_tensor(result + (head * work.grid.kv_len + key), cute.make_layout(1))[0] = total

    @cute.jit
    def store_total(self, smem: Smem, fragments: Fragments, result: cute.Pointer) -> None:
        """The CTA's sum. Waits: kept. Signals: kept."""
        thread = cute.arch.thread_idx()[0]
        total = Float32(0.0)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(COLUMNS):
                total = total + fragments.kept[r, c]
        total = cute.arch.warp_reduction_sum(total)
        if thread % LANES == 0:
            smem.staged[0, thread // LANES] = total
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE, number_of_threads=WARPGROUPS * WARPGROUP)
        if thread == 0:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(WARPS):
                total = total + smem.staged[0, i]
            cute.make_tensor(result + cute.arch.block_idx()[0], cute.make_layout(1))[0] = total
