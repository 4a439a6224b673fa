"""Blackwell forward of packed sequences: a CTA finds its tile in a schedule, which lists those with most work first.

The pipeline is that of `forward`. Tiles are `core.packed.PackedTile`. Copies of K and V may reach into a next sequence:
masks hide those keys, and the correction warps clear those values. They also store O, of the tile's own rows alone.

Parameters are those of `forward`, then the schedule. Grid: as many CTAs as tiles may be listed, times query heads;
those behind the last tile find none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core import inputs as calls
from ..core.heads import Rows
from ..core.inputs import Inputs
from ..core.packed import read_count, read_tile
from ..core.scheduler import Tile, TileOrder
from .forward import ForwardSm100
from .shared import Cta, Extents, Work

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["PackedSm100"]


class PackedSm100(ForwardSm100):
    """The kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: ForwardSm100Config) -> None:
        super().__init__(config)
        self.order = TileOrder(
            tile_m=config.tile_m,
            row_step=config.tile_m,
            kv_bytes=(config.head_dim + config.head_dim_v) * config.element_bytes,
            longest_first=True,
            partial_first=False,
        )

    @cute.jit
    def each_tile(self, cta: Cta, compute: cutlass.Constexpr, state: Any) -> None:
        """Calls `compute(work, state)` for the CTA's tile, if there is one."""
        index, grid = cute.arch.block_idx()[0], cta.grid
        if index < read_count(grid.schedule) * grid.q_heads:
            compute(self.work(cta.inputs, grid, index, Int32(0), Int32(0)), state)

    def work(self, inputs: Inputs, grid: Extents, index: Int32, round: Int32, filled: Int32) -> Work:
        """The tile at `index` of the order."""
        tile_m, whole = self.config.tile_m, grid.grid
        position, q_head, kv_head = self.order.listed(index, read_count(grid.schedule), whole)
        packed = read_tile(grid.schedule, position)
        first_row = packed.first_row(tile_m)
        tile = Tile(Int32(0), q_head, kv_head, packed.batch)
        seq = packed.sequence(*calls.window(inputs))
        visit = self.bounds.visit_rows(first_row, packed.end_row, seq)
        return Work(grid, tile, Rows(first_row), seq, visit, calls.logits(inputs), inputs, round, filled, packed=packed)
