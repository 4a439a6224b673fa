"""The merge of partial results of splits of a sequence: the same operations wherever splits are merged.

    weight_s = exp(lse_s - max lse),   out = sum(weight_s * out_s) / sum(weight_s),   lse = max lse + log(sum(weight_s))

A sink is one more logit, of no value.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from .softmax import LN_2, LOG2_E

__all__ = ["base_of", "normalise", "weight", "weighted"]


def base_of(largest: Float32) -> Float32:
    """What all exponents are taken from, times log2(e): the largest lse, or 0 where no split has seen a key."""
    return Float32(cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)) * LOG2_E


def weight(lse: Float32, base_log2: Float32) -> Float32:
    """Of a split, or of a sink."""
    return cute.math.exp2(cute.math.fma(lse, Float32(LOG2_E), -base_log2), fastmath=True)


def weighted(value: Float32, weight: Float32) -> Float32:
    """A split's part of a sum. What a row that saw no key of the split has there may be NaN."""
    return Float32(cutlass.select_(weight == 0.0, Float32(0.0), value * weight))


def normalise(total: Float32, base_log2: Float32, is_padding: Boolean) -> tuple[Boolean, Float32, Float32]:
    """Whether a row is empty, the factor of its sum, and its lse. Padding may be NaN, so products need the first."""
    empty = (total == 0.0) | is_padding
    factor = Float32(cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total)))
    lse = (base_log2 + cute.math.log2(total, fastmath=True)) * LN_2
    return empty, factor, Float32(cutlass.select_(empty, Float32(-Float32.inf), lse))
