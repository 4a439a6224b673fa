"""Hopper forward: a producer warp streams Q, K and V past consumer warpgroups that hold 64 query rows each.

    load --q--> consume     gmem -TMA-> smem -wgmma-> registers -stmatrix-> smem -TMA-> gmem, or registers -> gmem
         --k-->             smem: q_stages x Q tile_m x D (O may leave through it)
         --v-->                   | kv_stages x K tile_n x D | kv_stages x V | what tiles these are

    barrier   stages     arrives (count)        waits    true once it completes
    q.full    q_slots    load (1 + bytes)       wg i     warpgroup i's rows of Q are in smem
    q.empty   q_slots    wg i (1, or 1 a warp)  load     nobody needs Q: O has left the slot, or will leave elsewhere
    k.full    kv_stages  load (1 + bytes)       consume  that K block is in smem
    k.empty   kv_stages  consume (1 a warp)     load     every wgmma that reads the slot has retired
    v.full    kv_stages  load (1 + bytes)       consume  that V block is in smem
    v.empty   kv_stages  consume (1 a warp)     load     every wgmma that reads the slot has retired
    turn[i]   named      wg i-1 and wg i (256)  wg i     the tensor core is warpgroup i's
    store[i]  named      wg i (128)             wg i     warpgroup i's part of O is in smem, over its own rows of Q
    clear     named      consume (all threads)  consume  V rows beyond the sequence are 0; only with kv lengths

    tensor core | S, O of wg 0 | S, O of wg 1 | S, O of wg 0 |   one column = one hand-over of `turn`
    wg 0        | issues       | softmax n-1  | issues       |
    wg 1        | softmax n    | issues       | softmax n-1  |

Within a warpgroup S(n-1) = Q K(n-1)^T and O += P(n) V(n) are issued together, and the softmax of S(n-1) runs while the
second of them still does. O is scaled for a new maximum as soon as it is complete, or, with wide values, beside the
products of the next S. Key blocks are visited downwards: the masked right edge first, the masked left edge last.

A persistent CTA walks over tiles (core/scheduler.py). The load warp runs ahead into the next tile as far as slots are
free; slot (tile * warpgroups + wg) mod q_slots holds Q of warpgroup wg. A consumer issues the last O += P V of a tile
together with the first S of the next one, and stores O while that S is computed. With two Q stages O leaves through
its Q's slot, by TMA. With one, where head dims leave no room for a second, that slot belongs to the next tile once the
last S is complete, and a thread stores what it holds; the load warp has had that Q brought to L2 before.

Of Q the first steps of columns may be held in registers, where those are left: a product of S reads two thirds of the
shared memory then, which copies write to meanwhile.

Which tile it is takes divisions to find. The load warp does them, far ahead, and says so in shared memory before it
signals q.full: of a tile two ahead with two Q stages, one ahead with one, while the consumers still read of theirs.
Consumers that a config doesn't let be told find it themselves: their loop's instructions come out in another order.
Tiles of packed sequences differ most in work, and so do equal shares of them: there the load warp takes a ticket for
the tile after the next, unless it walks to it, and says of each which one follows.

Head dims that 16 doesn't divide are padded in shared memory: the copies fill in zeros there, and drop them from O.

Parameters in order, as `KernelConfig.params` lists them (a map: 128-byte CUtensorMap by value, innermost extent
contiguous, strides of the others free, zero fill outside; its swizzle is 128, 64 or 32 bytes, the widest that divides a
padded row, and w elements are one row of it):

    q               map   (head_dim, q_len, q_heads, batch)      box (w, 64, 1, 1)
    k               map   (head_dim, kv_len, kv_heads, batch)    box (w, tile_n, 1, 1)
    v               map   (head_dim_v, kv_len, kv_heads, batch)  box (w, tile_n, 1, 1)
    out             map   (head_dim_v, q_len, q_heads, batch)    box (w, 64, 1, 1)
                    not in a persistent kernel with one Q stage
    lse             float32*  [batch, q_heads, q_len]
    q_schedule      int32*    as core/schedule.py lists tiles, in the order "tiles", with tickets that it counts;
                    only with has_cu_seqlens
    out             the config's type*  [batch, q_len, q_heads, head_dim_v] by strides: its address; with
                    has_cu_seqlens again, else only where there is no map of it, like
    out_*_stride    int64 each, * batch, row, head: in elements
    softmax_scale   float32*  one element
    window_left     int32*    one element, >= 0; only with has_left
    window_right    int32*    one element, >= 0; only with has_right
    softcap         float32*  one element, not 0; only with has_softcap
    q_offset        int32*    [batch, kv_heads] key at query 0's diagonal; only with has_q_offset
    q_lengths       int32*    [batch, kv_heads] queries beyond are padding; only with has_q_lengths
    kv_lengths      int32*    [batch, kv_heads] keys beyond are padding; only with has_kv_lengths
    sinks           float32*  [batch, q_heads]; only with has_sinks
    q_segment_ids   int32*    [batch, kv_heads, q_len]; only with has_segments, like the next two
    kv_segment_ids  int32*    [batch, kv_heads, kv_len]
    key_blocks      int32*    [batch, kv_heads, ceil(q_len / tile_m), 4]: which blocks queries [i * tile_m, (i + 1) *
                              tile_m) visit, as core/bounds.py has SegmentBlocks
    mask            uint8*    rows of kv_len bytes, 0 hides; only with has_mask
    bias            the config's type*, rows of kv_len; only with a bias
    mask_*_stride bias_*_stride    int64 each, * batch, head, row: in elements, 0 where one serves all
    q_len kv_len q_heads kv_heads batch    int32 each

With has_cu_seqlens q_len and kv_len are those of all sequences. A copy brings rows of the next one, too: its keys are
hidden and its values cleared, and O of a warpgroup that has its queries goes to global memory row by row.

Grid (ctas, 1, 1), block (threads, 1, 1), no cluster. There are ceil(q_len / tile_m) * q_heads * batch tiles: as many
as ctas, or of a persistent kernel at least as many; with has_cu_seqlens a CTA of one tile may find none. Where no query
of a tile sees a key, the box copied from k and v lies outside: with kv_len = 0 the arrays behind their maps are not
read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from ..core import inputs as calls
from ..core import mask, ptx
from ..core.barriers import Edge, NamedBarrierId, make_pipelines
from ..core.bounds import Bounds, Visit
from ..core.inputs import BOTH_SIGNS, Features, Inputs, Logits, Window
from ..core.packed import PackedTile, read_count, read_longest, read_tile, take_ticket
from ..core.rows import GlobalRows
from ..core.scheduler import Grid, QueryTile, Queue, TileOrder, Walk
from ..core.seqlen import Sequence
from ..core.softmax import Softmax
from ..core.tma import Corner, fetch, partition
from . import mma
from .rows import store_rows

if TYPE_CHECKING:
    from jax_fa4.configs import KernelConfig

__all__ = ["ForwardSm90", "Results"]

WARPGROUP = 128
WARPGROUP_ROWS = 64
WARPGROUP_WARPS = 4
LOAD_WARP = 0  # of the producer warpgroup, which comes first; its other warps only give their registers away


class Maps(NamedTuple):
    """TMA copies of one tile each."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom | None


