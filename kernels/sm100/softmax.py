"""The softmax warps: 128 threads a Q tile, a row each. S from tensor memory becomes P there.

row_max_log2 grows only where a block's maximum exceeds it by more than RESCALE_THRESHOLD, so that weights are at
most 2^RESCALE_THRESHOLD and earlier output seldom has to be rescaled. The final division is exact all the same:
row_sum and O have the same factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from ..core import exp2, inputs, mask, visible
from ..core.inputs import Features
from ..core.ptx import cvt_pair
from ..core.softmax import normalise
from . import ptx
from .shared import Barriers, Smem, Turn, Work, arrive, arrive_at_leader, wait

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import ForwardSm100Config

__all__ = ["Softmax"]

RESCALE_THRESHOLD = 8.0  # log2
FRAGMENT = 32  # columns that travel together
SUMS = 4  # pairs that are summed side by side
EMULATED = 4  # of each exp2_period weights, the last ones


class Row(NamedTuple):
    """What a thread knows of its row. Tensors are updated in place."""

    thread: Int32  # in the tile, which is the row's lane of tensor memory
    q_head: Int32
    place: mask.Place
    features: Features
    row_max_log2: cute.Tensor  # [1] float32
    row_sum: cute.Tensor  # [1] float32
    scores: cute.Tensor  # [1, tile_n] float32


class Softmax:
    """Rows of one Q tile."""

    def __init__(self, config: ForwardSm100Config, dtype: type[Numeric], early_weights: int) -> None:
        self.config, self.dtype, self.early_weights = config, dtype, early_weights

    @cute.jit
    def tile(
        self,
        lse: cute.Pointer,
        smem: Smem,
        barriers: Barriers,
        work: Work,
        tmem: Int32,
        i: cutlass.Constexpr,
        step: Int32,
    ) -> Int32:
        """Waits: s.full, total.empty[i]. Signals: stats, p.full, p.last, total[i].

        `step`: blocks of earlier tiles; returns the number with this one's.
        """
        visit = work.visit
        row = self.row(work, i)
        if visit.num_n_blocks > 0:
            lanes = tmem + (row.thread // 32 << 21)
            self.block(smem, barriers, work, lanes, row, visit.first, step, i, True, True, self.config.has_left)
            step = step + 1
            for span in visit.spans:
                in_span = row._replace(features=row.features.in_span(span))
                for j in cutlass.range(span.num_n_blocks, unroll=1):
                    n_block = span.first - j
                    self.block(smem, barriers, work, lanes, in_span, n_block, step, i, False, span.right, span.left)
                    step = step + 1
        self.finish(lse, smem, barriers, work, row, i)
        return step

    @cute.jit
    def finish(
        self, lse: cute.Pointer, smem: Smem, barriers: Barriers, work: Work, row: Row, i: cutlass.Constexpr
    ) -> None:
        """The factor that normalises O to the correction warps, lse to global memory.

        Waits: total.empty[i]. Signals: total[i].
        """
        grid, tile, query = work.grid, work.tile, row.place.rows[0]
        sink = None
        if cutlass.const_expr(self.config.has_sinks):
            assert work.inputs.sinks is not None, "the config says so"
            sink = inputs.read(work.inputs.sinks + (tile.batch * grid.q_heads + row.q_head))
        factor, row_lse = normalise(row.row_sum[0], row.row_max_log2[0], sink)
        if cutlass.const_expr(self.config.is_persistent):
            wait(barriers.total_empty + i, (work.round & 1) ^ 1)  # the factors of the tile before have been read
        smem.totals[row.thread, i] = factor
        arrive(barriers.total + i)
        if cutlass.const_expr(self.config.has_padding):
            row_lse = Float32(cutlass.select_(query < work.seq.q_len, row_lse, -Float32.inf))
        if query < work.q_rows:
            element = cute.make_tensor(lse + self.lse_element(work, row), cute.make_layout(1))
            element[0] = row_lse

    def lse_element(self, work: Work, row: Row) -> Int64:
        """Where lse of a row lies in its array."""
        rows_before = (Int64(work.tile.batch) * work.grid.q_heads + row.q_head) * work.grid.q_len
        return rows_before + (work.q_begin + row.place.rows[0])

    def row(self, work: Work, i: int) -> Row:
        """The calling thread's row, no key seen yet."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % config.map_rows
        query, head = work.rows.place(work.first_row(config, i) + thread)
        place = mask.Place(rows=(query,), first_column=Int32(0), columns=tuple(range(config.tile_n)))
        q_head = work.tile.q_head + head
        row = Row(
            thread=thread,
            q_head=q_head,
            place=place,
            features=Features.of(work.inputs, work.grid.grid, work.tile._replace(q_head=q_head), place),
            row_max_log2=cute.make_rmem_tensor(1, Float32),
            row_sum=cute.make_rmem_tensor(1, Float32),
            scores=cute.make_rmem_tensor((1, config.tile_n), Float32),
        )
        row.row_max_log2.fill(-Float32.inf)
        row.row_sum.fill(0.0)
        return row

    @cute.jit
    def block(
        self,
        smem: Smem,
        barriers: Barriers,
        work: Work,
        lanes: Int32,
        row: Row,
        n_block: Int32,
        step: Int32,
        i: cutlass.Constexpr,
        first: cutlass.Constexpr,
        right: cutlass.Constexpr,
        left: cutlass.Constexpr,
    ) -> None:
        """Weights of one block. `first`: no earlier output that would have to be rescaled; the block may be ragged."""
        config = self.config
        turn = Turn.of(config, i, step)
        lanes = lanes + turn.place * config.tile_n
        start, kv_len = n_block * config.tile_n, work.grid.kv_len
        bits, features = visible.read(row.features, row.place, start, kv_len, ragged=first)  # ahead of S
        wait(barriers.s_full + turn.place, turn.phase)  # S is there; of two tiles, O is complete up to the block before
        for columns in self.parts():
            scores, place = self.part_of(row, columns)
            self.read_scores(lanes + columns.start, scores)
            inputs.prepare(
                scores,
                work.logits,
                features,
                place,
                start,
                work.seq,
                kv_len,
                right=right,
                left=left,
                ragged=first,
            )
        visible.hide(row.scores, bits)
        scores = [row.scores[0, c] for c in range(config.tile_n)]
        base, factor = self.raise_maximum(row, scores, work.logits.scale_log2)
        if cutlass.const_expr(not first or config.q_tiles == 1):
            smem.factors[row.thread, turn.place] = factor
            arrive(barriers.stats + turn.place)  # correction may rescale O
        weights = self.write_weights(lanes + config.tmem.weights[0], barriers, scores, work, base, turn.place)
        row.row_sum[0] = row.row_sum[0] * factor + _total(weights)

    def parts(self) -> tuple[range, ...]:
        """Columns of S that come into registers together: all, or few at a time where a cap or a bias takes others."""
        tile_n = self.config.tile_n
        step = FRAGMENT if self.config.bias is not None or self.config.has_softcap else tile_n
        return tuple(range(c, c + step) for c in range(0, tile_n, step))

    def part_of(self, row: Row, columns: range) -> tuple[cute.Tensor, mask.Place]:
        """Some columns of the row's scores, and where they lie."""
        if len(columns) == self.config.tile_n:
            return row.scores, row.place
        scores = cute.make_tensor(row.scores.iterator + columns.start, cute.make_layout((1, len(columns))))
        return scores, row.place._replace(columns=tuple(columns))

    def read_scores(self, address: Int32, scores: cute.Tensor) -> None:
        """S of the row into registers."""
        columns = cute.size(scores)
        fragments = [ptx.tcgen05_ld(address + c, FRAGMENT) for c in range(0, columns, FRAGMENT)]
        cute.arch.fence_view_async_tmem_load()
        for c, score in enumerate(score for fragment in fragments for score in fragment):
            scores[0, c] = score

    def raise_maximum(self, row: Row, scores: list[Float32], scale_log2: Float32) -> tuple[Float32, Float32]:
        """The number that is subtracted from logits of this block, and the factor for earlier weights."""
        earlier = row.row_max_log2[0]
        with_block = ptx.max3(earlier, _maximum(scores) * scale_log2, earlier)
        keep = with_block - earlier <= RESCALE_THRESHOLD
        row_max_log2 = Float32(cutlass.select_(keep, earlier, with_block))
        row.row_max_log2[0] = row_max_log2
        base = Float32(cutlass.select_(row_max_log2 == -Float32.inf, Float32(0.0), row_max_log2))
        return base, cute.math.exp2(earlier - base, fastmath=True)

    def write_weights(
        self, address: Int32, barriers: Barriers, scores: list[Float32], work: Work, base: Float32, place: Int32 | int
    ) -> list[tuple[Float32, Float32]]:
        """p = exp2(s * scale_log2 - base), in 16 bit to tensor memory. Signals: p.full, p.last of its place."""
        scale = work.logits.scale_log2
        weights = []
        for start in range(0, self.config.tile_n, FRAGMENT):
            pairs = []
            for c in range(start, start + FRAGMENT, 2):
                x = cute.arch.fma_packed_f32x2((scores[c], scores[c + 1]), (scale, scale), (-base, -base))
                if self.is_emulated(c):
                    pairs.append(exp2.exp2_pair(x))
                else:
                    pairs.append(tuple(cute.math.exp2(value, fastmath=True) for value in x))
            packed = [cvt_pair(self.dtype, *pair) for pair in pairs]
            ptx.tcgen05_st(address + start // 2, packed)
            weights += pairs
            if start + FRAGMENT in (self.early_weights, self.config.tile_n):
                cute.arch.fence_view_async_tmem_store()
                written = barriers.p_full if start + FRAGMENT == self.early_weights else barriers.p_last
                arrive_at_leader(written + place, self.config.cta_group)
        return weights

    def is_emulated(self, column: int) -> bool:
        """Whether a polynomial computes the weights of the pair at `column`."""
        period, fragment = self.config.exp2_period, column // FRAGMENT
        if not period or not self.config.exp2_first <= fragment < self.config.tile_n // FRAGMENT - 1:
            return False
        return column % FRAGMENT % period >= period - EMULATED


def _maximum(scores: list[Float32]) -> Float32:
    """Of a row; NaN if a score is."""
    lanes = scores[:SUMS]
    rest = scores[SUMS:]
    for c in range(0, len(rest), 2 * SUMS):
        lanes = [
            ptx.max3(lane, *(rest[c + 2 * n : c + 2 * n + 2])) if c + 2 * n + 1 < len(rest) else lane
            for n, lane in enumerate(lanes)
        ]
    return ptx.max3(ptx.max3(lanes[0], lanes[1], lanes[2]), lanes[3], lanes[3])


def _total(pairs: list[tuple[Float32, Float32]]) -> Float32:
    """Sum over a row's pairs."""
    sums = pairs[:SUMS]
    for p in range(SUMS, len(pairs), SUMS):
        sums = [cute.arch.add_packed_f32x2(a, b) for a, b in zip(sums, pairs[p : p + SUMS], strict=True)]
    low, high = sums[0]
    for a, b in sums[1:]:
        low, high = low + a, high + b
    return low + high
