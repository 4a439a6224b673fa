"""Hopper forward: a producer warp streams K and V past consumer warpgroups that hold 64 query rows each.

    load --q--> consume     gmem -TMA-> smem -wgmma-> registers -stmatrix-> smem -TMA-> gmem
         --k-->             smem: Q tile_m x D (O leaves through it) | kv_stages x K tile_n x D | kv_stages x V
         --v-->

    barrier   stages     arrives (count)        waits    true once it completes
    q.full    1          load (1 + bytes)       consume  the Q tile is in smem
    q.empty   1          nobody: a CTA computes one tile
    k.full    kv_stages  load (1 + bytes)       consume  that K block is in smem
    k.empty   kv_stages  consume (1 a warp)     load     every wgmma that reads the slot has retired
    v.full    kv_stages  load (1 + bytes)       consume  that V block is in smem
    v.empty   kv_stages  consume (1 a warp)     load     every wgmma that reads the slot has retired
    turn[i]   named      wg i-1 and wg i (256)  wg i     the tensor core is warpgroup i's
    store[i]  named      wg i (128)             wg i     warpgroup i's part of O is in smem, over its own rows of Q
    clear     named      consume (all threads)  consume  V rows beyond the sequence are 0; only with has_kv_lengths

    tensor core | S, O of wg 0 | S, O of wg 1 | S, O of wg 0 |   one column = one hand-over of `turn`
    wg 0        | issues       | softmax n-1  | issues       |
    wg 1        | softmax n    | issues       | softmax n-1  |

Within a warpgroup S(n-1) = Q K(n-1)^T and O += P(n) V(n) are issued together, and the softmax of S(n-1) runs while the
second of them still does. Key blocks are visited downwards: the masked right edge first, the masked left edge last.

Head dims that 16 doesn't divide are padded in shared memory: the copies fill in zeros there, and drop them from O.

Parameters in order, as `KernelConfig.params` lists them (a map: 128-byte CUtensorMap by value, innermost extent
contiguous, strides of the others free, zero fill outside; its swizzle is 128, 64 or 32 bytes, the widest that divides a
padded row, and w elements are one row of it):

    q               map   (head_dim, q_len, q_heads, batch)      box (w, 64, 1, 1)
    k               map   (head_dim, kv_len, kv_heads, batch)    box (w, tile_n, 1, 1)
    v               map   (head_dim_v, kv_len, kv_heads, batch)  box (w, tile_n, 1, 1)
    out             map   (head_dim_v, q_len, q_heads, batch)    box (w, 64, 1, 1)
    lse             float32*  [batch, q_heads, q_len]
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
    key_blocks      int32*    [batch, kv_heads, ceil(q_len / tile_m), 2]: first and one past the last block to visit
    mask            uint8*    rows of kv_len bytes, 0 hides; only with has_mask
    bias            the config's type*, rows of kv_len; only with a bias
    mask_*_stride bias_*_stride    int64 each, * batch, head, row: in elements, 0 where one serves all
    q_len kv_len q_heads kv_heads batch    int32 each

Grid (ceil(q_len / tile_m) * q_heads * batch, 1, 1), block (threads, 1, 1), no cluster. With kv_len = 0 nothing is
copied through the maps of k and v.
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
from ..core.scheduler import Grid, SingleTile, Tile
from ..core.seqlen import Sequence
from ..core.softmax import Softmax, scale_log2
from . import mma

if TYPE_CHECKING:
    from jax_fa4.configs import KernelConfig

__all__ = ["ForwardSm90"]

WARPGROUP = 128
WARPGROUP_ROWS = 64
WARPGROUP_WARPS = 4
DIAGONAL_LIMIT = 1 << 30  # offsets are cut to it, so that no sum with lengths wraps
BOTH_SIGNS = -0x7FFF8000  # 0x80008000: the sign bits of two 16-bit floats
LOAD_WARP = 0  # of the producer warpgroup, which comes first; its other warps only give their registers away


class Maps(NamedTuple):
    """TMA copies of one tile each."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom


