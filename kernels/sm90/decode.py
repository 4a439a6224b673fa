"""Hopper attention of few queries: a CTA streams splits of a sequence's keys past one tile of packed queries.

    load --k--> consume     gmem -TMA-> smem -wgmma-> registers -> gmem, in float32
         --v-->             smem: Q 64 x D | kv_stages x K tile_n x D | kv_stages x V

The 64 rows of a tile are 64 // group queries of all query heads of one kv head: row r is query r // group, head
r % group. So every key is read once for the whole group, and what limits the kernel is how fast keys arrive: nothing
overlaps within a CTA, since two CTAs share an SM where the head dims allow it.

The blocks that a tile sees are cut into splits of about an eighth of them (`SplitKeys`), or as many as `num_splits`
allows: that depends on the sequence alone, and so do the results, whatever else is in the batch. The kernel counts the
splits of each tile; others cost nothing. `combine` merges them.

All splits of all tiles are dealt out to the CTAs of any grid: a tile's to `parts`, a run of neighbouring splits each,
and CTA c of n takes parts c, c + n, ... of all tiles. The loads of one split run ahead into the time that the one
before takes to finish.

With clusters each makes one tile, each of its CTAs a split, and merges them itself: every CTA keeps its result where V
was, and makes some rows from what all keep. The operations are those of `combine`, and so are the bits.

Queries of packed sequences: a schedule lists the tiles of all sequences (`core.schedule`), the longest first, and those
of rows of no sequence. A tile has queries of one sequence, the first of which may be any of its rows.

    barrier   stages     arrives (count)        waits    true once it completes
    k.full    kv_stages  load (1 + bytes)       consume  that K block is in smem
    k.empty   kv_stages  consume (1 a warp)     load     every wgmma that reads the slot has retired
    v.full    kv_stages  load (1 + bytes)       consume  that V block is in smem
    v.empty   kv_stages  consume (1 a warp)     load     every wgmma that reads the slot has retired
    store     named      consume (all threads)  consume  Q is in smem; at the end: nobody reads V
    clear     named      consume (all threads)  consume  V rows beyond the sequence are 0
    cluster   1          consume of all CTAs    consume  every CTA keeps its result; then: nobody reads it

Keys in pages: page_table names the pages of a sequence, and a block arrives in boxes of as many keys as surely lie in
one page. An index outside the pool reads its nearest page.

Parameters in order, as `DecodeConfig.params` lists them (maps as in `forward`; those of pages are (head_dim, page_size,
kv_heads, num_pages), box (w, box_rows, 1, 1)):

    k v             maps  box (w, tile_n, 1, 1)
    q               16-bit*   [batch, q_len, q_heads, head_dim] by strides, head_dim contiguous
    partial_out     float32*  [batch, kv_heads, num_splits, q_len, group, head_dim_v]; not with clusters
    partial_lse     float32*  [batch, kv_heads, q_len, group, num_splits]; not with clusters
    split_counts    int32*    [batch, kv_heads, q_len] splits that have results; -1: padding; not with clusters
    out             16-bit*   [batch, q_len, q_heads, head_dim_v] by strides; only with clusters
    lse             float32*  [batch, q_heads, q_len]; only with clusters
    q_schedule      int32*    the tiles of packed sequences, see `core.schedule`; only with has_cu_seqlens
    softmax_scale window_left window_right softcap q_offset q_lengths kv_lengths   as in `forward`
    sinks           float32*  [batch, q_heads]; only with clusters
    page_table      int32*    [page_slots] a sequence; only with pages
    q_batch_stride q_row_stride q_head_stride                            int64 each, elements
    q_len kv_len q_heads kv_heads batch num_splits                       int32 each; kv_len is that of one sequence
    out_batch_stride out_row_stride out_head_stride                      int64 each; only with clusters
    page_table_head_stride (int64; 0 where all heads have one table) page_slots num_pages (int32); only with pages

Grid (n, 1, 1) with any n, block (160, 1, 1); with clusters n is num_splits a tile, cluster (num_splits, 1, 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from ..core import inputs as calls
from ..core import mask, merge, ptx
from ..core.barriers import Edge, NamedBarrierId, make_pipelines
from ..core.bounds import Bounds, Visit
from ..core.divide import divide, divide_with_rest
from ..core.inputs import BOTH_SIGNS, Features, Inputs, Logits
from ..core.packed import read_count, read_tile
from ..core.pages import Pages
from ..core.seqlen import Sequence
from ..core.softmax import Softmax
from ..core.splits import SplitKeys, Splits
from ..core.tma import Corner, fetch
from . import mma

if TYPE_CHECKING:
    from jax_fa4.configs import DecodeConfig

__all__ = ["Arrays", "DecodeSm90", "Extents"]

WARPGROUP = 128
WARPGROUP_WARPS = 4
ROWS = 64  # of a tile
LOAD_WARP = 4  # behind the consumer warpgroup
VECTOR = 8  # 16-bit elements in 16 bytes
WORDS = 4  # 32-bit words in 16 bytes
MAX_UNROLLED_BOXES = 4
MAX_CLUSTER = 8  # CTAs
LANES = 32
FLOAT_BYTES = 4


class Arrays(NamedTuple):
    """Addresses of queries, results or partial ones, and tiles of packed sequences; None: compiled without."""

    q: cute.Pointer
    partial_out: cute.Pointer | None
    partial_lse: cute.Pointer | None
    split_counts: cute.Pointer | None
    out: cute.Pointer | None
    lse: cute.Pointer | None
    q_schedule: cute.Pointer | None


class Extents(NamedTuple):
    """Sizes of a call, and q's strides in elements."""

    q_batch_stride: Int64
    q_row_stride: Int64
    q_head_stride: Int64
    q_len: Int32
    kv_len: Int32
    q_heads: Int32
    kv_heads: Int32
    batch: Int32
    num_splits: Int32


