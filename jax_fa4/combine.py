"""`combine`: the attention of all keys, from that of parts of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fa4 import checks
from jax_fa4.spec import Layout

__all__ = ["combine"]


def combine(outs: ArrayLike, lses: ArrayLike, *, layout: Layout = "BTNH") -> tuple[jax.Array, jax.Array]:
    """Merges results of the same queries and different keys, as of splits of a sequence or of devices that hold one.

    Shape letters: P parts, *batch any number of batch axes (also none), T queries, N query heads, E head dim of v.

    A part whose lse is -inf has seen no key and takes no part, whatever its out holds, even NaN; a query without any
    key gets out 0, lse -inf and gradients of exactly 0. Sinks belong to one part only. The order of parts changes
    nothing but rounding. Computed in float32, in float64 for float64 outs.

    Args:
      outs: [P, *batch, T, N, E] float16, bfloat16, float32 or float64: the parts' out. Differentiable.
      lses: [P, *batch, N, T], a floating dtype: their lse, natural logarithm. Differentiable.
      layout: "BTNH", the order above, or "BNTH": outs are [P, *batch, N, T, E].

    Returns:
      (out, lse): out [*batch, T, N, E] in outs' dtype and layout, lse [*batch, N, T] in float32 or float64.

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fa4 import attention, combine
      >>> x = jax.random.normal(jax.random.key(0), (8, 4, 16))
      >>> parts = [attention(x, part, part, return_lse=True) for part in (x[:3], x[3:])]
      >>> out, lse = combine(*map(jnp.stack, zip(*parts)))
      >>> bool(jnp.allclose(out, attention(x, x, x), atol=1e-6))
      True
    """
    checks.choice("layout", layout, ("BTNH", "BNTH"))
    outs, lses = checks.array("outs", outs), checks.array("lses", lses)
    checks.parts(outs, lses, layout)
    dtype = jnp.float64 if outs.dtype == jnp.float64 else jnp.float32
    lses = lses.astype(dtype)
    has_keys = ~jnp.isneginf(lses)
    parts = jnp.where(_as_out(has_keys, layout), outs.astype(dtype), 0)
    largest = jax.lax.stop_gradient(lses.max(axis=0, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isneginf(largest), 0, largest)  # exp(-inf - 0) is 0, not NaN
    weights = jnp.where(has_keys, jnp.exp(jnp.where(has_keys, lses, 0) - largest), 0)
    weight_sum = weights.sum(axis=0, keepdims=True)
    is_empty = weight_sum == 0
    divisor = jnp.where(is_empty, 1, weight_sum)
    lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(divisor))
    out = (_as_out(weights / divisor, layout) * parts).sum(axis=0)
    return out.astype(outs.dtype), lse[0]


def _as_out(rows: jax.Array, layout: Layout) -> jax.Array:
    """[P, *batch, N, T] to out's axes, with 1 in place of E."""
    return (jnp.swapaxes(rows, -1, -2) if layout == "BTNH" else rows)[..., None]
