"""Online softmax over blocks of scores, in float32 and base 2.

    row_max_log2 = max over keys of s * scale_log2                 scale_log2 = softmax_scale * log2(e) > 0
    p            = exp2(s * scale_log2 - row_max_log2)             <= 1
    row_sum      = sum over keys of p                              of the thread's own columns until `finish`
    lse          = (row_max_log2 + log2(row_sum)) * ln(2)

A row with no visible key so far has row_max_log2 = -inf and row_sum = 0; 0 takes the maximum's place in the difference,
so that no inf - inf arises.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .exp2 import exp2

__all__ = ["Softmax", "normalise", "scale_log2"]

LN_2 = math.log(2.0)
LOG2_E = math.log2(math.e)
ROW_THREADS = 4  # neighbouring threads that share a row of an accumulator
TINY_SCALE = 2.0**-100  # stands for 0: scores vanish against it, but a hidden score stays -inf where -inf * 0 is NaN


def scale_log2(softmax_scale: Float32) -> Float32:
    """|softmax_scale| * log2(e), never 0. A kernel negates its scores where softmax_scale is negative."""
    magnitude = cutlass.max(softmax_scale, -softmax_scale)
    return Float32(cutlass.select_(softmax_scale == 0.0, Float32(TINY_SCALE), magnitude)) * LOG2_E


class Softmax(NamedTuple):
    """Statistics of a thread's rows, updated in place."""

    scale_log2: Float32
    row_max_log2: cute.Tensor  # [rows] float32
    row_sum: cute.Tensor  # [rows] float32

    @classmethod
    def start(cls, rows: int, scale_log2: Float32) -> "Softmax":
        """No key seen yet."""
        softmax = cls(scale_log2, cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32))
        softmax.restart()
        return softmax

    def restart(self) -> None:
        """Other rows, of which no key has been seen yet."""
        self.row_max_log2.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    def update(
        self, scores: cute.Tensor, *, staggered: bool = False, exp2_period: int = 0, may_be_empty: bool = True
    ) -> cute.Tensor:
        """Turns scores [rows, columns] of a block into weights p in place.

        Returns [rows] float32: the factor that earlier weights, summed or multiplied with V, must be scaled by.

        `staggered`: exponentials of a row start as soon as its maximum is known, while the next row's is being found.
        Left alone, the assembler mostly finds all maxima first, and the special-function unit waits; it is told by
        maxima that begin with what only the row before can tell.

        `exp2_period`: of so many weights of a row, the last is computed by a polynomial instead of that unit; 0: none.

        `may_be_empty`: a row may have seen no key yet. Else a step fewer stands between its maximum and its weights.
        """
        rows, columns = scores.shape
        rescale = cute.make_rmem_tensor(cute.size(rows), Float32)
        weights: list[Float32] = []  # of the row before
        before = None  # its maximum
        for r in range(cute.size(rows)):
            row = [scores[r, c] for c in range(cute.size(columns))]
            row_max = before = _staggered_max(row, before, weights) if staggered else _chain(row)
            row_max = cute.arch.warp_reduction_max(row_max, threads_in_group=ROW_THREADS)
            row_max_log2 = cute.arch.fmax(self.row_max_log2[r], row_max * self.scale_log2)
            base = row_max_log2
            if may_be_empty:
                base = Float32(cutlass.select_(row_max_log2 == -Float32.inf, Float32(0.0), row_max_log2))
            rescale[r] = cute.math.exp2(self.row_max_log2[r] - base, fastmath=True)
            weights, row_sum = [], self.row_sum[r] * rescale[r]
            for c, score in enumerate(row):
                x = cute.math.fma(score, self.scale_log2, -base)
                emulated = exp2_period and c % exp2_period == exp2_period - 1
                p = exp2(x) if emulated else cute.math.exp2(x, fastmath=True)
                scores[r, c] = p
                weights.append(p)
                row_sum = row_sum + p
            self.row_max_log2[r] = row_max_log2
            self.row_sum[r] = row_sum
        return rescale

    def finish(self, sink: Float32 | None = None) -> tuple[list[Float32], list[Float32]]:
        """Per row: the factor that normalises the output, and lse. An empty row gets 0 and -inf; NaN stays NaN.

        A sink is one more logit, of no value: it joins the sum, and is the lse of an empty row.
        """
        factors, lses = [], []
        for r in range(cute.size(self.row_sum)):
            row_sum = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=ROW_THREADS)
            factor, lse = normalise(row_sum, self.row_max_log2[r], sink)
            factors.append(factor)
            lses.append(lse)
        return factors, lses


def normalise(row_sum: Float32, row_max_log2: Float32, sink: Float32 | None = None) -> tuple[Float32, Float32]:
    """The factor that normalises a row's output, and its lse: 0 and -inf (or the sink) for an empty row."""
    if sink is not None:
        return _normalise_with(row_sum, row_max_log2, sink)
    empty = row_sum == 0.0
    factor = Float32(cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(row_sum)))
    lse = (row_max_log2 + cute.math.log2(row_sum, fastmath=True)) * LN_2
    return factor, Float32(cutlass.select_(empty, Float32(-Float32.inf), lse))


def _normalise_with(row_sum: Float32, row_max_log2: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """The maximum takes the sink in before anything is summed: neither a high nor a low sink overflows."""
    sink_log2 = sink * LOG2_E
    base = cute.arch.fmax(row_max_log2, sink_log2)
    base = Float32(cutlass.select_(base == -Float32.inf, Float32(0.0), base))
    rescale = cute.math.exp2(row_max_log2 - base, fastmath=True)
    total = row_sum * rescale + cute.math.exp2(sink_log2 - base, fastmath=True)
    empty = row_sum == 0.0
    factor = Float32(cutlass.select_(empty, Float32(0.0), rescale * cute.arch.rcp_approx(total)))
    lse = (base + cute.math.log2(total, fastmath=True)) * LN_2
    return factor, Float32(cutlass.select_(empty, sink, lse))


def _staggered_max(row: list[Float32], before: Float32 | None, weights: list[Float32]) -> Float32:
    """The maximum of a row; of its first 3/8 once `before` is known, of the others once `weights` begin to be."""
    if before is None:
        return cute.arch.fmax(_chain(row[::2]), _chain(row[1::2]))  # two chains: nothing else fills the time yet
    early = len(row) * 3 // 8
    early_max = cute.arch.fmax(_chain(row[:early:2]), _chain(row[1:early:2]))
    row_max = cute.arch.fmax(_after(before), early_max)
    return _chain([cute.arch.fmax(row_max, _after(weights[0])), *row[early:]])


def _chain(values: list[Float32]) -> Float32:
    """Their maximum, one after the other."""
    highest = values[0]
    for value in values[1:]:
        highest = cute.arch.fmax(highest, value)
    return highest


def _after(value: Float32) -> Float32:
    """-inf, once `value` is there."""
    return -cute.arch.fmax(-value, Float32(Float32.inf))