class Results(NamedTuple):
    """What the kernel writes from registers, and where packed sequences list their tiles."""

    lse: cute.Pointer
    schedule: cute.Pointer | None
    out: GlobalRows | None  # where TMA leaves rows, or all of them, to be stored one by one


class Smem(NamedTuple):
    """Tiles in shared memory."""

    q: cute.Tensor  # (64, D, q_slots)
    k: cute.Tensor  # (tile_n, D, kv_stages)
    v: cute.Tensor  # (tile_n, E, kv_stages)
    v_transposed: cute.Tensor  # (E, tile_n, kv_stages), the same bytes
    out: cute.Tensor  # (64, E, q_slots), the bytes of q; only where O leaves by TMA
    tiles: cute.Tensor  # (tile_words, tile_places) Int32: what the load warp says of the tiles at hand


class Call(NamedTuple):
    """What all tiles have in common."""

    results: Results
    listed: Int32 | None  # tiles of each head in the schedule
    grid: Grid
    inputs: Inputs
    logits: Logits
    window: Window
    tiles: Int32
    ctas: Int32


class Work(NamedTuple):
    """One tile and what it visits."""

    tile: QueryTile
    seq: Sequence
    visit: Visit


class View(NamedTuple):
    """What a consumer thread weighs the scores of one tile with."""

    seq: Sequence
    place: mask.Place
    features: Features


class Producers(NamedTuple):
    """The load warp's ends."""

    q: PipelineProducer
    k: PipelineProducer
    v: PipelineProducer


class Consumers(NamedTuple):
    """A consumer warpgroup's ends."""

    q: PipelineConsumer
    k: PipelineConsumer
    v: PipelineConsumer


class Fragments(NamedTuple):
    """What a consumer thread computes with."""

    q: cute.Tensor  # descriptors (MMA, 1, K, q_slots)
    q_start: cute.Tensor | None  # A operand, 16 bit: the columns of Q that are held in registers
    k: cute.Tensor  # descriptors (MMA, 1, K, kv_stages)
    v: cute.Tensor  # descriptors (MMA, 1, K, kv_stages)
    scores: cute.Tensor  # accumulator, float32
    weights: cute.Tensor  # A operand, 16 bit
    out: cute.Tensor  # accumulator, float32
    owed: cute.Tensor  # [2] float32: what rows of O have yet to be scaled by, where a config scales late
    softmax: Softmax


