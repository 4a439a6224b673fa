"""The schedule warp: asks the hardware for the tile of a CTA that has not started, while the others compute.

Cluster launch control hands such tiles out in the order of the grid, so the longest first still come first, and a CTA
that is done early takes one more. All warps that compute are told through shared memory. Of a pair, the first CTA asks,
and both are told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Boolean, Int32

from .shared import LEADER, RESPONSE_BYTES, Barriers, Smem, arrive_at_leader, wait, wait_for_all

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["ask", "told"]


@cute.jit
def ask(config: ForwardSm100Config, smem: Smem, barriers: Barriers, is_this_warp: Boolean) -> None:
    """Until no CTA is left that has not started. Waits: tile.empty. Signals: tile.full (the answer counts as bytes)."""
    if is_this_warp:
        exists, round = Int32(1), Int32(0)
        while exists != 0:
            is_asking = cute.arch.block_idx()[0] % config.cta_group == LEADER
            if is_asking:
                # the first answer overwrites nothing
                wait_for_all(barriers.tile_empty, (round & 1) ^ 1, config.cta_group)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers.tile_full, RESPONSE_BYTES)
            if is_asking:
                with cute.arch.elect_one():
                    cute.arch.issue_clc_query(barriers.tile_full, smem.response, multicast=config.cta_group == 2)
            _, exists = told(config, smem, barriers, round)
            round = round + 1


def told(config: ForwardSm100Config, smem: Smem, barriers: Barriers, round: Int32) -> tuple[Int32, Int32]:
    """The next tile, and 0 where there is none. Waits: tile.full. Signals: tile.empty."""
    wait(barriers.tile_full, round & 1)
    first_cta, _, _, exists = cute.arch.clc_response(smem.response)
    cute.arch.fence_proxy("async.shared", space="cta")  # the next answer may overwrite what this thread has read
    arrive_at_leader(barriers.tile_empty, config.cta_group)
    return first_cta // config.cta_group, exists
