"""Arithmetic of the matrix units: one instruction's K at once, in fixed point relative to the largest term.

The ISA leaves order, rounding and subnormals open. This is the model that published measurements fit bit by bit. Terms
are the accumulator and the exact products; a product's exponent is the sum of its operands', not renormalised. Each
term is cut towards zero to `fraction_bits` below the largest exponent, the sum is exact, and the result is cut as well.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.layout import number
from jax_fa4.emulator.layout.number import Format

__all__ = ["FP8_WGMMA", "PRECISE", "Precision", "multiply_accumulate", "multiply_accumulate_integer", "to_float16"]

NAN_BITS = 0x7FFFFFFF  # the only NaN that the units produce
ZERO_EXPONENT = -126  # of an operand that is zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """How many bits a matrix unit keeps."""

    fraction_bits: int  # of each term, below the largest exponent of the sum
    result_bits: int  # of the result's fraction


PRECISE = Precision(fraction_bits=25, result_bits=23)  # wgmma of 16 and 32 bits, tcgen05
FP8_WGMMA = Precision(fraction_bits=13, result_bits=13)


def _exponents(x: npt.NDArray[np.float32], min_exponent: int) -> npt.NDArray[np.int16]:
    exponent = (x.view(np.uint32) >> 23 & 255).astype(np.int16) - np.int16(127)
    return np.where(x == 0, np.int16(ZERO_EXPONENT), np.maximum(exponent, np.int16(min_exponent)))


def _truncate(x: npt.NDArray[np.float64], result_bits: int) -> npt.NDArray[np.float32]:
    """Float64 to float32, towards zero; 2**128 and more is infinity."""
    with np.errstate(over="ignore"):
        y = x.astype(np.float32)
    beyond = np.abs(y) > np.abs(x)
    y[beyond] = np.nextafter(y[beyond], np.float32(0))
    y[np.abs(x) >= 2.0**128] = np.copysign(np.float32(np.inf), x[np.abs(x) >= 2.0**128])
    return (y.view(np.uint32) & np.uint32(0xFFFFFFFF << 23 - result_bits & 0xFFFFFFFF)).view(np.float32)


def _finite_sum(
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    c: npt.NDArray[np.float32],
    min_exponents: tuple[int, int],
    precision: Precision,
) -> npt.NDArray[np.float32]:
    a_exponent, b_exponent = _exponents(a, min_exponents[0]), _exponents(b, min_exponents[1])
    largest = _exponents(c, number.F32.min_exponent)
    for k in range(a.shape[1]):
        np.maximum(largest, a_exponent[:, k, None] + b_exponent[None, :, k], out=largest)
    scale = np.ldexp(1.0, precision.fraction_bits - largest.astype(np.int32))
    total = np.trunc(c * scale)
    a_wide, b_wide, term = a.astype(np.float64), b.astype(np.float64), np.empty_like(scale)
    for k in range(a.shape[1]):
        np.multiply(a_wide[:, k, None], b_wide[None, :, k], out=term)
        np.multiply(term, scale, out=term)
        np.trunc(term, out=term)
        total += term
    return _truncate(total / scale, precision.result_bits)


def multiply_accumulate(
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    c: npt.NDArray[np.float32] | None,
    *,
    formats: tuple[Format, Format],
    precision: Precision = PRECISE,
    is_exact: bool = True,
) -> npt.NDArray[np.float32]:
    """a [M, K] times b [N, K] transposed, plus c [M, N] (None: 0), for one instruction's K: float32 [M, N].

    `formats` are those that a and b were decoded from. Infinities and NaN behave as in IEEE arithmetic. Without
    `is_exact` one float32 matrix product takes the model's place: 50 times faster, equal within float32 rounding.
    """
    if not is_exact:
        with np.errstate(invalid="ignore", over="ignore"):
            return a @ b.T if c is None else a @ b.T + c
    c = np.zeros((len(a), len(b)), np.float32) if c is None else c
    min_exponents = (formats[0].min_exponent, formats[1].min_exponent)
    if np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all():
        return _finite_sum(a, b, c, min_exponents, precision)
    with np.errstate(invalid="ignore"):
        special = a.astype(np.float64) @ b.astype(np.float64).T + c
    a, b, c = (np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b, c))
    finite = _finite_sum(a, b, c, min_exponents, precision)
    d = np.where(np.isfinite(special), finite, special.astype(np.float32))
    d.view(np.uint32)[np.isnan(special)] = NAN_BITS
    return d


def multiply_accumulate_integer(
    a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], c: npt.NDArray[np.int32] | None, *, saturate: bool
) -> npt.NDArray[np.int32]:
    """The same for 8-bit integers: exact, then wrapped or clamped to 32 bits."""
    total = (a @ b.T).astype(np.int64) + (0 if c is None else c)  # |sum| <= 32 * 255**2 < 2**24: exact in float32
    limits = np.iinfo(np.int32)
    return (np.clip(total, limits.min, limits.max) if saturate else total).astype(np.int32)


def to_float16(d: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bit patterns of a float16 accumulator: round to nearest even; any NaN becomes 0x7FFF."""
    with np.errstate(over="ignore"):
        bits = d.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(d), np.uint16(0x7FFF), bits)