class ForwardSm90:
    """The forward kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: KernelConfig) -> None:
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
        self.order = TileOrder(
            tile_m=config.tile_m,
            row_step=WARPGROUP_ROWS,
            kv_bytes=(config.head_dim + config.head_dim_v) * config.element_bytes,
            longest_first=config.longest_first,
            partial_first=config.partial_first,
        )
        warps, q_bytes = config.warpgroups * WARPGROUP_WARPS, config.q_bytes // config.warpgroups
        q_warps = 1 if config.out_by_tma else WARPGROUP_WARPS
        self.edges = (
            Edge(name="q", stages=config.q_slots, tx_bytes=q_bytes, consumer_warps=q_warps),
            Edge(name="k", stages=config.kv_stages, tx_bytes=config.k_bytes, consumer_warps=warps),
            Edge(name="v", stages=config.kv_stages, tx_bytes=config.v_bytes, consumer_warps=warps),
        )

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor | None,
        results: Results,
        inputs: Inputs,
        grid: Grid,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        maps = Maps(
            q=mma.tma_atom(load, q, WARPGROUP_ROWS, config.columns),
            k=mma.tma_atom(load, k, config.tile_n, config.columns),
            v=mma.tma_atom(load, v, config.tile_n, config.v_columns),
            out=mma.tma_atom(store, out, WARPGROUP_ROWS, config.v_columns) if out is not None else None,
        )
        self.kernel(maps, results, inputs, grid).launch(
            grid=(grid.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, maps: Maps, results: Results, inputs: Inputs, grid: Grid) -> None:
        # first what takes long: these loads come back while the first tile is found and the barriers are set up
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        logits, window = calls.logits(inputs), calls.window(inputs)
        if cutlass.const_expr(results.schedule is not None):
            cute.arch.griddepcontrol_wait()  # the schedule is complete

        ctas = cute.arch.grid_dim()[0]
        walk = Walk.first(cute.arch.block_idx()[0], ctas)
        smem = self.allocate()
        ends = make_pipelines(self.edges)
        listed = None if results.schedule is None else read_count(results.schedule)
        tiles = self.order.count(grid) if listed is None else listed * grid.q_heads
        call = Call(results, listed, grid, inputs, logits, window, tiles, ctas)
        if cutlass.const_expr(listed is not None and not self.config.persistent):
            if walk.tile_index < tiles:
                self.run(maps, smem, ends, call, walk, warp_index)
        else:
            self.run(maps, smem, ends, call, walk, warp_index)

    @cute.jit
    def run(
        self,
        maps: Maps,
        smem: Smem,
        ends: dict[str, tuple[PipelineProducer, PipelineConsumer]],
        call: Call,
        walk: Walk,
        warp_index: Int32,
    ) -> None:
        """The tiles of the CTA, in the role of the calling warp."""
        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, smem, Producers(*(ends[name][0] for name in Producers._fields)), call, walk)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            wg = warp_index // WARPGROUP_WARPS - 1
            consumers = Consumers(*(ends[name][1] for name in Consumers._fields))
            self.consume(maps.out, smem, consumers, call, walk, wg)

    def find(self, call: Call, index: Int32) -> QueryTile:
        """The tile at `index` of the order."""
        ctas = call.ctas if self.config.persistent else None
        if call.listed is None:
            return self.order.tile(index, call.grid, ctas)
        position, q_head, kv_head = self.order.listed(index, call.listed, call.grid, ctas)
        packed = read_tile(call.results.schedule, position)
        return QueryTile(packed.first_row(self.config.tile_m), packed.end_row, q_head, kv_head, packed.batch, packed)

    def visit(self, call: Call, tile: QueryTile) -> Work:
        """The key blocks of a tile. Every role asks here, so that none can disagree."""
        grid, inputs, tile_m = call.grid, call.inputs, self.config.tile_m
        if tile.packed is None:
            seq = calls.sequence(inputs, grid, tile, call.window)
        else:
            seq = tile.packed.sequence(*call.window)
        # with segments tiles start at multiples of tile_m
        within = calls.key_blocks(inputs, grid, tile, tile.first_row // tile_m, tile_m)
        visit = self.bounds.visit_rows(tile.first_row, tile.end_row, seq, within)
        return Work(tile, seq, visit.never_empty(grid.kv_len // self.config.tile_n + 1))

    def allocate(self) -> Smem:
        """Q, then the K ring, then the V ring, each on a 1024-byte boundary as the swizzle wants it.

        O leaves through Q's slot: a warpgroup's part starts where its rows of Q do, whichever is wider.
        """
        config, smem = self.config, cutlass.memory.SmemAllocator()
        room = smem.allocate(config.q_slots * config.q_slot_bytes, 1024)
        slot_elements = config.q_slot_bytes // config.element_bytes

        def rows(columns: int) -> cute.Tensor:
            tile = mma.k_major(self.dtype, WARPGROUP_ROWS, columns, 1)
            (row, column, _), (row_stride, column_stride, _) = tile.outer.shape, tile.outer.stride
            every = cute.make_layout((row, column, config.q_slots), stride=(row_stride, column_stride, slot_elements))
            return cute.make_tensor(cute.recast_ptr(room, tile.inner, self.dtype), every)

        k = mma.tiles(smem, self.dtype, config.tile_n, config.columns, config.kv_stages)
        v = mma.tiles(smem, self.dtype, config.tile_n, config.v_columns, config.kv_stages)
        tiles = smem.allocate_tensor(Int32, cute.make_layout((config.tile_words, config.tile_places)), 16)
        return Smem(
            q=rows(config.columns),
            k=k,
            v=v,
            v_transposed=mma.transposed(v, config.tile_n, config.v_columns, config.kv_stages),
            out=rows(config.v_columns),
            tiles=tiles,
        )

    @cute.jit
    def load(self, maps: Maps, smem: Smem, pipes: Producers, call: Call, walk: Walk) -> None:
        """Waits: q.empty, k.empty, v.empty. Signals: q.full, k.full, v.full (TMA counts the bytes)."""
        tile, place = self.find(call, walk.tile_index), Int32(0)
        if cutlass.const_expr(not self.config.persistent):
            work = self.visit(call, tile)
            pipes = self.load_first(maps, smem, pipes, call, work, place)
            self.load_others(maps, smem, pipes, call, work)
        elif cutlass.const_expr(self.config.takes_tiles):
            schedule, queue = call.results.schedule, Queue.first(walk.tile_index, call.ctas)
            with_tickets = self.order.wants_tickets(call.listed, read_longest(schedule), call.grid, call.ctas)
            while queue.tile_index < call.tiles:
                work, following = self.visit(call, tile), queue.following.tile_index
                pipes = self.load_first(maps, smem, pipes, call, work, place, following)
                place = (place + 1) % self.config.tile_places
                ticket = Int32(-1)
                if (cute.arch.lane_idx() == 0) & (with_tickets > 0):
                    ticket = take_ticket(schedule)  # comes back beside the copies
                tile = self.find(call, cutlass.min(following, call.tiles - 1))
                pipes = self.load_others(maps, smem, pipes, call, work)
                queue = queue.next(cute.arch.shuffle_sync(ticket, 0), call.ctas)
        else:
            while walk.tile_index < call.tiles:
                work = self.visit(call, tile)
                pipes = self.load_first(maps, smem, pipes, call, work, place)
                walk, place = walk.next(call.ctas), (place + 1) % self.config.tile_places
                tile = self.find(call, cutlass.min(walk.tile_index, call.tiles - 1))
                if cutlass.const_expr(self.config.q_stages == 1):
                    self.prefetch_q(maps, smem, call, tile)
                pipes = self.load_others(maps, smem, pipes, call, work)
        # no tail: the consumers wait for every copy, so none lands after the CTA has gone

    @cute.jit
    def load_first(
        self,
        maps: Maps,
        smem: Smem,
        pipes: Producers,
        call: Call,
        work: Work,
        place: Int32,
        following: Int32 | None = None,
    ) -> Producers:
        """What the consumers want to know of a tile and of which follows, the first block of K, and Q."""
        tile, visit = work.tile, work.visit
        if cute.arch.lane_idx() == 0:
            for i, number in enumerate(numbers(tile)):
                smem.tiles[i, place] = number
            if cutlass.const_expr(following is not None):
                smem.tiles[self.config.tile_words - 1, place] = following
        cute.arch.sync_warp()  # whichever lane signals q.full
        pipes = self.load_keys(maps, smem, pipes, call, tile, visit.first)
        for wg in cutlass.range_constexpr(self.config.warpgroups):
            slot = pipes.q.acquire_and_advance()
            corner = self.of_queries(call, tile, tile.first_row + wg * WARPGROUP_ROWS)
            block = (WARPGROUP_ROWS, self.config.columns)
            fetch(maps.q, block, corner, smem.q[None, None, slot.index], slot)
        return pipes

    def prefetch_q(self, maps: Maps, smem: Smem, call: Call, tile: QueryTile) -> None:
        """Brings the queries of a tile to L2: once their slots are free, little time is left."""
        for wg in range(self.config.warpgroups):
            corner = self.of_queries(call, tile, tile.first_row + wg * WARPGROUP_ROWS)
            block = (WARPGROUP_ROWS, self.config.columns)
            cute.prefetch(maps.q, partition(maps.q, block, corner, smem.q[None, None, 0])[1])

    @cute.jit
    def load_others(self, maps: Maps, smem: Smem, pipes: Producers, call: Call, work: Work) -> Producers:
        """All other blocks of K and V as the consumers ask for them: K one ahead of V."""
        tile, visit = work.tile, work.visit
        for i in cutlass.range(visit.num_n_blocks - 1, unroll=1):
            pipes = self.load_keys(maps, smem, pipes, call, tile, visit.first - 1 - i)
            pipes = self.load_values(maps, smem, pipes, call, tile, visit.first - i)
        return self.load_values(maps, smem, pipes, call, tile, visit.first - (visit.num_n_blocks - 1))

    def of_queries(self, call: Call, tile: QueryTile, row: Int32) -> Corner:
        """Where a warpgroup's rows of q and out lie."""
        begin = 0 if tile.packed is None else tile.packed.begin
        return Corner(row + begin, tile.q_head, tile.batch)

    def of_keys(self, call: Call, tile: QueryTile, n_block: Int32) -> Corner:
        """Where a block of k and v lies."""
        begin = 0 if tile.packed is None else tile.packed.other_begin
        return Corner(n_block * self.config.tile_n + begin, tile.kv_head, tile.batch)

    @cute.jit
    def load_keys(
        self, maps: Maps, smem: Smem, pipes: Producers, call: Call, tile: QueryTile, n_block: Int32
    ) -> Producers:
        """Waits: k.empty. Signals: k.full."""
        slot = pipes.k.acquire_and_advance()
        block = (self.config.tile_n, self.config.columns)
        corner = self.of_keys(call, tile, n_block)
        fetch(maps.k, block, corner, smem.k[None, None, slot.index], slot)
        return pipes

    @cute.jit
    def load_values(
        self, maps: Maps, smem: Smem, pipes: Producers, call: Call, tile: QueryTile, n_block: Int32
    ) -> Producers:
        """Waits: v.empty. Signals: v.full."""
        slot = pipes.v.acquire_and_advance()
        block = (self.config.tile_n, self.config.v_columns)
        corner = self.of_keys(call, tile, n_block)
        fetch(maps.v, block, corner, smem.v[None, None, slot.index], slot)
        return pipes

    @cute.jit
    def consume(
        self, out_map: cute.CopyAtom | None, smem: Smem, pipes: Consumers, call: Call, walk: Walk, wg: Int32
    ) -> None:
        """Waits: q.full, k.full, v.full, turn[wg], store[wg], clear.

        Signals: q.empty, k.empty, v.empty, turn[wg+1], store[wg], clear.
        """
        fragments = self.fragments(smem, call.logits.scale_log2)
        pipes.q.advance(wg)  # to the warpgroup's first slot
        if wg == self.config.warpgroups - 1:
            self.pass_turn(wg)  # the ring of turns starts with warpgroup 0
        pipes, tile = self.first_step(smem, fragments, pipes, call, walk.tile_index, wg)
        if cutlass.const_expr(not self.config.persistent):
            work = self.visit(call, tile)
            pipes = self.middle_steps(fragments, pipes, call, work, wg)
            pipes = self.last_step(out_map, smem, fragments, pipes, call, work, wg)
        else:
            place = Int32(0)
            while walk.tile_index < call.tiles:
                work = self.visit(call, tile)
                pipes = self.middle_steps(fragments, pipes, call, work, wg)
                work = self.again(smem, call, work, place)
                walk = self.next(smem, call, walk, place)
                place = (place + 1) % self.config.tile_places
                if walk.tile_index < call.tiles:
                    pipes, tile = self.turn_over(
                        out_map, smem, fragments, pipes, call, work, place, walk.tile_index, wg
                    )
                else:
                    pipes = self.last_step(out_map, smem, fragments, pipes, call, work, wg)
        if cutlass.const_expr(self.config.out_by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # O has left smem, so the CTA may go

    def fragments(self, smem: Smem, scale: Float32) -> Fragments:
        """Descriptors and registers of the calling thread; `scale`: scale_log2."""
        config = self.config
        scores_mma = mma.scores_mma(self.dtype, config.tile_n)
        values_mma = mma.values_mma(self.dtype, config.v_columns)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        by_keys, by_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        scores_shape = scores_mma.partition_shape_C((WARPGROUP_ROWS, config.tile_n))
        weights_shape = values_mma.partition_shape_A((WARPGROUP_ROWS, config.tile_n))
        out_shape = values_mma.partition_shape_C((WARPGROUP_ROWS, config.v_columns))
        return Fragments(
            q=scores_mma.make_fragment_A(by_keys.partition_A(smem.q)),
            q_start=self.q_start(),
            k=scores_mma.make_fragment_B(by_keys.partition_B(smem.k)),
            v=values_mma.make_fragment_B(by_values.partition_B(smem.v_transposed)),
            scores=cute.make_rmem_tensor(scores_shape, Float32),
            weights=cute.make_rmem_tensor(weights_shape, self.dtype),
            out=cute.make_rmem_tensor(out_shape, Float32),
            owed=cute.make_rmem_tensor(2, Float32),
            softmax=Softmax.start(2, scale),
        )

    def q_start(self) -> cute.Tensor | None:
        """Registers for the first columns of Q, the A operand of so many steps."""
        if not self.config.q_register_steps:
            return None
        scores_mma = mma.scores_mma(self.dtype, self.config.tile_n, in_registers=True)
        columns = self.config.q_register_steps * mma.K_EXTENT
        return cute.make_rmem_tensor(scores_mma.partition_shape_A((WARPGROUP_ROWS, columns)), self.dtype)

    def view(self, call: Call, work: Work, wg: Int32) -> View:
        """Where the calling thread's scores lie, and what may be seen from there."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = mma.place(work.tile.first_row + wg * WARPGROUP_ROWS, thread, self.config.tile_n)
        features = Features.of(call.inputs, call.grid, work.tile, place, without_keys=call.inputs.softmax_scale)
        return View(work.seq, place, features)

    def tile(self, smem: Smem, call: Call, place: Int32, index: Int32) -> QueryTile:
        """The tile at `index` of the order, once its Q is there: the load warp speaks of it at `place`."""
        if not self.config.tells_tiles:
            return self.find(call, index)
        first_row, end_row, q_head, kv_head, batch, *others = (
            smem.tiles[i, place] for i in range(self.config.tile_words)
        )
        packed = PackedTile(*others[: len(PackedTile._fields)]) if self.config.has_cu_seqlens else None
        return QueryTile(first_row, end_row, q_head, kv_head, batch, packed)

    def again(self, smem: Smem, call: Call, work: Work, place: Int32) -> Work:
        """A tile of packed sequences as its end needs it: read anew, so that no register holds it over the blocks."""
        if not self.config.takes_tiles:
            return work
        return self.visit(call, self.tile(smem, call, place, Int32(0)))

    def next(self, smem: Smem, call: Call, walk: Walk, place: Int32) -> Walk:
        """To what follows the tile at `place`."""
        if not self.config.takes_tiles:
            return walk.next(call.ctas)
        return walk._replace(tile_index=smem.tiles[self.config.tile_words - 1, place])

    @cute.jit
    def wait_for_q(self, smem: Smem, fragments: Fragments, pipes: Consumers, logits: Logits, wg: Int32) -> Int32:
        """The slot that holds the warpgroup's rows of Q, of which registers take their part. Waits: q.full."""
        slot = pipes.q.wait()
        # two conditions: one is known at compile time, the other is not
        if cutlass.const_expr(logits.negative is not None):  # noqa: SIM102
            if logits.negative:
                self.negate_q(smem, slot.index, wg)
        if cutlass.const_expr(fragments.q_start is not None):
            self.hold_q(smem, fragments, pipes.q.current_handle().index)
        return pipes.q.current_handle().index

    def hold_q(self, smem: Smem, fragments: Fragments, slot: Int32) -> None:
        """Shared memory -> registers: the first columns of a warpgroup's rows of Q."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_A(atom, mma.scores_mma(self.dtype, self.config.tile_n, in_registers=True))
        part = copy.get_slice(cute.arch.thread_idx()[0] % WARPGROUP)
        block = (WARPGROUP_ROWS, self.config.q_register_steps * mma.K_EXTENT)
        start = cute.local_tile(smem.q[None, None, slot], block, (0, 0))
        cute.copy(copy, part.partition_S(start), part.retile(fragments.q_start))

    @cute.jit
    def clear_padding(self, smem: Smem, pipes: Consumers, call: Call, work: Work) -> None:
        """Zeroes what the first V block holds beyond the sequence: its weights are 0, but 0 * NaN is NaN.

        Only there: a block further on is not visited, and what lies beyond the array itself was filled in as zeros.
        Waits: v.full, clear. Signals: clear.
        """
        config, seq = self.config, work.seq
        seen = seq.kv_len - work.visit.first * config.tile_n
        # not positive: the block lies beyond the array
        begin = 0 if work.tile.packed is None else work.tile.packed.other_begin
        if seen > 0 and seen < config.tile_n and begin + seq.kv_len < call.grid.kv_len:
            slot = pipes.v.wait()
            words = cute.recast_tensor(smem.v[None, None, slot.index], Int32)
            row_words = config.v_columns * config.element_bytes // 4
            threads = config.warpgroups * WARPGROUP
            first = cute.arch.thread_idx()[0] - WARPGROUP
            for word in cutlass.range(first, (config.tile_n - seen) * row_words, threads, unroll=1):
                words[seen + word // row_words, word % row_words] = Int32(0)
            cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
            cute.arch.barrier(barrier_id=NamedBarrierId.CLEAR, number_of_threads=threads)

    @cute.jit
    def negate_q(self, smem: Smem, slot: Int32, wg: Int32) -> None:
        """Flips the sign of the warpgroup's rows of Q: softmax takes maxima before it scales. Rare, so not unrolled."""
        words = cute.recast_tensor(smem.q[None, None, slot], Int32)
        for i in cutlass.range(cute.size(words) // WARPGROUP, unroll=1):
            word = i * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP
            words[word] = words[word] ^ Int32(BOTH_SIGNS)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE + wg, number_of_threads=WARPGROUP)

    @cute.jit
    def first_step(
        self, smem: Smem, fragments: Fragments, pipes: Consumers, call: Call, index: Int32, wg: Int32
    ) -> tuple[Consumers, QueryTile]:
        """S of the first tile's first block and its weights."""
        q_slot = self.wait_for_q(smem, fragments, pipes, call.logits, wg)
        k = pipes.k.wait_and_advance()
        self.take_turn(wg)
        self.issue_scores(fragments, q_slot, k.index)
        self.pass_turn(wg)
        warpgroup.wait_group(0)  # S is in registers
        k.release()
        work = self.visit(call, self.tile(smem, call, Int32(0), index))
        self.release_q(pipes, work.visit.num_n_blocks == 1)
        self.weigh_first(smem, fragments, pipes, call, work, wg)
        return pipes, work.tile

    @cute.jit
    def weigh_first(
        self, smem: Smem, fragments: Fragments, pipes: Consumers, call: Call, work: Work, wg: Int32
    ) -> None:
        """The weights of a tile's first block, which any edge of the mask may cut. Waits: v.full, clear."""
        fragments.out.fill(0.0)
        fragments.owed.fill(1.0)
        fragments.softmax.restart()
        view, first = self.view(call, work, wg), work.visit.first
        self.weigh(fragments, call, view, first, right=True, left=self.config.has_left, ragged=True)
        mma.pack(self.dtype, fragments.scores, fragments.weights)
        if cutlass.const_expr(self.config.clears_values):
            self.clear_padding(smem, pipes, call, work)

    @cute.jit
    def middle_steps(self, fragments: Fragments, pipes: Consumers, call: Call, work: Work, wg: Int32) -> Consumers:
        """All blocks of a tile but the first."""
        view, last = self.view(call, work, wg), work.visit.first - (work.visit.num_n_blocks - 1)
        q_slot = pipes.q.current_handle().index
        if cutlass.const_expr(self.config.q_stages > 1):
            # else the assembler moves every descriptor of Q from a thread's registers to the warp's, in each step anew
            q_slot = cute.arch.make_warp_uniform(q_slot)
        for span in work.visit.spans:
            in_span = view._replace(features=view.features.in_span(span))
            for i in cutlass.range(span.num_n_blocks, unroll=1):
                pipes = self.step(
                    fragments, pipes, call, in_span, q_slot, wg, span.first - i, last, span.right, span.left
                )
        return pipes

    @cute.jit
    def step(
        self,
        fragments: Fragments,
        pipes: Consumers,
        call: Call,
        view: View,
        q_slot: Int32,
        wg: Int32,
        n_block: Int32,
        last: Int32,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
    ) -> Consumers:
        """S(n) = Q K(n)^T beside O += P(n+1) V(n+1), then the weights of block n."""
        k = pipes.k.wait_and_advance()  # K(n) has landed
        self.take_turn(wg)  # the other warpgroups have issued theirs and gone into softmax
        self.issue_scores(fragments, q_slot, k.index)
        self.scale_late(fragments)
        v = pipes.v.wait_and_advance()  # V(n+1) has landed
        self.issue_out(fragments, v.index)
        self.pass_turn(wg)
        warpgroup.wait_group(1)  # S(n) is in registers; O += P(n+1) V(n+1) may still run
        rescale = self.weigh(fragments, call, view, n_block, right=right, left=left)
        # The next wait belongs among the exponentials. The assembler may move it up, in front of them all, but not past
        # the release of K, and a release that asks for a weight stays behind that weight. No weight is negative, NaN
        # included. H200, beside a release right after S: d128 +4% at 2k, +5-6% from 8k on, causal +3-5%, d64 +2-8%.
        # A release that asks for a late weight gained nothing.
        negative = mma.rows_and_columns(fragments.scores)[0, 0] < 0.0
        if negative == cutlass.Boolean(False):
            k.release()
        self.release_q(pipes, n_block == last)
        warpgroup.wait_group(0)  # O is complete up to block n+1, and nothing reads P any more
        v.release()
        if cutlass.const_expr(self.config.scales_late):
            fragments.owed.store(rescale.load())
        else:
            mma.scale_rows(fragments.out, rescale)
        mma.pack(self.dtype, fragments.scores, fragments.weights)
        return pipes

    def scale_late(self, fragments: Fragments) -> None:
        """Scales O as the weights of the block before asked for. A warpgroup's S is being computed meanwhile."""
        if self.config.scales_late:
            mma.scale_rows(fragments.out, fragments.owed)

    @cute.jit
    def turn_over(
        self,
        out_map: cute.CopyAtom | None,
        smem: Smem,
        fragments: Fragments,
        pipes: Consumers,
        call: Call,
        work: Work,
        place: Int32,
        index: Int32,
        wg: Int32,
    ) -> tuple[Consumers, QueryTile]:
        """O += P V of a tile's last block beside S of the next one's first block: ends one, starts another."""
        done = pipes.q.current_handle()
        pipes.q.advance(self.config.warpgroups)
        self.scale_late(fragments)
        if cutlass.const_expr(self.config.q_stages == 1):  # the next Q is on its way: O doesn't wait for it
            v = pipes.v.wait_and_advance()
            self.take_turn(wg)
            self.issue_out(fragments, v.index)
            q_slot = self.wait_for_q(smem, fragments, pipes, call.logits, wg)
            k = pipes.k.wait_and_advance()
        else:
            q_slot = self.wait_for_q(smem, fragments, pipes, call.logits, wg)
            v = pipes.v.wait_and_advance()
            k = pipes.k.wait_and_advance()
            self.take_turn(wg)
            self.issue_out(fragments, v.index)
        self.issue_scores(fragments, q_slot, k.index)
        self.pass_turn(wg)
        warpgroup.wait_group(1)  # O is complete; S of the next tile may still run
        v.release()
        self.finish(out_map, smem, fragments, done.index, call, work, wg)
        next_work = self.visit(call, self.tile(smem, call, place, index))
        warpgroup.wait_group(0)
        k.release()
        self.release_q(pipes, next_work.visit.num_n_blocks == 1)
        self.weigh_first(smem, fragments, pipes, call, next_work, wg)
        if cutlass.const_expr(self.config.out_by_tma):  # noqa: SIM102
            if cute.arch.thread_idx()[0] % WARPGROUP // 32 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # O has left smem
                cute.arch.sync_warp()  # also for the lane that signals
                done.release()
        return pipes, next_work.tile

    @cute.jit
    def last_step(
        self,
        out_map: cute.CopyAtom | None,
        smem: Smem,
        fragments: Fragments,
        pipes: Consumers,
        call: Call,
        work: Work,
        wg: Int32,
    ) -> Consumers:
        """O += P V of the last tile's last block."""
        v = pipes.v.wait_and_advance()
        self.scale_late(fragments)
        self.issue_out(fragments, v.index)
        warpgroup.wait_group(0)
        v.release()
        self.finish(out_map, smem, fragments, pipes.q.current_handle().index, call, work, wg)
        return pipes

    @cute.jit
    def release_q(self, pipes: Consumers, is_last: Boolean) -> None:
        """Once a tile's last S is complete, its Q may be overwritten, unless O leaves through it. Signals: q.empty."""
        if cutlass.const_expr(not self.config.out_by_tma):  # noqa: SIM102
            if is_last:
                pipes.q.current_handle().release()

    def issue_scores(self, fragments: Fragments, q_slot: Int32, stage: Int32) -> None:
        """Starts S = Q K^T."""
        q, k = fragments.q[None, None, None, q_slot], fragments.k[None, None, None, stage]
        held, tile_n = self.config.q_register_steps, self.config.tile_n
        # Before each batch: where a fence is left out, also between two of them, the assembler sets one itself or,
        # seeing branches that could diverge, waits for every single wgmma.
        warpgroup.fence()
        if fragments.q_start is not None:
            from_registers = mma.scores_mma(self.dtype, tile_n, in_registers=True)
            mma.products(from_registers, fragments.scores, fragments.q_start, k, range(held), accumulate=False)
        others = range(held, self.config.columns // mma.K_EXTENT)
        mma.products(mma.scores_mma(self.dtype, tile_n), fragments.scores, q, k, others, accumulate=held > 0)
        warpgroup.commit_group()

    def issue_out(self, fragments: Fragments, stage: Int32) -> None:
        """Starts O += P V."""
        v = fragments.v[None, None, None, stage]
        warpgroup.fence()
        mma.batch(
            mma.values_mma(self.dtype, self.config.v_columns), fragments.out, fragments.weights, v, accumulate=True
        )

    def weigh(
        self,
        fragments: Fragments,
        call: Call,
        view: View,
        n_block: Int32,
        *,
        right: bool,
        left: bool,
        ragged: bool = False,
    ) -> cute.Tensor:
        """Cap, bias, mask and softmax: scores become weights in float32. Returns the factor for earlier rows of O.

        `ragged`: the block may reach beyond the last key.
        """
        scores = mma.rows_and_columns(fragments.scores)
        calls.prepare(
            scores,
            call.logits,
            view.features,
            view.place,
            n_block * self.config.tile_n,
            view.seq,
            cutlass.max(call.grid.kv_len, 1),
            right=right,
            left=left,
            ragged=ragged,
        )
        config, features = self.config, view.features
        hides = (
            right or left or ragged or any(part is not None for part in (features.q_ids, features.mask, features.bias))
        )
        return fragments.softmax.update(
            scores,
            staggered=config.staggered,
            exp2_period=config.exp2_period,
            may_be_empty=hides or not config.trusts_maxima,
        )

    @cute.jit
    def finish(
        self,
        out_map: cute.CopyAtom | None,
        smem: Smem,
        fragments: Fragments,
        q_slot: Int32,
        call: Call,
        work: Work,
        wg: Int32,
    ) -> None:
        """Normalises O and stores it and lse."""
        tile, sinks = work.tile, call.inputs.sinks
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = mma.place(tile.first_row + wg * WARPGROUP_ROWS, thread, self.config.tile_n)
        sink = None if sinks is None else calls.read(sinks + (tile.batch * call.grid.q_heads + tile.q_head))
        factors, lses = fragments.softmax.finish(sink)
        mma.scale_rows(fragments.out, factors)
        if self.config.has_padding:
            present = [row < work.seq.q_len for row in place.rows]
            mma.keep_rows(fragments.out, present)
            lses = [Float32(cutlass.select_(p, lse_, -Float32.inf)) for p, lse_ in zip(present, lses, strict=True)]
        if cutlass.const_expr(self.config.out_by_tma):
            self.store_tile(out_map, smem, fragments, q_slot, call, tile, wg)
        else:
            self.store_registers(fragments, call, place, tile)
        self.store_lse(call, place, tile, lses)

    @cute.jit
    def store_tile(
        self,
        out_map: cute.CopyAtom,
        smem: Smem,
        fragments: Fragments,
        q_slot: Int32,
        call: Call,
        tile: QueryTile,
        wg: Int32,
    ) -> None:
        """Registers -> the slot of the warpgroup's Q -> global memory; TMA leaves out rows past q_len."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma.values_mma(self.dtype, self.config.v_columns))
        rounded = cute.make_rmem_tensor_like(fragments.out, self.dtype)
        rounded.store(fragments.out.load().to(self.dtype))
        target = smem.out[None, None, q_slot]
        # no wait before overwriting Q: only this warpgroup's wgmma read these rows, and all have retired
        cute.copy(copy, copy.get_slice(thread).retile(rounded), copy.get_slice(thread).partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        barrier = NamedBarrierId.STORE + wg
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        first_row = tile.first_row + wg * WARPGROUP_ROWS
        is_whole = first_row < tile.end_row
        if cutlass.const_expr(call.listed is not None):
            begin, _, room = self.places(call.grid, tile)
            rows = room - first_row
            is_partial = is_whole & (rows > 0) & (rows < WARPGROUP_ROWS)
            is_whole = is_whole & (rows >= WARPGROUP_ROWS)
            if is_partial:
                out = self.rows(call)
                start = out.row(tile.batch, begin + first_row, tile.q_head)
                store_rows(target, start, out.row_stride, rows, self.config.v_columns, self.config.head_dim_v, barrier)
        if thread // 32 == 0 and is_whole:
            block = (WARPGROUP_ROWS, self.config.v_columns)
            source, destination = partition(out_map, block, self.of_queries(call, tile, first_row), target)
            cute.copy(out_map, source, destination)
            cute.arch.cp_async_bulk_commit_group()

    def places(self, grid: Grid, tile: QueryTile) -> tuple[Int32 | int, Int32, Int32]:
        """Where the tile's sequence begins among all rows; counted from there, where the tile and the sequence end."""
        begin, room = (0, grid.q_len) if tile.packed is None else (tile.packed.begin, tile.packed.room)
        return begin, cutlass.min(room, tile.end_row), room

    def rows(self, call: Call) -> GlobalRows:
        """Rows of O."""
        assert call.results.out is not None, "only with them are rows stored one by one"
        return call.results.out

    def store_registers(self, fragments: Fragments, call: Call, place: mask.Place, tile: QueryTile) -> None:
        """Registers -> global memory in 16 bit: neighbours trade words, so that a thread stores 8 bytes at a time."""
        begin, end_row, _ = self.places(call.grid, tile)
        is_odd = cute.arch.thread_idx()[0] % 2 == 1
        acc = mma.rows_and_columns(fragments.out)
        # of two blocks of 8 columns an even thread stores its and its neighbour's of the first, an odd one of the other
        first_column = Int32(cutlass.select_(is_odd, place.first_column + 6, place.first_column))
        for r, row in enumerate(place.rows):
            target = self.rows(call).row(tile.batch, begin + row, tile.q_head) + first_column
            for pair in range(self.config.v_columns // 16):
                left, right = (
                    ptx.cvt_pair(self.dtype, acc[r, 4 * pair + 2 * i], acc[r, 4 * pair + 2 * i + 1]) for i in range(2)
                )
                got = cute.arch.shuffle_sync_bfly(Int32(cutlass.select_(is_odd, left, right)), offset=1)
                low, high = Int32(cutlass.select_(is_odd, got, left)), Int32(cutlass.select_(is_odd, right, got))
                present = row < end_row
                if 16 * pair + 16 > self.config.head_dim_v:  # the second block is padding
                    present = present & (is_odd == cutlass.Boolean(False))
                ptx.st_global_v2(target + 16 * pair, low, high, present)

    @cute.jit
    def store_lse(self, call: Call, place: mask.Place, tile: QueryTile, lses: list[Float32]) -> None:
        """One thread of the four that share a row writes it."""
        grid = call.grid
        begin, end_row, _ = self.places(grid, tile)
        if place.first_column == 0:
            row_of_lse = (Int64(tile.batch) * grid.q_heads + tile.q_head) * grid.q_len + begin
            for r in cutlass.range_constexpr(2):
                if place.rows[r] < end_row:
                    element = cute.make_tensor(call.results.lse + (row_of_lse + place.rows[r]), cute.make_layout(1))
                    element[0] = lses[r]

    def take_turn(self, wg: Int32) -> None:
        """Waits until the tensor core is warpgroup `wg`'s; with one warpgroup it always is."""
        if self.config.warpgroups > 1:
            cute.arch.barrier(barrier_id=NamedBarrierId.TURN + wg, number_of_threads=2 * WARPGROUP)

    def pass_turn(self, wg: Int32) -> None:
        """Gives the tensor core to the next warpgroup."""
        if self.config.warpgroups > 1:
            following = (wg + 1) % self.config.warpgroups
            cute.arch.barrier_arrive(barrier_id=NamedBarrierId.TURN + following, number_of_threads=2 * WARPGROUP)


def numbers(tile: QueryTile) -> tuple[Int32, ...]:
    """What describes a tile, in order."""
    *plain, packed = tile
    return (*plain, *(() if packed is None else packed))