class Inputs(NamedTuple):
    """Addresses of what a call has beside q, k and v; None: compiled without."""

    softmax_scale: cute.Pointer
    window_left: cute.Pointer | None
    window_right: cute.Pointer | None
    softcap: cute.Pointer | None
    q_offset: cute.Pointer | None
    q_lengths: cute.Pointer | None
    kv_lengths: cute.Pointer | None
    sinks: cute.Pointer | None
    q_segment_ids: cute.Pointer | None
    kv_segment_ids: cute.Pointer | None
    key_blocks: cute.Pointer | None
    mask: cute.Pointer | None
    bias: cute.Pointer | None
    mask_strides: tuple[Int64, Int64, Int64] | None  # elements from one batch entry, head and row to the next
    bias_strides: tuple[Int64, Int64, Int64] | None


class Logits(NamedTuple):
    """How scores become logits; None: compiled without. One step takes the scale, whatever its sign."""

    capped: Float32 | None  # softcap: s becomes tanh(capped * s)
    biased: Float32 | None  # bias: then biased * s + bias
    scale_log2: Float32  # then softmax multiplies by it
    negative: cutlass.Boolean | None  # neither cap nor bias: Q has to change its sign before


class Smem(NamedTuple):
    """Tiles in shared memory."""

    q: cute.Tensor  # (64, D, warpgroups)
    k: cute.Tensor  # (tile_n, D, kv_stages)
    v: cute.Tensor  # (tile_n, E, kv_stages)
    v_transposed: cute.Tensor  # (E, tile_n, kv_stages), the same bytes
    out: cute.Tensor  # (64, E, warpgroups), the bytes of q


class Work(NamedTuple):
    """One tile and what it visits."""

    grid: Grid
    tile: Tile
    seq: Sequence
    visit: Visit
    logits: Logits


class Features(NamedTuple):
    """What a consumer thread knows of a call's extras; None: compiled without."""

    q_ids: tuple[Int32, ...] | None  # segment ids of its rows
    kv_ids: cute.Pointer | None  # of all keys
    mask: dense.Rows | None
    bias: dense.Rows | None
    sink: Float32 | None  # of the tile's head