class OutStrides(NamedTuple):
    """Of out, in elements."""

    batch: Int64
    row: Int64
    head: Int64


class Call(NamedTuple):
    """What all tiles have in common. Parts of tiles are numbered; a CTA makes some, at steps."""

    inputs: Inputs
    extents: Extents
    page_table: cute.Pointer | None
    pages: Pages | None
    schedule: cute.Pointer | None
    logits: Logits
    out_strides: OutStrides | None
    group: Int32
    tile_queries: Int32  # of a tile that is full
    tiles: Int32
    parts: Int32  # of a tile
    first_part: Int32  # of the CTA
    end_part: Int32
    part_step: Int32


class Tile(NamedTuple):
    """Queries of a kv head's group, and which of their splits to make."""

    first_query: Int32  # in its sequence
    row: Int32  # of the first query, in q
    num_queries: Int32
    kv_head: Int32
    batch: Int32
    sequence: Int32  # whose pages the keys lie in
    part: Int32


class Work(NamedTuple):
    """One tile and what it visits."""

    tile: Tile
    seq: Sequence
    splits: Splits
    num_splits: Int32
    first_split: Int32  # of the part
    end_split: Int32
    table: cute.Pointer | None  # the sequence's pages


class Smem(NamedTuple):
    """Tiles in shared memory."""

    q: cute.Tensor  # (64, D, 1)
    k: cute.Tensor  # (tile_n, D, kv_stages)
    v: cute.Tensor  # (tile_n, E, kv_stages)
    v_transposed: cute.Tensor  # (E, tile_n, kv_stages), the same bytes


class Producers(NamedTuple):
    """The load warp's ends."""

    k: PipelineProducer
    v: PipelineProducer


class Consumers(NamedTuple):
    """The consumer warpgroup's ends."""

    k: PipelineConsumer
    v: PipelineConsumer


class Fragments(NamedTuple):
    """What a consumer thread computes with."""

    q: cute.Tensor  # descriptors (MMA, 1, K)
    k: cute.Tensor  # descriptors (MMA, 1, K, kv_stages)
    v: cute.Tensor  # descriptors (MMA, 1, K, kv_stages)
    scores: cute.Tensor  # accumulator, float32
    weights: cute.Tensor  # A operand, 16 bit
    out: cute.Tensor  # accumulator, float32
    rows: tuple[Int32, ...]  # of the tile
    place: mask.Place  # of the tile's first query, then of its sequence
    softmax: Softmax


