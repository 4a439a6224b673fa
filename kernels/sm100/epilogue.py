"""The epilogue warp: O leaves shared memory by TMA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute

from ..sm90.tma import Corner, partition
from .shared import Barriers, Maps, Smem, Work, wait

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["Epilogue"]


class Epilogue:
    """Stores both Q tiles' rows."""

    def __init__(self, config: ForwardSm100Config) -> None:
        self.config = config

    @cute.jit
    def tile(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work) -> None:
        """Waits: out.full. Rows beyond q_len are not written."""
        config, tile = self.config, work.tile
        for i in cutlass.range_constexpr(config.tile_m // config.map_rows):
            wait(barriers.out_full + i, 0)
            corner = Corner(tile.m_block * config.tile_m + i * config.map_rows, tile.q_head, tile.batch)
            block = (config.map_rows, config.v_columns)
            source, destination = partition(maps.out, block, corner, smem.out[None, None, i])
            cute.copy(maps.out, source, destination)
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the copies have left smem, so the CTA may go
