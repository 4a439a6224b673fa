"""Hopper backward, last kernel: dq = softmax_scale * dq_sum, rounded to the inputs' type.

`dq_sum` holds the columns of a row as the main kernel adds them (`BackwardSm90.reduce_queries`): places
16 j + 4 t + (0, 1, 2, 3) are columns 16 j + 2 t + (0, 1, 8, 9).

A CTA turns tile_m queries of one head. Parameters in order, as `PostprocessConfig.params` lists them:

    dq             map       (head_dim, q_len, q_heads, batch)   box (64, tile_m, 1, 1), swizzle 128 bytes
    dq_sum         float32*  [batch, q_heads, q_len, sum_columns], or dq_tiles: [..., padded_q_len, sum_columns]
    softmax_scale  float32*  one element
    q_len q_heads  int32 each

or, where CTAs of the main kernel have shared a kv head's query heads, tile_m keys of a kv head:

    dk, dv          map       (head_dim, kv_len, kv_heads, batch)   likewise; one of both
    dk_sum, dv_sum  float32*  [batch, kv_heads, head_splits, padded_kv_len, head_dim] parts in tiles
    softmax_scale   float32*  one element; not for dv
    kv_len kv_heads head_splits   int32 each

Grid (ceil(q_len / tile_m) * q_heads * batch, 1, 1), of keys likewise, block (128, 1, 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..core.tma import Corner, partition
from . import mma

if TYPE_CHECKING:
    from jax_fa4.configs import PostprocessConfig

__all__ = ["PostprocessSm90"]

VECTOR = 4  # floats in 16 bytes
WARPGROUP = 128
SLAB = 64  # columns of a swizzle atom


class PostprocessSm90:
    """The postprocess kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: PostprocessConfig) -> None:
        self.config = config
        self.columns = config.columns
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]

    @cute.jit
    def launch(
        self,
        dq: cute.Tensor,
        dq_sum: cute.Pointer,
        softmax_scale: cute.Pointer | None,
        q_len: Int32,
        q_heads: Int32,
        parts: Int32 | None,
    ) -> None:
        """`dq`, or dk or dv, is (seq, head_dim, heads, batch). The grid is a placeholder: plans compute their own."""
        config = self.config
        layout = mma.k_major(self.dtype, config.tile_m, self.columns, 1)
        store = cpasync.CopyBulkTensorTileS2GOp()
        dq_map, _ = cpasync.make_tiled_tma_atom(store, dq, layout, (config.tile_m, self.columns))
        self.kernel(dq_map, dq_sum, softmax_scale, q_len, q_heads, parts).launch(
            grid=(q_heads, 1, 1), block=(config.threads, 1, 1), smem=config.smem_bytes
        )

    @cute.kernel
    def kernel(
        self,
        dq_map: cute.CopyAtom,
        dq_sum: cute.Pointer,
        softmax_scale: cute.Pointer | None,
        q_len: Int32,
        q_heads: Int32,
        parts: Int32 | None,
    ) -> None:
        config = self.config
        smem = cutlass.memory.SmemAllocator()
        layout = mma.k_major(self.dtype, config.tile_m, self.columns, 1)
        tile = smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
        scale = Float32(1.0) if softmax_scale is None else cute.make_tensor(softmax_scale, cute.make_layout(1))[0]
        m_blocks = (q_len + (config.tile_m - 1)) // config.tile_m
        head = cute.arch.block_idx()[0] // m_blocks  # over all of the batch
        m_block = cute.arch.block_idx()[0] - head * m_blocks

        if cutlass.const_expr(config.sums_tiles):
            first = head if parts is None else head * parts
            dq_tile = dq_sum + (Int64(first) * m_blocks + m_block) * config.dq_tile_floats
            self.turn_tile(dq_tile, tile, scale, parts, Int64(m_blocks) * config.dq_tile_floats)
        else:
            self.turn_rows(dq_sum, tile, scale, head, m_block, q_len)

        cute.arch.fence_proxy("async.shared", space="cta")  # TMA may read what this thread wrote
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            batch = head // q_heads
            corner = Corner(m_block * config.tile_m, head - batch * q_heads, batch)
            block = (config.tile_m, self.columns)
            source, destination = partition(dq_map, block, corner, tile[None, None, 0])
            cute.copy(dq_map, source, destination)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copy has left smem, so the CTA may go

    @cute.jit
    def turn_rows(
        self, dq_sum: cute.Pointer, tile: cute.Tensor, scale: Float32, head: Int32, m_block: Int32, q_len: Int32
    ) -> None:
        """Rows of float32 to a tile of smem, scaled and rounded."""
        config = self.config
        first = (Int64(head) * q_len + m_block * config.tile_m) * config.sum_columns
        rows = q_len - m_block * config.tile_m
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(config.tile_m * self.columns // VECTOR // config.threads):
            offset = (i * config.threads + thread) * VECTOR
            row, place = offset // self.columns, offset % self.columns
            column = place // 16 * 16 + place % 16 // 2
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            if row < rows and place < config.sum_columns:
                element = first + (row * config.sum_columns + place)
                source = cute.make_tensor((dq_sum + element).align(16), cute.make_layout(VECTOR))
                values.store(source.load())
            rounded = cute.make_rmem_tensor((2, 2), self.dtype)
            rounded.store((values.load() * scale).to(self.dtype).reshape((2, 2)))
            for half in cutlass.range_constexpr(2):
                pair = tile.iterator + mma.swizzled(row, column + 8 * half, config.tile_m)
                cute.make_tensor(pair.align(4), cute.make_layout(2)).store(rounded[None, half].load())

    @cute.jit
    def turn_tile(
        self, dq_tile: cute.Pointer, tile: cute.Tensor, scale: Float32, parts: Int32 | None, part_floats: Int64
    ) -> None:
        """A tile, or the sum of its `parts` that lie so far apart, to smem, scaled and rounded."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        warp, lane = thread // 32, thread % 32
        slabs, blocks = config.tile_m // SLAB, config.sum_columns // 8  # of queries, of columns
        for slab in range(slabs):
            first = slab * blocks
            values = cute.make_rmem_tensor((VECTOR, blocks), Float32)
            for block in range(blocks):
                values[None, block].store(self.block(dq_tile, first + block).load())
            if cutlass.const_expr(parts is not None):
                for part in cutlass.range(1, parts, unroll=1):
                    for block in cutlass.range_constexpr(blocks):
                        more = self.block(dq_tile + part * part_floats, first + block)
                        values[None, block].store(values[None, block].load() + more.load())
            for block in range(self.columns // 8):
                rounded = cute.make_rmem_tensor((2, 2), self.dtype)
                if block < blocks:
                    rounded.store((values[None, block].load() * scale).to(self.dtype).reshape((2, 2)))
                else:
                    rounded.fill(0.0)  # beyond head_dim
                row, column = slab * SLAB + 16 * warp + lane // 4, block * 8 + 2 * (lane % 4)
                for half in range(2):
                    pair = tile.iterator + mma.swizzled(row + 8 * half, column, config.tile_m)
                    cute.make_tensor(pair.align(4), cute.make_layout(2)).store(rounded[None, half].load())

    def block(self, dq_tile: cute.Pointer, block: int) -> cute.Tensor:
        """The thread's four floats of a block of eight columns: two in its first query, then in its second."""
        place = dq_tile + (block * WARPGROUP + cute.arch.thread_idx()[0]) * VECTOR
        return cute.make_tensor(place.align(16), cute.make_layout(VECTOR))
