"""How far a result may be from the exact one."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from jax_fa4.testing.cells import np_dtype

__all__ = ["error_bound", "error_ratio"]

NEIGHBOURS = 4096  # elements of an array, such as 32 rows of 128


def error_bound(exact: Any, rounded: Any, dtype: Any, factor: float = 2) -> float:
    """The largest error that a result may have: `factor` times that of `rounded`, plus 2 ulp at the largest value.

    Entries that are infinite in `exact` (lse of empty rows) take no part.
    """
    exact, rounded = np.asarray(exact, np.float64), np.asarray(rounded, np.float64)
    finite = np.isfinite(exact)
    if not finite.any():
        return 0.0
    largest = float(np.abs(exact[finite]).max())
    error = float(np.abs(rounded[finite] - exact[finite]).max())
    return factor * error + 2 * _ulp(largest, dtype)


def error_ratio(got: Any, exact: Any, rounded: Any, dtype: Any, factor: float = 2) -> float:
    """The error of `got` in units of what it may be: that of its largest error to `error_bound`, or more.

    Where results are small everywhere in a tile, as gradients of a causal mask's last keys are, the largest of all
    hides them. So every 4096 neighbouring elements are held to the same bound by their root mean square.
    """
    got, exact, rounded = (np.asarray(array, np.float64).ravel() for array in (got, exact, rounded))
    finite = np.isfinite(exact)
    if not finite.any():
        return 0.0
    got, exact, rounded = got[finite], exact[finite], rounded[finite]
    starts = np.arange(0, got.size, NEIGHBOURS)
    counts = np.diff([*starts, got.size])
    largest = np.maximum.reduceat(np.abs(exact), starts)
    root, rough = (np.sqrt(np.add.reduceat((a - exact) ** 2, starts) / counts) for a in (got, rounded))
    allowed = factor * rough + [2 * _ulp(float(value), dtype) for value in largest]
    whole = float(np.abs(got - exact).max()) / error_bound(exact, rounded, dtype, factor)
    return max(whole, float((root / allowed).max()))


def _ulp(value: float, dtype: Any) -> float:
    """Distance of `dtype`'s neighbours at a positive value."""
    info: Any = ml_dtypes.finfo(np_dtype(dtype))
    binade = 2.0 ** math.floor(math.log2(value)) if value > 0 else 0.0
    return max(float(info.eps) * binade, float(info.smallest_subnormal))
