"""Options that all calls of attention have: their types, and how they become operands."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fa4 import checks
from jax_fa4.operands import Operands
from jax_fa4.spec import Implementation

__all__ = ["Options", "Window", "scale", "softmax_dtype", "with_softmax_changes", "with_window"]

LARGEST_SOFTCAP = 1e30  # so that no score that matters, divided by it, is too small for float32
LARGEST_SINK = 2.3e38  # so that softmax in powers of 2, which multiplies by log2(e), stays finite in float32
Window = tuple[int | ArrayLike | None, int | ArrayLike | None]


class Options(TypedDict, total=False):
    """Options that don't change how many results a call has."""

    softmax_scale: float | ArrayLike | None
    causal: bool
    window: Window | None
    softcap: float | ArrayLike | None
    sinks: ArrayLike | None
    q_lengths: ArrayLike | None
    implementation: Implementation | None


def scale(value: Any, q: jax.Array) -> jax.Array:
    """The scale as an operand, 1 / sqrt(D) for None."""
    dtype = softmax_dtype(q)
    scale = 1 / math.sqrt(q.shape[-1]) if value is None else checks.positive("softmax_scale", value, dtype)
    return jnp.asarray(scale, dtype)


def softmax_dtype(q: jax.Array) -> Any:
    """What scale, cap and sinks are in."""
    return jnp.float64 if q.dtype == jnp.float64 else jnp.float32


def with_window(x: Operands, causal: bool, window: Any) -> Operands:
    """Adds the bounds of causal and window; causal is a right bound of 0."""
    left, right = checks.window(window)
    right = 0 if causal else right
    return x._replace(
        window_left=None if left is None else jnp.asarray(left, jnp.int32),
        window_right=None if right is None else jnp.asarray(right, jnp.int32),
    )


def with_softmax_changes(x: Operands, softcap: Any, sinks: Any) -> Operands:
    """Adds softcap and sinks."""
    dtype = softmax_dtype(x.q)
    if softcap is not None:
        softcap = checks.positive("softcap", softcap, dtype)
        if isinstance(softcap, float):
            softcap = jnp.asarray(min(softcap, LARGEST_SOFTCAP), dtype)
        else:
            softcap = jnp.minimum(softcap.astype(dtype), LARGEST_SOFTCAP)
    if sinks is not None:
        sinks = jnp.minimum(checks.sinks(sinks, x.batch, x.q.shape[-2]).astype(dtype), LARGEST_SINK)
    return x._replace(softcap=softcap, sinks=sinks)
