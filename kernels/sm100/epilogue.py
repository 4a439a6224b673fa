"""The epilogue warp: O leaves shared memory by TMA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core.tma import partition
from .shared import Barriers, Maps, Smem, Work, arrive, wait

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["Epilogue"]


class Epilogue:
    """Stores both Q tiles' rows."""

    def __init__(self, config: ForwardSm100Config) -> None:
        self.config = config

    @cute.jit
    def tile(self, maps: Maps, smem: Smem, barriers: Barriers, work: Work, tiles: Int32) -> Int32:
        """Waits: out.full. Signals: out.empty. Rows beyond q_len are not written. Returns tiles + 1."""
        config = self.config
        assert smem.out is not None, "this warp stores O"
        for i in cutlass.range_constexpr(config.q_tiles):
            wait(barriers.out_full + i, work.round & 1)
            corner = work.of_queries(work.first_row(config, i))
            block = (config.map_rows, config.v_columns)
            source, destination = partition(maps.out, block, corner, smem.out[None, None, i])
            cute.copy(maps.out, source, destination)
            cute.arch.cp_async_bulk_commit_group()
        for i in cutlass.range_constexpr(config.q_tiles):
            newer = config.q_tiles - 1 - i
            cute.arch.cp_async_bulk_wait_group(
                newer, read=True
            )  # that copy has left smem: the CTA may go behind the last
            if cutlass.const_expr(config.is_persistent):
                arrive(barriers.out_empty + i)
        return tiles + 1
