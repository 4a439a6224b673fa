"""How far a result may be from the exact one."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from jax_fa4.testing.cells import np_dtype

__all__ = ["error_bound"]


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


def _ulp(value: float, dtype: Any) -> float:
    """Distance of `dtype`'s neighbours at a positive value."""
    info: Any = ml_dtypes.finfo(np_dtype(dtype))
    binade = 2.0 ** math.floor(math.log2(value)) if value > 0 else 0.0
    return max(float(info.eps) * binade, float(info.smallest_subnormal))
