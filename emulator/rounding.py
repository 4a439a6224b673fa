"""Float arithmetic with PTX rounding modes, flushing and saturation, on numpy arrays of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["bf16_bits", "bf16_value", "flush", "fma", "saturate", "to_float32", "two_sum"]

Floats = npt.NDArray[Any]

SMALLEST_NORMAL = np.float32(2.0**-126)
CANONICAL_NAN = np.uint32(0x7FFFFFFF)  # what hardware writes for any NaN result


def flush(x: Floats) -> Floats:
    """Subnormals become zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def saturate(x: Floats) -> Floats:
    """Into [0, 1]; NaN becomes +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The rounded sum and its exact error, float64."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def to_float32(s: Floats, error: Floats, mode: str) -> Floats:
    """The exact value s + error (float64, |error| at most half an ulp of s), rounded once to float32."""
    if mode == "rn":
        return _to_odd(s, error).astype(np.float32)
    y = s.astype(np.float32)
    above = (y - s) - error  # exact: y is close to s
    down = np.nextafter(y, np.float32(-np.inf))
    up = np.nextafter(y, np.float32(np.inf))
    finite = np.isfinite(s)
    if mode == "rm":
        return np.where(finite & (above > 0), down, y)
    if mode == "rp":
        return np.where(finite & (above < 0), up, y)
    towards_zero = np.where(s > 0, np.where(above > 0, down, y), np.where(above < 0, up, y))
    return np.where(finite, towards_zero, y)


def _to_odd(s: Floats, error: Floats) -> Floats:
    """s with its last bit made to tell that an error is left: rounding again then gives the right answer."""
    bits = s.view(np.int64)
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    towards_larger = (error > 0) == (s > 0)
    return np.where(inexact, bits + np.where(towards_larger, 1, -1), bits).view(np.float64)


MIDPOINT, FRACTION_BELOW = np.uint64(1 << 28), np.uint64((1 << 29) - 1)  # bits of a float64 below a float32's last one


def fma(a: Floats, b: Floats, c: Floats, mode: str = "rn") -> Floats:
    """a * b + c of float32, rounded once."""
    p = a.astype(np.float64) * b
    c = c.astype(np.float64)
    s = p + c
    if mode == "rn":
        y = s.astype(np.float32)
        risky = (s.view(np.uint64) & FRACTION_BELOW) == MIDPOINT  # rounding twice goes wrong only at a tie
        risky |= np.abs(y) <= SMALLEST_NORMAL  # ... which lies elsewhere for subnormal results
        if not risky.any():
            return y
    return _sum(p, c, mode)


def _sum(a: Floats, b: Floats, mode: str) -> Floats:
    """a + b of float64, rounded once to float32."""
    y = to_float32(*two_sum(a, b), mode)
    if mode == "rm":  # where terms cancel, zero is negative
        y = np.where((a + b == 0) & (np.signbit(a) | np.signbit(b)), np.float32(-0.0), y)
    return y


def directed(function: Callable[[Floats, Floats], Floats], mode: str) -> Callable[[Floats, Floats], Floats]:
    """np.add, np.subtract or np.multiply of float32 with a rounding mode."""
    if mode == "rn":
        return function

    def rounded(a: Floats, b: Floats) -> Floats:
        a, b = a.astype(np.float64), b.astype(np.float64)
        if function is np.multiply:
            return to_float32(a * b, np.zeros_like(a), mode)
        return _sum(a, -b if function is np.subtract else b, mode)

    return rounded


def bf16_value(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 patterns as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 rounded to bfloat16 patterns, to nearest even; NaN becomes 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    is_nan = np.isnan(x)
    return (np.where(is_nan, np.uint32(0x7FFF), rounded) if is_nan.any() else rounded).astype(np.uint16)