class DecodeSm90:
    """The decode kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.edges = (
            Edge(name="k", stages=config.kv_stages, tx_bytes=config.k_bytes, consumer_warps=WARPGROUP_WARPS),
            Edge(name="v", stages=config.kv_stages, tx_bytes=config.v_bytes, consumer_warps=WARPGROUP_WARPS),
        )

    @cute.jit
    def launch(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        arrays: Arrays,
        inputs: Inputs,
        page_table: cute.Pointer | None,
        extents: Extents,
        out_strides: OutStrides | None,
        pages: Pages | None,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_map, v_map = (
            cpasync.make_tiled_tma_atom(load, a, self.box_layout(columns), (config.box_rows, columns))[0]
            for a, columns in ((k, config.columns), (v, config.v_columns))
        )
        self.kernel(k_map, v_map, arrays, inputs, page_table, extents, out_strides, pages).launch(
            grid=(extents.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,  # said, lest the DSL ask a device
        )

    def box_layout(self, columns: int) -> cute.ComposedLayout:
        """What one copy writes: rows as in a tile, from any of its 128-byte rows on, as the swizzle is of addresses."""
        rows, tile = self.config.box_rows, mma.k_major(self.dtype, ROWS, columns, 1)
        slab = mma.slab_columns(columns)
        outer = cute.make_layout((rows, (slab, columns // slab)), stride=(slab, (1, rows * slab)))
        return cute.make_composed_layout(tile.inner, 0, outer)

    @cute.kernel
    def kernel(
        self,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        arrays: Arrays,
        inputs: Inputs,
        page_table: cute.Pointer | None,
        extents: Extents,
        out_strides: OutStrides | None,
        pages: Pages | None,
    ) -> None:
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            cpasync.prefetch_descriptor(k_map)
            cpasync.prefetch_descriptor(v_map)
        if cutlass.const_expr(not self.config.has_clusters):
            cute.arch.griddepcontrol_launch_dependents()  # they wait for this grid's end by themselves
        smem = self.allocate()
        ends = make_pipelines(self.edges)
        call = self.call(inputs, arrays, page_table, extents, out_strides, pages)
        if warp_index == LOAD_WARP:
            self.load(k_map, v_map, smem, Producers(*(ends[name][0] for name in Producers._fields)), call)
        else:
            self.consume(smem, Consumers(*(ends[name][1] for name in Consumers._fields)), call, arrays)

    def call(
        self,
        inputs: Inputs,
        arrays: Arrays,
        page_table: cute.Pointer | None,
        extents: Extents,
        out_strides: OutStrides | None,
        pages: Pages | None,
    ) -> Call:
        """What there is to do: as many parts of tiles as there are CTAs for, but no more than splits."""
        group = divide(extents.q_heads, extents.kv_heads)
        tile_queries = divide(ROWS, group)
        if arrays.q_schedule is None:
            tiles = divide(extents.q_len + (tile_queries - 1), tile_queries) * extents.batch
        else:
            tiles = read_count(arrays.q_schedule)
        tiles = cutlass.max(tiles * extents.kv_heads, 1)
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if cutlass.const_expr(self.config.has_clusters):
            parts, first_part, end_part = extents.num_splits, cta, cutlass.min(cta + 1, tiles * extents.num_splits)
        else:
            parts = cutlass.max(cutlass.min(divide(ctas, tiles), extents.num_splits), 1)
            first_part, end_part = cta, tiles * parts
        return Call(
            inputs=inputs,
            extents=extents,
            page_table=page_table,
            pages=pages,
            schedule=arrays.q_schedule,
            logits=calls.logits(inputs),
            out_strides=out_strides,
            group=group,
            tile_queries=tile_queries,
            tiles=tiles,
            parts=parts,
            first_part=first_part,
            end_part=end_part,
            part_step=ctas,
        )

    def work(self, call: Call, index: Int32) -> Work:
        """Part `index` of all tiles: both roles ask this one function, so that they can't disagree on emptiness."""
        extents, window = call.extents, calls.window(call.inputs)
        index, part = divide_with_rest(index, call.parts)  # those of a tile start side by side
        if call.schedule is None:
            m_blocks = divide(extents.q_len + (call.tile_queries - 1), call.tile_queries)
            rest, m_block = divide_with_rest(index, m_blocks)
            batch, kv_head = divide_with_rest(rest, extents.kv_heads)  # heads of one key are neighbours in memory
            first_query = m_block * call.tile_queries
            num_queries = cutlass.min(call.tile_queries, extents.q_len - first_query)
            tile = Tile(first_query, first_query, num_queries, kv_head, batch, batch, part)
            seq = calls.sequence(call.inputs, extents, tile, window)
        else:
            position, kv_head = divide_with_rest(index, extents.kv_heads)
            packed = read_tile(call.schedule, position)
            first_query = packed.first_row(call.tile_queries)
            num_queries = cutlass.min(call.tile_queries, packed.room - first_query)
            row = packed.begin + first_query
            tile = Tile(first_query, row, num_queries, kv_head, packed.batch, packed.other_begin, part)
            seq = packed.sequence(*window)
        whole = self.visit(call, tile, seq)
        keys = SplitKeys.of(seq.q_len * call.group, extents.kv_heads)
        splits = Splits.of(whole, keys, self.config.tile_n, extents.num_splits)
        num_splits = splits.count(whole)
        chunk = divide(num_splits + (call.parts - 1), call.parts)
        first_split = part * chunk
        end_split = cutlass.min(first_split + chunk, num_splits)
        table = None
        if call.page_table is not None and call.pages is not None:
            table = call.pages.table_of(call.page_table, kv_head, tile.sequence)
        return Work(tile, seq, splits, num_splits, first_split, end_split, table)

    def visit(self, call: Call, tile: Tile, seq: Sequence, within: tuple[Int32, Int32] | None = None) -> Visit:
        """The blocks that a tile sees, or those of them in [begin, end)."""
        config = self.config
        bounds = Bounds(
            tile_m=call.tile_queries,
            tile_n=config.tile_n,
            has_left=config.has_left,
            has_right=config.has_right,
            has_padding=config.has_q_lengths or config.has_cu_seqlens,
        )
        return bounds.visit_rows(tile.first_query, tile.first_query + call.tile_queries, seq, within)

    def visit_split(self, call: Call, work: Work, split: Int32) -> Visit:
        """The blocks of a split."""
        return self.visit(call, work.tile, work.seq, work.splits.within(split))

    def allocate(self) -> Smem:
        """Q, then the K ring, then the V ring, each on a 1024-byte boundary as the swizzle wants it."""
        config, smem = self.config, cutlass.memory.SmemAllocator()
        q = mma.tiles(smem, self.dtype, ROWS, config.columns, 1)
        k = mma.tiles(smem, self.dtype, config.tile_n, config.columns, config.kv_stages)
        v = mma.tiles(smem, self.dtype, config.tile_n, config.v_columns, config.kv_stages)
        return Smem(q, k, v, mma.transposed(v, config.tile_n, config.v_columns, config.kv_stages))

    @cute.jit
    def load(self, k_map: cute.CopyAtom, v_map: cute.CopyAtom, smem: Smem, pipes: Producers, call: Call) -> None:
        """Waits: k.empty, v.empty. Signals: k.full, v.full (TMA counts the bytes)."""
        for part in cutlass.range(call.first_part, call.end_part, call.part_step, unroll=1):
            work = self.work(call, part)
            for split in cutlass.range(work.first_split, work.end_split, unroll=1):
                visit = self.visit_split(call, work, split)
                for i in cutlass.range(visit.num_n_blocks, unroll=1):
                    n_block = visit.first - i
                    slot = pipes.k.acquire_and_advance()
                    self.fetch(k_map, smem.k[None, None, slot.index], self.config.columns, slot, call, work, n_block)
                    slot = pipes.v.acquire_and_advance()
                    self.fetch(v_map, smem.v[None, None, slot.index], self.config.v_columns, slot, call, work, n_block)
        # no tail: the consumers wait for every copy, so none lands after the CTA has gone

    def fetch(
        self, atom: cute.CopyAtom, target: cute.Tensor, columns: int, slot: Any, call: Call, work: Work, n_block: Int32
    ) -> None:
        """Starts the copies of one block of keys or values."""
        tile, first_key = work.tile, n_block * self.config.tile_n
        if call.pages is None:
            block = (self.config.tile_n, columns)
            fetch(atom, block, Corner(first_key, tile.kv_head, tile.batch), target, slot)
        else:
            self.fetch_pages(atom, target, columns, slot, work, call.pages, first_key)

    @cute.jit
    def fetch_pages(
        self,
        atom: cute.CopyAtom,
        target: cute.Tensor,
        columns: cutlass.Constexpr,
        slot: Any,
        work: Work,
        pages: Pages,
        first_key: Int32,
    ) -> None:
        """Starts the copies of one block, box by box."""
        rows, page_size = self.config.box_rows, self.config.page_size or 1
        boxes = self.config.tile_n // rows
        for box in cutlass.range(boxes, unroll=min(boxes, MAX_UNROLLED_BOXES)):
            page, row = pages.find(work.table, first_key + box * rows, page_size)
            corner = Corner(row, work.tile.kv_head, page)
            fetch(atom, (rows, columns), corner, cute.local_tile(target, (rows, columns), (box, 0)), slot)

    @cute.jit
    def consume(self, smem: Smem, pipes: Consumers, call: Call, arrays: Arrays) -> None:
        """Waits: k.full, v.full, store, clear, cluster. Signals: k.empty, v.empty, store, clear, cluster."""
        fragments = self.fragments(smem, call)
        for part in cutlass.range(call.first_part, call.end_part, call.part_step, unroll=1):
            work = self.work(call, part)
            if cutlass.const_expr(not self.config.has_clusters):
                self.store_counts(work, call, arrays)
            if work.first_split < work.end_split:
                self.load_queries(smem, call, work.tile, arrays)
                for split in cutlass.range(work.first_split, work.end_split, unroll=1):
                    pipes = self.make_split(fragments, smem, pipes, call, work, arrays, split)
            if cutlass.const_expr(self.config.has_clusters):
                self.merge_splits(smem, call, work, arrays)

    @cute.jit
    def make_split(
        self,
        fragments: Fragments,
        smem: Smem,
        pipes: Consumers,
        call: Call,
        work: Work,
        arrays: Arrays,
        split: Int32,
    ) -> Consumers:
        """All blocks of one split, of which there is at least one."""
        queries = tuple(work.tile.first_query + query for query in fragments.place.rows)
        fragments = fragments._replace(place=fragments.place._replace(rows=queries))
        fragments.softmax.restart()
        visit = self.visit_split(call, work, split)
        pipes = self.step(fragments, smem, pipes, call, work, visit.first, first=True)
        for span in visit.spans:
            for i in cutlass.range(span.num_n_blocks, unroll=1):
                pipes = self.step(fragments, smem, pipes, call, work, span.first - i, span=span)
        if cutlass.const_expr(self.config.has_clusters):
            self.keep(fragments, smem, call, work.tile)
        else:
            self.finish(fragments, call, work.tile, arrays, split)
        return pipes

    def fragments(self, smem: Smem, call: Call) -> Fragments:
        """Descriptors and registers of the calling thread."""
        config = self.config
        scores_mma = mma.scores_mma(self.dtype, config.tile_n)
        values_mma = mma.values_mma(self.dtype, config.v_columns)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        by_keys, by_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        place = mma.place(Int32(0), cute.arch.thread_idx()[0], config.tile_n)
        return Fragments(
            q=scores_mma.make_fragment_A(by_keys.partition_A(smem.q))[None, None, None, 0],
            k=scores_mma.make_fragment_B(by_keys.partition_B(smem.k)),
            v=values_mma.make_fragment_B(by_values.partition_B(smem.v_transposed)),
            scores=cute.make_rmem_tensor(scores_mma.partition_shape_C((ROWS, config.tile_n)), Float32),
            weights=cute.make_rmem_tensor(values_mma.partition_shape_A((ROWS, config.tile_n)), self.dtype),
            out=cute.make_rmem_tensor(values_mma.partition_shape_C((ROWS, config.v_columns)), Float32),
            rows=place.rows,
            place=place._replace(rows=tuple(divide(row, call.group) for row in place.rows)),
            softmax=Softmax.start(2, call.logits.scale_log2),
        )

    @cute.jit
    def store_counts(self, work: Work, call: Call, arrays: Arrays) -> None:
        """How many splits of each query of the tile have results; -1: the query is padding."""
        tile, query = work.tile, cute.arch.thread_idx()[0]
        if (tile.part == 0) & (query < tile.num_queries):
            is_padding = tile.first_query + query >= work.seq.q_len
            entry = Int64(tile.batch) * call.extents.kv_heads + tile.kv_head
            target = arrays.split_counts + (entry * call.extents.q_len + (tile.row + query))
            count = Int32(cutlass.select_(is_padding, Int32(-1), work.num_splits))
            cute.make_tensor(target, cute.make_layout(1))[0] = count

    @cute.jit
    def load_queries(self, smem: Smem, call: Call, tile: Tile, arrays: Arrays) -> None:
        """Global memory -> shared memory, 16 bytes a thread and turn. Waits: store. Signals: store.

        Rows behind the tile's last are that one again: finite if it is, and never stored.
        """
        config, extents, negative = self.config, call.extents, call.logits.negative
        flipped = Int32(0)  # signs, two a word: softmax takes maxima before it scales
        if cutlass.const_expr(negative is not None):
            flipped = Int32(cutlass.select_(negative, Int32(BOTH_SIGNS), Int32(0)))
        slab, row_vectors = mma.slab_columns(config.columns), config.columns // VECTOR
        base = tile.batch * extents.q_batch_stride + tile.row * extents.q_row_stride
        base = base + tile.kv_head * call.group * extents.q_head_stride
        vectors = [i * WARPGROUP + cute.arch.thread_idx()[0] for i in range(ROWS * row_vectors // WARPGROUP)]
        loaded = []
        for vector in vectors:
            row, column = (
                cutlass.min(vector // row_vectors, tile.num_queries * call.group - 1),
                vector % row_vectors * VECTOR,
            )
            query = divide(row, call.group)
            element = base + query * extents.q_row_stride + (row - query * call.group) * extents.q_head_stride
            element = element + cutlass.min(column, config.head_dim - VECTOR)
            pointer = cute.recast_ptr((arrays.q + element).align(16), dtype=Int32)
            loaded.append(cute.make_tensor(pointer, cute.make_layout(WORDS)).load())
        # every warp has waited for its last product of the queries that lie there
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE, number_of_threads=WARPGROUP)
        for vector, value in zip(vectors, loaded, strict=True):
            row, column = vector // row_vectors, vector % row_vectors * VECTOR
            words = cute.make_rmem_tensor(WORDS, Int32)
            for i in range(WORDS):
                word = value[i] ^ flipped
                if config.columns != config.head_dim:  # what K holds there is 0 as well, but 0 * NaN is NaN
                    word = Int32(cutlass.select_(column < config.head_dim, word, Int32(0)))
                words[i] = word
            target = smem.q.iterator + mma.swizzled(row, column, ROWS, slab)
            target = cute.recast_ptr(target.align(16), dtype=Int32)
            cute.make_tensor(target, cute.make_layout(WORDS)).store(words.load())
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE, number_of_threads=WARPGROUP)

    @cute.jit
    def step(
        self,
        fragments: Fragments,
        smem: Smem,
        pipes: Consumers,
        call: Call,
        work: Work,
        n_block: Int32,
        span: cutlass.Constexpr = None,
        first: cutlass.Constexpr = False,
    ) -> Consumers:
        """S = Q K^T, its weights P, O = O * rescale + P V. The first block may be cut by any edge of the mask."""
        config = self.config
        k = pipes.k.wait_and_advance()  # K has landed
        warpgroup.fence()
        scores_mma = mma.scores_mma(self.dtype, config.tile_n)
        keys = fragments.k[None, None, None, k.index]
        mma.batch(scores_mma, fragments.scores, fragments.q, keys, accumulate=False)
        warpgroup.wait_group(0)  # S is in registers
        k.release()
        scores, start = mma.rows_and_columns(fragments.scores), n_block * config.tile_n
        right, left = (True, config.has_left) if first else (span.right, span.left)
        where = (fragments.place, start, work.seq, call.extents.kv_len)
        calls.prepare(scores, call.logits, Features(), *where, right=right, left=left)
        rescale = fragments.softmax.update(scores)
        if cutlass.const_expr(not first):
            mma.scale_rows(fragments.out, rescale)
        mma.pack(self.dtype, fragments.scores, fragments.weights)
        v = pipes.v.wait_and_advance()  # V has landed
        if cutlass.const_expr(first and (config.has_kv_lengths or config.has_cu_seqlens)):
            self.clear_padding(smem.v[None, None, v.index], call, work.seq, start)
        warpgroup.fence()
        values_mma = mma.values_mma(self.dtype, config.v_columns)
        values = fragments.v[None, None, None, v.index]
        mma.batch(values_mma, fragments.out, fragments.weights, values, accumulate=not first)
        warpgroup.wait_group(0)  # O is complete up to this block
        v.release()
        return pipes

    @cute.jit
    def clear_padding(self, values: cute.Tensor, call: Call, seq: Sequence, start: Int32) -> None:
        """Zeroes what a V block holds beyond the sequence: its weights are 0, but 0 * NaN is NaN. Waits: clear."""
        config, seen = self.config, seq.kv_len - start
        if seen < config.tile_n and seq.kv_len < call.extents.kv_len:
            words = cute.recast_tensor(values, Int32)
            row_words = config.v_columns * config.element_bytes // 4
            first = cute.arch.thread_idx()[0]
            for word in cutlass.range(first, (config.tile_n - seen) * row_words, WARPGROUP, unroll=1):
                words[seen + word // row_words, word % row_words] = Int32(0)
            cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
            cute.arch.barrier(barrier_id=NamedBarrierId.CLEAR, number_of_threads=WARPGROUP)

    @cute.jit
    def finish(self, fragments: Fragments, call: Call, tile: Tile, arrays: Arrays, split: Int32) -> None:
        """Normalises O and stores it and lse."""
        config, extents, first_column = self.config, call.extents, fragments.place.first_column
        factors, lses = fragments.softmax.finish()
        out = mma.rows_and_columns(fragments.out)
        entry = Int64(tile.batch) * extents.kv_heads + tile.kv_head
        entry_rows = extents.q_len * call.group
        for r in cutlass.range_constexpr(2):
            if fragments.rows[r] < tile.num_queries * call.group:
                row = tile.row * call.group + fragments.rows[r]
                if first_column == 0:  # one thread of the four that share a row
                    element = (entry * entry_rows + row) * extents.num_splits + split
                    cute.make_tensor(arrays.partial_lse + element, cute.make_layout(1))[0] = lses[r]
                element = ((entry * extents.num_splits + split) * entry_rows + row) * config.head_dim_v
                first = arrays.partial_out + (element + first_column)
                for block in cutlass.range_constexpr(config.head_dim_v // 8):
                    pair = cute.make_tensor((first + 8 * block).align(8), cute.make_layout(2))
                    pair[0], pair[1] = (out[r, 2 * block + c] * factors[r] for c in range(2))

    def kept(self, smem: Smem, row: Int32, column: Int32 | int) -> Int32:
        """Shared address of a result of a row that a CTA keeps for its cluster, where V was."""
        return smem.v.iterator.toint() + (row * self.config.kept_columns + column) * FLOAT_BYTES

    @cute.jit
    def keep(self, fragments: Fragments, smem: Smem, call: Call, tile: Tile) -> None:
        """Normalises O and leaves it and lse to the cluster. Waits: store. Signals: store."""
        config, first_column = self.config, fragments.place.first_column
        factors, lses = fragments.softmax.finish()
        out = mma.rows_and_columns(fragments.out)
        # every warp has waited for its last product of the values that lie there
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE, number_of_threads=WARPGROUP)
        for r in cutlass.range_constexpr(2):
            row = fragments.rows[r]
            if row < tile.num_queries * call.group:
                if first_column == 0:  # one thread of the four that share a row
                    ptx.st_shared_v2(self.kept(smem, row, config.head_dim_v), lses[r], Float32(0.0))
                for block in cutlass.range_constexpr(config.head_dim_v // 8):
                    pair = (out[r, 2 * block + c] * factors[r] for c in range(2))
                    ptx.st_shared_v2(self.kept(smem, row, first_column + 8 * block), *pair)

    @cute.jit
    def merge_splits(self, smem: Smem, call: Call, work: Work, arrays: Arrays) -> None:
        """The tile's results from those of its splits; every CTA that has one makes some rows, the first if none has.

        Waits: cluster. Signals: cluster.
        """
        rank, ctas = work.tile.part, cutlass.max(work.num_splits, 1)
        if (rank == 0) & (work.num_splits == 0):
            self.keep_nothing(smem, call, work.tile)
        if rank < ctas:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()  # all that the others keep is there; whoever has no split has gone
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            end = work.tile.num_queries * call.group
            for row in cutlass.range(warp * ctas + rank, end, WARPGROUP_WARPS * ctas, unroll=1):
                self.merge_row(smem, call, work, arrays, row, ctas - 1)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()  # the others have read what this CTA kept

    @cute.jit
    def keep_nothing(self, smem: Smem, call: Call, tile: Tile) -> None:
        """What is merged where no key is seen: it has no weight, but must be a number."""
        pairs = tile.num_queries * call.group * (self.config.kept_columns // 2)
        for pair in cutlass.range(cute.arch.thread_idx()[0], pairs, WARPGROUP, unroll=1):
            ptx.st_shared_v2(self.kept(smem, Int32(0), 2 * pair), Float32(0.0), Float32(0.0))

    @cute.jit
    def merge_row(self, smem: Smem, call: Call, work: Work, arrays: Arrays, row: Int32, last: Int32) -> None:
        """One row by one warp, in the order of `combine`. `last`: the last CTA of the cluster that has a split."""
        dim, lane = self.config.head_dim_v, cute.arch.lane_idx()
        query = divide(row, call.group)
        q_head = work.tile.kv_head * call.group + (row - query * call.group)
        ranks = [cutlass.min(Int32(split), last) for split in range(MAX_CLUSTER)]
        counts = [split < work.num_splits for split in range(MAX_CLUSTER)]
        lses = [ptx.ld_peer(self.kept(smem, row, dim), rank) for rank in ranks]
        lses = [Float32(cutlass.select_(c, lse, Float32(-Float32.inf))) for c, lse in zip(counts, lses, strict=True)]
        sink = Float32(-Float32.inf)
        if cutlass.const_expr(call.inputs.sinks is not None):
            sink = calls.read(call.inputs.sinks + (work.tile.batch * call.extents.q_heads + q_head))
        largest = sink
        for lse in lses:
            largest = cute.arch.fmax(largest, lse)
        base_log2 = merge.base_of(largest)
        weights = [merge.weight(lse, base_log2) for lse in lses]
        weights = [Float32(cutlass.select_(c, w, Float32(0.0))) for c, w in zip(counts, weights, strict=True)]
        total = merge.weight(sink, base_log2)
        for weight in weights:
            total = total + weight
        is_padding = work.tile.first_query + query >= work.seq.q_len
        empty, factor, lse = merge.normalise(total, base_log2, is_padding)
        out, lse_place = self.places(call, arrays, work.tile, query, q_head)
        if lane == 0:
            cute.make_tensor(lse_place, cute.make_layout(1))[0] = lse
        for first in cutlass.range_constexpr(0, dim, LANES * WORDS):
            column = first + lane * WORDS
            if column < dim:
                values = [ptx.ld_peer_v4(self.kept(smem, row, column), rank) for rank in ranks]
                rounded = cute.make_rmem_tensor(WORDS, self.dtype)
                for i in cutlass.range_constexpr(WORDS):
                    value = Float32(0.0)
                    for part, weight in zip(values, weights, strict=True):
                        value = value + merge.weighted(part[i], weight)
                    rounded[i] = self.dtype(cutlass.select_(empty, Float32(0.0), value * factor))
                cute.make_tensor((out + column).align(8), cute.make_layout(WORDS)).store(rounded.load())

    def places(
        self, call: Call, arrays: Arrays, tile: Tile, query: Int32, q_head: Int32
    ) -> tuple[cute.Pointer, cute.Pointer]:
        """Where the results of a query of a tile go: out and lse."""
        strides = call.out_strides
        assert strides is not None, "who merges has results"
        row = tile.row + query
        out = arrays.out + (tile.batch * strides.batch + row * strides.row + q_head * strides.head)
        return out, arrays.lse + ((Int64(tile.batch) * call.extents.q_heads + q_head) * call.extents.q_len + row)
