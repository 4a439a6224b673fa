"""`dot_product_attention` as in `jax.nn`: the same signature, so that one import swaps the implementation."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fa4 import checks
from jax_fa4.api import attention
from jax_fa4.options import softmax_dtype

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention with `jax.nn.dot_product_attention`'s arguments and results.

    Shape letters: B batch, T queries, S keys, N query heads, K kv heads (N a multiple of K), H head dim, E head dim of
    value. The leading axis B is optional.

    As in `jax.nn`, and unlike `jax_fa4.attention`, queries and keys are aligned at their starts: for `is_causal` and
    `local_window_size` query i stands at key i, also where T and S or the lengths differ.

    What differs from `jax.nn`: a query that sees no key gets 0 and residual -inf, where `jax.nn` gives the mean of all
    values and a large negative number (queries at or beyond their length are 0 in both). E may differ from H, and there
    may be several axes B. The residual is computed in float32 before it is rounded.

    Args:
      query: [B, T, N, H] or [T, N, H] float16, bfloat16, float32 or float64; H up to 256.
      key: [B, S, K, H] or [S, K, H], query's dtype.
      value: [B, S, K, E] or [S, K, E], query's dtype.
      bias: a floating dtype, broadcasts to [B, N, T, S]: added to the scaled scores. Differentiable.
      mask: bool, broadcasts to [B, N, T, S]: True where the key is visible.
      scale: what scores are multiplied by, a number > 0; None is 1 / sqrt(H).
      is_causal: True hides the keys after query i's key i.
      query_seq_lengths: integers [B] from 0 to T: queries at or beyond it are padding.
      key_value_seq_lengths: integers [B] from 0 to S: keys at or beyond it are padding.
      local_window_size: (left, right) or one number for both: query i sees keys i - left to i + right.
      implementation: "cudnn" asks, as in `jax.nn`, for a GPU kernel or an error: `jax_fa4`'s kernel. "xla" is blockwise
        JAX. None prefers the kernel.
      return_residual: True also returns the logarithm of each row's sum of exponentials.

    Returns:
      out [B, T, N, E] or [T, N, E] in query's dtype; with return_residual (out, residual), where residual is [B, T, N]
      or [T, N] in query's dtype and has no gradient: `jax_fa4.attention` returns one that has.

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.
      NotImplementedError: implementation="cudnn" where there is no kernel; raised when the program is lowered.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fa4 import dot_product_attention
      >>> x = jax.random.normal(jax.random.key(0), (2, 6, 4, 16))
      >>> ours = dot_product_attention(x, x, x, is_causal=True)
      >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(x, x, x, is_causal=True), atol=1e-5))
      True
    """
    operands = {name: checks.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    checks.query_key_value(operands, "BTNH")
    checks.head_dims(operands, step=1)
    checks.choice("implementation", implementation, (None, "xla", "cudnn"))
    causal, return_residual = checks.flag("is_causal", is_causal), checks.flag("return_residual", return_residual)
    q, k, v = operands.values()
    unbatched = q.ndim == 3
    if unbatched:
        q, k, v = q[None], k[None], v[None]
    are_aligned = q.shape[-3] == k.shape[-3] and query_seq_lengths is None and key_value_seq_lengths is None
    out, lse = attention(
        *(_pad_head_dim(x) for x in (q, k, v)),
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else checks.positive("scale", scale, softmax_dtype(q)),
        causal=causal,
        window=_window(local_window_size),
        q_offset=None if are_aligned else 0,  # at the ends as at the starts: one operand less
        bias=bias,
        mask=mask,
        q_lengths=_lengths("query_seq_lengths", query_seq_lengths, q),
        kv_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, k),
        return_lse=True,
        implementation="kernel" if implementation == "cudnn" else implementation,
    )
    out = out[..., : v.shape[-1]]
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(k.dtype))
    if unbatched:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _pad_head_dim(x: jax.Array) -> jax.Array:
    """Zeros up to the next multiple of 8: they change no score, and value's give columns that are cut off again."""
    missing = -x.shape[-1] % 8
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _window(size: Any) -> Any:
    if size is not None and not isinstance(size, tuple | list):
        size = (size, size)
    return checks.window(size, name="local_window_size")


def _lengths(name: str, value: Any, x: jax.Array) -> jax.Array | None:
    return None if value is None else checks.lengths(name, value, x.shape[:-3], x.shape[-3])