class Corner(NamedTuple):
    """Where a block lies in an array."""

    row: Int32  # of its first query or key
    head: Int32
    batch: Int32


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

    q: cute.Tensor  # descriptors (MMA, 1, K) of the warpgroup's rows
    k: cute.Tensor  # descriptors (MMA, 1, K, kv_stages)
    v: cute.Tensor  # descriptors (MMA, 1, K, kv_stages)
    scores: cute.Tensor  # accumulator, float32
    weights: cute.Tensor  # A operand, 16 bit
    out: cute.Tensor  # accumulator, float32
    place: mask.Place
    softmax: Softmax
    features: Features


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
            has_padding=config.has_q_lengths,
        )
        self.scheduler = SingleTile(
            tile_m=config.tile_m,
            kv_bytes=(config.head_dim + config.head_dim_v) * config.element_bytes,
            longest_first=config.longest_first,
        )
        warps = config.warpgroups * WARPGROUP_WARPS
        self.edges = (
            Edge(name="q", stages=1, tx_bytes=config.q_bytes, consumer_warps=warps),
            Edge(name="k", stages=config.kv_stages, tx_bytes=config.k_bytes, consumer_warps=warps),
            Edge(name="v", stages=config.kv_stages, tx_bytes=config.v_bytes, consumer_warps=warps),
        )

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Pointer,
        inputs: Inputs,
        grid: Grid,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config

        def atom(op: Any, array: cute.Tensor, rows: int, columns: int) -> cute.CopyAtom:
            return cpasync.make_tiled_tma_atom(op, array, mma.k_major(self.dtype, rows, columns, 1), (rows, columns))[0]

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        maps = Maps(
            q=atom(load, q, WARPGROUP_ROWS, config.columns),
            k=atom(load, k, config.tile_n, config.columns),
            v=atom(load, v, config.tile_n, config.v_columns),
            out=atom(store, out, WARPGROUP_ROWS, config.v_columns),
        )
        self.kernel(maps, lse, inputs, grid).launch(
            grid=(grid.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, maps: Maps, lse: cute.Pointer, inputs: Inputs, grid: Grid) -> None:
        # first what takes long: these loads come back while the tile is found and the barriers are set up
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                cpasync.prefetch_descriptor(atom)
        logits = self.logits(inputs)
        window_left = _read(inputs.window_left) if inputs.window_left is not None else None
        window_right = _read(inputs.window_right) if inputs.window_right is not None else None

        tile = self.scheduler.tile(cute.arch.block_idx()[0], grid)
        smem = self.allocate()
        ends = make_pipelines(self.edges)
        seq = self.sequence(inputs, grid, tile, window_left, window_right)
        within = self.key_blocks(inputs, grid, tile)
        work = Work(grid, tile, seq, self.bounds.visit(tile.m_block, seq, within), logits)

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, smem, Producers(*(ends[name][0] for name in Producers._fields)), work)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            wg = warp_index // WARPGROUP_WARPS - 1
            consumers = Consumers(*(ends[name][1] for name in Consumers._fields))
            self.consume(maps, lse, smem, consumers, work, wg, inputs)

    def logits(self, inputs: Inputs) -> Logits:
        """Cap and scale of the call, as the steps from a score to a weight use them."""
        scale = _read(inputs.softmax_scale)
        capped = biased = negative = None
        if inputs.softcap is not None:
            cap = _read(inputs.softcap)
            capped, scale = scale / cap, cap
        if self.config.bias is not None:
            biased, scale = scale, Float32(1.0)
        if capped is None and biased is None:
            negative = scale < 0.0
        return Logits(capped, biased, scale_log2(scale), negative)

    def sequence(
        self, inputs: Inputs, grid: Grid, tile: Tile, window_left: Int32 | None, window_right: Int32 | None
    ) -> Sequence:
        """The tile's sequence: lengths of the arrays and ends aligned, but where the call says otherwise."""
        entry = tile.batch * grid.kv_heads + tile.kv_head
        q_len, kv_len = grid.q_len, grid.kv_len
        if inputs.q_lengths is not None:
            q_len = cutlass.max(cutlass.min(_read(inputs.q_lengths + entry), q_len), 0)
        if inputs.kv_lengths is not None:
            kv_len = cutlass.max(cutlass.min(_read(inputs.kv_lengths + entry), kv_len), 0)
        diagonal = kv_len - q_len
        if inputs.q_offset is not None:
            offset = _read(inputs.q_offset + entry)
            diagonal = cutlass.max(cutlass.min(offset, DIAGONAL_LIMIT), -DIAGONAL_LIMIT)
        return Sequence.aligned(q_len, kv_len, diagonal, window_left, window_right)

    def key_blocks(self, inputs: Inputs, grid: Grid, tile: Tile) -> tuple[Int32, Int32] | None:
        """The key blocks [begin, end) that hold a segment of the tile; None without segments."""
        if inputs.key_blocks is None:
            return None
        q_tiles = (grid.q_len + (self.config.tile_m - 1)) // self.config.tile_m
        entry = Int64(tile.batch * grid.kv_heads + tile.kv_head)
        element = (entry * q_tiles + tile.m_block) * 2
        return _read(inputs.key_blocks + element), _read(inputs.key_blocks + (element + 1))

    def allocate(self) -> Smem:
        """Q, then the K ring, then the V ring, each on a 1024-byte boundary as the swizzle wants it.

        O leaves through Q's place: a warpgroup's part starts where its rows of Q do, whichever is wider.
        """
        config, smem = self.config, cutlass.memory.SmemAllocator()
        room = smem.allocate(config.q_room, 1024)
        wg_elements = config.q_room // config.warpgroups // config.element_bytes

        def rows(columns: int) -> cute.Tensor:
            tile = mma.k_major(self.dtype, WARPGROUP_ROWS, columns, 1)
            (row, column, _), (row_stride, column_stride, _) = tile.outer.shape, tile.outer.stride
            every = cute.make_layout((row, column, config.warpgroups), stride=(row_stride, column_stride, wg_elements))
            return cute.make_tensor(cute.recast_ptr(room, tile.inner, self.dtype), every)

        keys = mma.k_major(self.dtype, config.tile_n, config.columns, config.kv_stages)
        values = mma.k_major(self.dtype, config.tile_n, config.v_columns, config.kv_stages)
        transposed = mma.mn_major(self.dtype, config.tile_n, config.v_columns, config.kv_stages)
        k = smem.allocate_tensor(self.dtype, keys.outer, 1024, keys.inner)
        v = smem.allocate_tensor(self.dtype, values.outer, 1024, values.inner)
        v_transposed = cute.make_tensor(v.iterator, transposed.outer)
        return Smem(q=rows(config.columns), k=k, v=v, v_transposed=v_transposed, out=rows(config.v_columns))

    @cute.jit
    def load(self, maps: Maps, smem: Smem, pipes: Producers, work: Work) -> None:
        """Waits: q.empty, k.empty, v.empty. Signals: q.full, k.full, v.full (TMA counts the bytes)."""
        config, tile, visit = self.config, work.tile, work.visit
        if visit.num_n_blocks > 0:
            slot = pipes.q.acquire_and_advance()
            for wg in cutlass.range_constexpr(config.warpgroups):
                row = tile.m_block * config.tile_m + wg * WARPGROUP_ROWS
                block = (WARPGROUP_ROWS, config.columns)
                _fetch(maps.q, block, Corner(row, tile.q_head, tile.batch), smem.q[None, None, wg], slot)

            pipes = self.load_keys(maps, smem, pipes, tile, visit.first)
            for i in cutlass.range(visit.num_n_blocks - 1, unroll=1):
                # K runs one block ahead of V, as the consumers ask for them
                pipes = self.load_keys(maps, smem, pipes, tile, visit.first - 1 - i)
                pipes = self.load_values(maps, smem, pipes, tile, visit.first - i)
            pipes = self.load_values(maps, smem, pipes, tile, visit.first - (visit.num_n_blocks - 1))
        # no tail: the consumers wait for every copy, so none lands after the CTA has gone

    @cute.jit
    def load_keys(self, maps: Maps, smem: Smem, pipes: Producers, tile: Tile, n_block: Int32) -> Producers:
        """Waits: k.empty. Signals: k.full."""
        slot = pipes.k.acquire_and_advance()
        block = (self.config.tile_n, self.config.columns)
        corner = Corner(n_block * self.config.tile_n, tile.kv_head, tile.batch)
        _fetch(maps.k, block, corner, smem.k[None, None, slot.index], slot)
        return pipes

    @cute.jit
    def load_values(self, maps: Maps, smem: Smem, pipes: Producers, tile: Tile, n_block: Int32) -> Producers:
        """Waits: v.empty. Signals: v.full."""
        slot = pipes.v.acquire_and_advance()
        block = (self.config.tile_n, self.config.v_columns)
        corner = Corner(n_block * self.config.tile_n, tile.kv_head, tile.batch)
        _fetch(maps.v, block, corner, smem.v[None, None, slot.index], slot)
        return pipes

    @cute.jit
    def consume(
        self,
        maps: Maps,
        lse: cute.Pointer,
        smem: Smem,
        pipes: Consumers,
        work: Work,
        wg: Int32,
        inputs: Inputs,
    ) -> None:
        """Waits: q.full, k.full, v.full, turn[wg], store[wg]. Signals: k.empty, v.empty, turn[wg+1], store[wg]."""
        first_row = work.tile.m_block * self.config.tile_m + wg * WARPGROUP_ROWS
        fragments = self.fragments(smem, wg, first_row, work, inputs)
        fragments.out.fill(0.0)
        visit = work.visit
        if visit.num_n_blocks > 0:
            if wg == self.config.warpgroups - 1:
                self.pass_turn(wg)  # the ring of turns starts with warpgroup 0
            pipes.q.wait_and_advance()  # the Q tile has landed
            # two conditions: one is known at compile time, the other is not
            if cutlass.const_expr(work.logits.negative is not None):  # noqa: SIM102
                if work.logits.negative:
                    self.negate_q(smem, wg)
            pipes = self.first_step(fragments, pipes, work, wg)
            if cutlass.const_expr(self.config.has_kv_lengths):
                self.clear_padding(smem, pipes, work)
            for span in visit.spans:
                for i in cutlass.range(span.num_n_blocks, unroll=1):
                    pipes = self.step(fragments, pipes, work, wg, span.first - i, span.right, span.left)
            pipes = self.last_step(fragments, pipes)
        self.finish(maps, lse, smem, fragments, work, wg, first_row)

    def fragments(self, smem: Smem, wg: Int32, first_row: Int32, work: Work, inputs: Inputs) -> Fragments:
        """Descriptors and registers of the calling thread; `first_row`: of the warpgroup."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = mma.place(first_row, thread, config.tile_n)
        scores_mma = mma.scores_mma(self.dtype, config.tile_n)
        values_mma = mma.values_mma(self.dtype, config.v_columns)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        by_keys, by_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        scores_shape = scores_mma.partition_shape_C((WARPGROUP_ROWS, config.tile_n))
        weights_shape = values_mma.partition_shape_A((WARPGROUP_ROWS, config.tile_n))
        out_shape = values_mma.partition_shape_C((WARPGROUP_ROWS, config.v_columns))
        return Fragments(
            q=scores_mma.make_fragment_A(by_keys.partition_A(smem.q))[None, None, None, wg],
            k=scores_mma.make_fragment_B(by_keys.partition_B(smem.k)),
            v=values_mma.make_fragment_B(by_values.partition_B(smem.v_transposed)),
            scores=cute.make_rmem_tensor(scores_shape, Float32),
            weights=cute.make_rmem_tensor(weights_shape, self.dtype),
            out=cute.make_rmem_tensor(out_shape, Float32),
            place=place,
            softmax=Softmax.start(2, work.logits.scale_log2),
            features=self.features(inputs, work, place),
        )

    def features(self, inputs: Inputs, work: Work, place: mask.Place) -> Features:
        """What the calling thread needs of the call's extras, of its rows and its head."""
        tile, grid = work.tile, work.grid
        q_ids = kv_ids = sink = None
        if inputs.q_segment_ids is not None:
            entry = Int64(tile.batch * grid.kv_heads + tile.kv_head)
            ids = inputs.q_segment_ids + entry * grid.q_len
            q_ids = tuple(_read(ids + cutlass.min(row, grid.q_len - 1)) for row in place.rows)
            kv_ids = inputs.kv_segment_ids + entry * grid.kv_len
        if inputs.sinks is not None:
            sink = _read(inputs.sinks + (tile.batch * grid.q_heads + tile.q_head))

        def rows_of(pointer: cute.Pointer | None, steps: tuple[Int64, Int64, Int64] | None) -> dense.Rows | None:
            if pointer is None or steps is None:
                return None
            array = Dense(pointer, *steps)
            return dense.rows_of(array, place, tile.batch, tile.q_head, grid.q_len, grid.kv_len)

        return Features(
            q_ids=q_ids,
            kv_ids=kv_ids,
            mask=rows_of(inputs.mask, inputs.mask_strides),
            bias=rows_of(inputs.bias, inputs.bias_strides),
            sink=sink,
        )

    @cute.jit
    def clear_padding(self, smem: Smem, pipes: Consumers, work: Work) -> None:
        """Zeroes what the first V block holds beyond the sequence: its weights are 0, but 0 * NaN is NaN.

        Only there: a block further on is not visited, and what lies beyond the array itself was filled in as zeros.
        Waits: v.full, clear. Signals: clear.
        """
        config, seq = self.config, work.seq
        seen = seq.kv_len - work.visit.first * config.tile_n
        if seen < config.tile_n and seq.kv_len < work.grid.kv_len:
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
    def negate_q(self, smem: Smem, wg: Int32) -> None:
        """Flips the sign of the warpgroup's rows of Q: softmax takes maxima before it scales. Rare, so not unrolled."""
        words = cute.recast_tensor(smem.q[None, None, wg], Int32)
        for i in cutlass.range(cute.size(words) // WARPGROUP, unroll=1):
            word = i * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP
            words[word] = words[word] ^ Int32(BOTH_SIGNS)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.STORE + wg, number_of_threads=WARPGROUP)

    @cute.jit
    def first_step(self, fragments: Fragments, pipes: Consumers, work: Work, wg: Int32) -> Consumers:
        """S of the first block and its weights; that block may be cut by any edge of the mask."""
        k = pipes.k.wait_and_advance()
        self.take_turn(wg)
        warpgroup.fence()
        self.issue_scores(fragments, k.index)
        self.pass_turn(wg)
        warpgroup.wait_group(0)  # S is in registers
        k.release()
        self.weigh(fragments, work, work.visit.first, right=True, left=self.config.has_left, ragged=True)
        self.pack(fragments)
        return pipes

    @cute.jit
    def step(
        self,
        fragments: Fragments,
        pipes: Consumers,
        work: Work,
        wg: Int32,
        n_block: Int32,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
    ) -> Consumers:
        """S(n) = Q K(n)^T beside O += P(n+1) V(n+1), then the weights of block n."""
        k = pipes.k.wait_and_advance()  # K(n) has landed
        self.take_turn(wg)  # the other warpgroups have issued theirs and gone into softmax
        warpgroup.fence()
        self.issue_scores(fragments, k.index)
        v = pipes.v.wait_and_advance()  # V(n+1) has landed
        self.issue_out(fragments, v.index)
        self.pass_turn(wg)
        warpgroup.wait_group(1)  # S(n) is in registers; O += P(n+1) V(n+1) may still run
        k.release()
        rescale = self.weigh(fragments, work, n_block, right=right, left=left)
        # O is complete up to block n+1, and nothing reads P any more. The assembler moves this wait up into the search
        # for the maxima. Held back behind them, or behind the exponentials, it made d64, causal and short d128 2-9%
        # slower (H200), long d128 2% faster: the exponentials then have less rescaling and packing beside them.
        warpgroup.wait_group(0)
        v.release()
        mma.scale_rows(fragments.out, rescale)
        self.pack(fragments)
        return pipes

    @cute.jit
    def last_step(self, fragments: Fragments, pipes: Consumers) -> Consumers:
        """O += P V of the last block."""
        v = pipes.v.wait_and_advance()
        warpgroup.fence()
        self.issue_out(fragments, v.index)
        warpgroup.wait_group(0)
        v.release()
        return pipes

    def issue_scores(self, fragments: Fragments, stage: Int32) -> None:
        """Starts S = Q K^T."""
        k = fragments.k[None, None, None, stage]
        scores_mma = mma.scores_mma(self.dtype, self.config.tile_n)
        mma.batch(scores_mma, fragments.scores, fragments.q, k, accumulate=False)

    def issue_out(self, fragments: Fragments, stage: Int32) -> None:
        """Starts O += P V."""
        v = fragments.v[None, None, None, stage]
        mma.batch(
            mma.values_mma(self.dtype, self.config.v_columns), fragments.out, fragments.weights, v, accumulate=True
        )

    def weigh(
        self, fragments: Fragments, work: Work, n_block: Int32, *, right: bool, left: bool, ragged: bool = False
    ) -> cute.Tensor:
        """Cap, bias, mask and softmax: scores become weights in float32. Returns the factor for earlier rows of O.

        `ragged`: the block may reach beyond the last key.
        """
        scores, place, start = mma.rows_and_columns(fragments.scores), fragments.place, n_block * self.config.tile_n
        logits, features = work.logits, fragments.features
        if logits.capped is not None:
            softcap.cap(scores, logits.capped)
        if features.bias is not None:
            dense.add(scores, logits.biased, features.bias, place, start, ragged=ragged)
        if right or left:
            mask.hide(scores, place, start, work.seq, right=right, left=left)
        if features.q_ids is not None:
            ids, kv_len = (features.q_ids, features.kv_ids), work.grid.kv_len
            mask.hide_other_segments(scores, place, start, *ids, kv_len, ragged=ragged)
        if features.mask is not None:
            dense.hide_false(scores, features.mask, place, start, ragged=ragged)
        return fragments.softmax.update(scores)

    def pack(self, fragments: Fragments) -> None:
        """P in 16 bit: a thread's elements of S are its elements of the A operand, in the same order."""
        scores = cute.coalesce(fragments.scores)
        pairs = cute.recast_tensor(cute.coalesce(fragments.weights), Int32)
        for i in range(cute.size(pairs)):
            pairs[i] = ptx.cvt_pair(self.dtype, scores[2 * i], scores[2 * i + 1])

    @cute.jit
    def finish(
        self,
        maps: Maps,
        lse: cute.Pointer,
        smem: Smem,
        fragments: Fragments,
        work: Work,
        wg: Int32,
        first_row: Int32,
    ) -> None:
        """Normalises O and stores it and lse. Waits: store[wg]. Signals: store[wg]."""
        factors, lses = fragments.softmax.finish(fragments.features.sink)
        mma.scale_rows(fragments.out, factors)
        if self.config.has_q_lengths:
            present = [row < work.seq.q_len for row in fragments.place.rows]
            mma.keep_rows(fragments.out, present)
            lses = [Float32(cutlass.select_(p, lse_, -Float32.inf)) for p, lse_ in zip(present, lses, strict=True)]
        self.store_out(maps, smem, fragments, work, wg, first_row)
        self.store_lse(lse, fragments, work, lses)

    @cute.jit
    def store_out(self, maps: Maps, smem: Smem, fragments: Fragments, work: Work, wg: Int32, first_row: Int32) -> None:
        """Registers -> the warpgroup's own rows of Q in smem -> global memory; rows past q_len are not written."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma.values_mma(self.dtype, self.config.v_columns))
        rounded = cute.make_rmem_tensor_like(fragments.out, self.dtype)
        rounded.store(fragments.out.load().to(self.dtype))
        target = smem.out[None, None, wg]
        # no wait before overwriting Q: only this warpgroup's wgmma read these rows, and all have retired
        cute.copy(copy, copy.get_slice(thread).retile(rounded), copy.get_slice(thread).partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        barrier = NamedBarrierId.STORE + wg
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if thread // 32 == 0:
            block = (WARPGROUP_ROWS, self.config.v_columns)
            source, destination = _partition(
                maps.out, block, Corner(first_row, work.tile.q_head, work.tile.batch), target
            )
            cute.copy(maps.out, source, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copy has left smem, so the CTA may go

    @cute.jit
    def store_lse(self, lse: cute.Pointer, fragments: Fragments, work: Work, lses: list[Float32]) -> None:
        """One thread of the four that share a row writes it."""
        place, tile, q_len = fragments.place, work.tile, work.grid.q_len
        if place.first_column == 0:
            row_of_lse = (Int64(tile.batch) * work.grid.q_heads + tile.q_head) * q_len
            for r in cutlass.range_constexpr(2):
                if place.rows[r] < q_len:
                    element = cute.make_tensor(lse + (row_of_lse + place.rows[r]), cute.make_layout(1))
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


def _read(pointer: cute.Pointer) -> Float32 | Int32:
    """The one element at `pointer`."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _partition(
    atom: cute.CopyAtom, block: tuple[int, int], corner: Corner, smem_tile: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(tile in smem, its coordinates in the array) of a block (rows, head_dim)."""
    # tensor maps count from the innermost extent: head_dim, seq, heads, batch
    every = cute.make_identity_tensor((block[1], block[0], 1, 1))
    shifted = cute.domain_offset((0, *corner), every)
    coordinates = cute.make_tensor(shifted.iterator, cute.select(every.layout, [1, 0]))
    whole = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, whole, cute.group_modes(smem_tile, 0, 2), cute.group_modes(coordinates, 0, 2))


def _fetch(atom: cute.CopyAtom, block: tuple[int, int], corner: Corner, smem_tile: cute.Tensor, slot: Any) -> None:
    """Starts the copy of one block into a slot."""
    destination, source = _partition(atom, block, corner, smem_tile)
    cute.copy(atom, source, destination, tma_bar_ptr=slot.barrier)
