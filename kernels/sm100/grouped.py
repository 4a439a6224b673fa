"""Blackwell attention with grouped heads: a tile's rows are queries of all heads that share a kv head.

Row r of a kv head's rows is query r // group of head r % group, for any group, so that every key is read once for the
whole group. The pipeline is that of `forward`; other are

    Q       by cp.async of both load warps, row by row
    K, V    by TMA, page by page where keys lie in pages, or by cp.async where pages are too small for that
    O, lse  by the threads that have a row: O in 16 bit, or a split's in float32 for `combine`

With splits the blocks that a tile sees are cut, see `core.splits`; a split without keys writes lse -inf and nothing
else. Grid: (ceil(q_len * group / tile_m) * kv_heads * batch * num_splits, 1, 1).

Parameters in order, as `GroupedSm100Config.params` lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..core import inputs as calls
from ..core.divide import divide, divide_with_rest
from ..core.heads import Rows
from ..core.inputs import Inputs
from ..core.rows import GlobalRows
from ..core.scheduler import Grid
from ..core.splits import SplitKeys, Splits
from .correction import Correction, PartialRow
from .forward import EARLY_WEIGHTS, ForwardSm100
from .load_grouped import GroupedLoad, box_layout
from .shared import Barriers, Extents, Maps, Smem, Work
from .softmax import Row, Softmax

if TYPE_CHECKING:
    from jax_fa4.configs.grouped import GroupedSm100Config

__all__ = ["GroupedSm100"]


class GroupedSm100(ForwardSm100):
    """The kernel of one config. `launch` is compiled for its device code only."""

    config: GroupedSm100Config

    def __init__(self, config: GroupedSm100Config) -> None:
        super().__init__(config)
        self.load = GroupedLoad(config)
        if config.is_split:
            self.softmax = SplitSoftmax(config, self.dtype, EARLY_WEIGHTS)
            self.correction = SplitCorrection(config, self.dtype)

    @cute.jit
    def launch(
        self,
        k: cute.Tensor | None,
        v: cute.Tensor | None,
        out: GlobalRows | cute.Pointer,
        lse: cute.Pointer,
        inputs: Inputs,
        extents: Extents,
    ) -> None:
        """K and V are (seq, head_dim, heads, batch) where TMA copies them. The grid is a placeholder."""
        config = self.config
        maps = Maps(None, None, None, None)
        if cutlass.const_expr(not config.gathers_keys):
            maps = Maps(None, self.map(k, config.columns), self.map(v, config.v_columns), None)
        self.kernel(maps, out, lse, inputs, extents).launch(
            grid=(extents.batch, 1, 1),
            block=(config.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
        )

    def announce(self) -> None:
        """`combine` may start: it waits for this kernel's end by itself."""
        if self.config.is_split:
            cute.arch.griddepcontrol_launch_dependents()

    def map(self, array: cute.Tensor, columns: int) -> cute.CopyAtom:
        """The copy of a box of K or V."""
        box, op = box_layout(self.dtype, self.config, columns), cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(op, array, box, (self.config.box_rows, columns))[0]

    def work(self, inputs: Inputs, grid: Extents, index: Int32, round: Int32, filled: Int32) -> Work:
        """The tile at `index` of the order, and the split of its keys."""
        config, group = self.config, grid.group
        one_head = Grid(grid.q_len * group, grid.kv_len, grid.kv_heads, grid.kv_heads, grid.batch)  # of all its rows
        split = None
        if config.is_split:
            m_blocks = divide(one_head.q_len + (config.tile_m - 1), config.tile_m)
            split, index = divide_with_rest(index, m_blocks * grid.kv_heads * grid.batch)
        tile = self.scheduler.tile(index, one_head)
        tile = tile._replace(q_head=tile.kv_head * group)
        rows = Rows(tile.m_block * config.tile_m, group)
        seq = calls.sequence(inputs, grid, tile, calls.window(inputs))
        within = calls.key_blocks(inputs, one_head, tile, tile.m_block, config.tile_m)
        visit = self.bounds.visit_rows(*rows.queries(config.tile_m), seq, within)
        if split is not None:
            keys = SplitKeys.of(seq.q_len * group, grid.kv_heads)
            splits = Splits.of(visit, keys, config.tile_n, grid.num_splits)
            begin, end = splits.within(split)
            some = (begin, end) if within is None else within._replace(begin=begin, end=end)
            visit = self.bounds.visit_rows(*rows.queries(config.tile_m), seq, some)
        return Work(grid, tile, rows, seq, visit, calls.logits(inputs), inputs, round, filled, split)


class SplitSoftmax(Softmax):
    """lse [batch, kv_heads, q_len, group, num_splits]."""

    def lse_element(self, work: Work, row: Row) -> Int64:
        """Where lse of a row lies in its array."""
        rows_before, index = _split_row(work, row.place.rows[0], row.q_head - work.tile.q_head)
        return (rows_before + index) * work.grid.num_splits + work.split


class SplitCorrection(Correction):
    """O [batch, kv_heads, num_splits, q_len, group, head_dim_v] float32."""

    @cute.jit
    def finish(
        self,
        smem: Smem,
        barriers: Barriers,
        out: cute.Pointer,
        work: Work,
        lanes: Int32,
        thread: Int32,
        i: cutlass.Constexpr,
        empty: cutlass.Constexpr,
    ) -> None:
        """Rows of tile `i`: O / row_sum, but nothing where no key is visited: then lse says so."""
        if cutlass.const_expr(not empty):
            super().finish(smem, barriers, out, work, lanes, thread, i, empty)

    def global_row(self, out: cute.Pointer, work: Work, query: Int32, head: Int32) -> PartialRow:
        """Where a row lies in global memory; `head` counts from the tile's."""
        rows_before, index = _split_row(work, query, head)
        rows = work.grid.q_len * work.grid.group
        element = rows_before * work.grid.num_splits + (Int64(work.split) * rows + index)
        return PartialRow(self.config, out + element * self.config.head_dim_v, query < work.grid.q_len)


def _split_row(work: Work, query: Int32, head: Int32) -> tuple[Int64, Int32]:
    """Rows of the kv heads before the tile's, and the row's index among its own's."""
    grid, tile, group = work.grid, work.tile, work.grid.group
    entry = Int64(tile.batch) * grid.kv_heads + tile.kv_head
    return entry * (grid.q_len * group), query * group + head
