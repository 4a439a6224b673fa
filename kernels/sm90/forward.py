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

    tensor core | S, O of wg 0 | S, O of wg 1 | S, O of wg 0 |   one column = one hand-over of `turn`
    wg 0        | issues       | softmax n-1  | issues       |
    wg 1        | softmax n    | issues       | softmax n-1  |

Within a warpgroup S(n-1) = Q K(n-1)^T and O += P(n) V(n) are issued together, and the softmax of S(n-1) runs while the
second of them still does. Key blocks are visited downwards: the masked right edge first, the masked left edge last.

Parameters in order, as `KernelConfig.params` lists them (a map: 128-byte CUtensorMap by value, swizzle 128 bytes,
innermost extent contiguous, strides of the others free, zero fill outside):

    q               map   (head_dim, q_len, q_heads, batch)      box (64, 64, 1, 1)
    k               map   (head_dim, kv_len, kv_heads, batch)    box (64, tile_n, 1, 1)
    v               map   (head_dim_v, kv_len, kv_heads, batch)  box (64, tile_n, 1, 1)
    out             map   (head_dim_v, q_len, q_heads, batch)    box (64, 64, 1, 1)
    lse             float32*  [batch, q_heads, q_len]
    softmax_scale   float32*  one element
    window_left     int32*    one element, >= 0; only with has_left
    window_right    int32*    one element, >= 0; only with has_right
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

from ..core import mask, ptx
from ..core.barriers import Edge, NamedBarrierId, make_pipelines
from ..core.bounds import Bounds, Visit
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
BOTH_SIGNS = -0x7FFF8000  # 0x80008000: the sign bits of two 16-bit floats
LOAD_WARP = 0  # of the producer warpgroup, which comes first; its other warps only give their registers away


class Maps(NamedTuple):
    """TMA copies of one tile each."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom


class Scalars(NamedTuple):
    """Addresses of values that XLA computes on the device."""

    softmax_scale: cute.Pointer
    window_left: cute.Pointer | None
    window_right: cute.Pointer | None


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


class ForwardSm90:
    """The forward kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: KernelConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        self.bounds = Bounds(
            tile_m=config.tile_m, tile_n=config.tile_n, has_left=config.has_left, has_right=config.has_right
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
        scalars: Scalars,
        grid: Grid,
    ) -> None:
        """Arrays are (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        rows = mma.k_major(self.dtype, WARPGROUP_ROWS, config.head_dim, config.warpgroups)
        keys = mma.k_major(self.dtype, config.tile_n, config.head_dim, config.kv_stages)
        q_map, _ = cpasync.make_tiled_tma_atom(load, q, rows, (WARPGROUP_ROWS, config.head_dim))
        k_map, _ = cpasync.make_tiled_tma_atom(load, k, keys, (config.tile_n, config.head_dim))
        v_map, _ = cpasync.make_tiled_tma_atom(load, v, keys, (config.tile_n, config.head_dim_v))
        out_map, _ = cpasync.make_tiled_tma_atom(store, out, rows, (WARPGROUP_ROWS, config.head_dim_v))
        self.kernel(Maps(q_map, k_map, v_map, out_map), lse, scalars, grid).launch(
            grid=(grid.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, maps: Maps, lse: cute.Pointer, scalars: Scalars, grid: Grid) -> None:
        # first what takes long: these loads come back while the tile is found and the barriers are set up
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == LOAD_WARP:
            for atom in maps:
                cpasync.prefetch_descriptor(atom)
        softmax_scale = _read(scalars.softmax_scale)
        window_left = _read(scalars.window_left) if scalars.window_left is not None else None
        window_right = _read(scalars.window_right) if scalars.window_right is not None else None

        tile = self.scheduler.tile(cute.arch.block_idx()[0], grid)
        smem = self.allocate()
        ends = make_pipelines(self.edges)
        seq = Sequence.bottom_right(grid.q_len, grid.kv_len, window_left, window_right)
        work = Work(grid, tile, seq, self.bounds.visit(tile.m_block, seq))

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == LOAD_WARP:
                self.load(maps, smem, Producers(*(ends[name][0] for name in Producers._fields)), work)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            wg = warp_index // WARPGROUP_WARPS - 1
            consumers = Consumers(*(ends[name][1] for name in Consumers._fields))
            self.consume(maps, lse, smem, consumers, work, wg, softmax_scale)

    def allocate(self) -> Smem:
        """Q, then the K ring, then the V ring, each on a 1024-byte boundary as the swizzle wants it."""
        config, smem = self.config, cutlass.memory.SmemAllocator()
        rows = mma.k_major(self.dtype, WARPGROUP_ROWS, config.head_dim, config.warpgroups)
        keys = mma.k_major(self.dtype, config.tile_n, config.head_dim, config.kv_stages)
        transposed = mma.mn_major(self.dtype, config.tile_n, config.head_dim_v, config.kv_stages)
        q = smem.allocate_tensor(self.dtype, rows.outer, 1024, rows.inner)
        k = smem.allocate_tensor(self.dtype, keys.outer, 1024, keys.inner)
        v = smem.allocate_tensor(self.dtype, keys.outer, 1024, keys.inner)
        return Smem(q=q, k=k, v=v, v_transposed=cute.make_tensor(v.iterator, transposed.outer), out=q)

    @cute.jit
    def load(self, maps: Maps, smem: Smem, pipes: Producers, work: Work) -> None:
        """Waits: q.empty, k.empty, v.empty. Signals: q.full, k.full, v.full (TMA counts the bytes)."""
        config, tile, visit = self.config, work.tile, work.visit
        if visit.num_n_blocks > 0:
            slot = pipes.q.acquire_and_advance()
            for wg in cutlass.range_constexpr(config.warpgroups):
                row = tile.m_block * config.tile_m + wg * WARPGROUP_ROWS
                block = (WARPGROUP_ROWS, config.head_dim)
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
        block = (self.config.tile_n, self.config.head_dim)
        corner = Corner(n_block * self.config.tile_n, tile.kv_head, tile.batch)
        _fetch(maps.k, block, corner, smem.k[None, None, slot.index], slot)
        return pipes

    @cute.jit
    def load_values(self, maps: Maps, smem: Smem, pipes: Producers, tile: Tile, n_block: Int32) -> Producers:
        """Waits: v.empty. Signals: v.full."""
        slot = pipes.v.acquire_and_advance()
        block = (self.config.tile_n, self.config.head_dim_v)
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
        softmax_scale: Float32,
    ) -> None:
        """Waits: q.full, k.full, v.full, turn[wg], store[wg]. Signals: k.empty, v.empty, turn[wg+1], store[wg]."""
        first_row = work.tile.m_block * self.config.tile_m + wg * WARPGROUP_ROWS
        fragments = self.fragments(smem, wg, first_row, scale_log2(softmax_scale))
        fragments.out.fill(0.0)
        visit = work.visit
        if visit.num_n_blocks > 0:
            if wg == self.config.warpgroups - 1:
                self.pass_turn(wg)  # the ring of turns starts with warpgroup 0
            pipes.q.wait_and_advance()  # the Q tile has landed
            if softmax_scale < 0.0:
                self.negate_q(smem, wg)
            pipes = self.first_step(fragments, pipes, work, wg)
            for span in visit.spans:
                for i in cutlass.range(span.num_n_blocks, unroll=1):
                    pipes = self.step(fragments, pipes, work, wg, span.first - i, span.right, span.left)
            pipes = self.last_step(fragments, pipes)
        self.finish(maps, lse, smem, fragments, work, wg, first_row)

    def fragments(self, smem: Smem, wg: Int32, first_row: Int32, scale: Float32) -> Fragments:
        """Descriptors and registers of the calling thread; `first_row`: of the warpgroup; `scale`: scale_log2."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        scores_mma = mma.scores_mma(self.dtype, config.tile_n)
        values_mma = mma.values_mma(self.dtype, config.head_dim_v)
        # a descriptor covers the whole tile: any thread's slice of shared memory gives the same
        by_keys, by_values = scores_mma.get_slice(0), values_mma.get_slice(0)
        scores_shape = scores_mma.partition_shape_C((WARPGROUP_ROWS, config.tile_n))
        weights_shape = values_mma.partition_shape_A((WARPGROUP_ROWS, config.tile_n))
        out_shape = values_mma.partition_shape_C((WARPGROUP_ROWS, config.head_dim_v))
        return Fragments(
            q=scores_mma.make_fragment_A(by_keys.partition_A(smem.q))[None, None, None, wg],
            k=scores_mma.make_fragment_B(by_keys.partition_B(smem.k)),
            v=values_mma.make_fragment_B(by_values.partition_B(smem.v_transposed)),
            scores=cute.make_rmem_tensor(scores_shape, Float32),
            weights=cute.make_rmem_tensor(weights_shape, self.dtype),
            out=cute.make_rmem_tensor(out_shape, Float32),
            place=mma.place(first_row, thread, config.tile_n),
            softmax=Softmax.start(2, scale),
        )

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
        self.weigh(fragments, work, work.visit.first, right=True, left=self.config.has_left)
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
            mma.values_mma(self.dtype, self.config.head_dim_v), fragments.out, fragments.weights, v, accumulate=True
        )

    def weigh(self, fragments: Fragments, work: Work, n_block: Int32, *, right: bool, left: bool) -> cute.Tensor:
        """Mask and softmax: scores become weights in float32. Returns the factor for earlier rows of O."""
        scores = mma.rows_and_columns(fragments.scores)
        if right or left:
            start = n_block * self.config.tile_n
            mask.hide(scores, fragments.place, start, work.seq, right=right, left=left)
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
        factors, lses = fragments.softmax.finish()
        mma.scale_rows(fragments.out, factors)
        self.store_out(maps, smem, fragments, work, wg, first_row)
        self.store_lse(lse, fragments, work, lses)

    @cute.jit
    def store_out(self, maps: Maps, smem: Smem, fragments: Fragments, work: Work, wg: Int32, first_row: Int32) -> None:
        """Registers -> the warpgroup's own rows of Q in smem -> global memory; rows past q_len are not written."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma.values_mma(self.dtype, self.config.head_dim_v))
        rounded = cute.make_rmem_tensor_like(fragments.out, self.dtype)
        rounded.store(fragments.out.load().to(self.dtype))
        target = smem.out[None, None, wg]
        # no wait before overwriting Q: only this warpgroup's wgmma read these rows, and all have retired
        cute.copy(copy, copy.get_slice(thread).retile(rounded), copy.get_slice(thread).partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        barrier = NamedBarrierId.STORE + wg
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if thread // 32 == 0:
            block = (WARPGROUP_ROWS, self.config.head_dim_v)
            source, destination = _partition(
                maps.out, block, Corner(first_row, work.tile.q_head, work.tile.batch), target
            )
            cute.copy(maps.out, source, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copy has left smem, so the CTA may go

    @cute.jit
    def store_lse(self, lse: cute.Pointer, fragments: Fragments, work: Work, lses: list[Float32]) -> None:
        """One thread of the four that share a row writes it."""
        place, tile, q_len = fragments.place, work.tile, work.seq.q_len
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
