"""`attention_qkv`: attention of queries, keys and values that one projection has put into one array."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_fa4 import api, checks, options
from jax_fa4.operands import Operands

__all__ = ["attention_qkv"]


class Options(options.Options, total=False):
    """Options of `attention_qkv` that don't change how many results it has: those of `attention`, but for layout."""

    q_offset: int | ArrayLike | None
    bias: ArrayLike | None
    mask: ArrayLike | None
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    kv_lengths: ArrayLike | None
    deterministic: bool


@overload
def attention_qkv(qkv: ArrayLike, *, return_lse: Literal[False] = False, **others: Unpack[Options]) -> jax.Array: ...


@overload
def attention_qkv(
    qkv: ArrayLike, *, return_lse: Literal[True], **others: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_qkv(
    qkv: ArrayLike, *, return_lse: bool, **others: Unpack[Options]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention_qkv(
    qkv: ArrayLike, *, return_lse: bool = False, **others: Unpack[Options]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` of the three parts of one array; a GPU kernel reads them where they lie.

    Slices of a fused array are copied before a call that takes three arrays; here nothing is, and the gradient is one
    array as well.

    Args:
      qkv: [*batch, T, 3, N, D] float16, bfloat16, float32 or float64: the queries, keys and values of N heads. T
        tokens, D head dim, a multiple of 8 up to 256.
      return_lse: True also returns the logarithm of each row's sum of exponentials.
      **others: options of `attention`, where T is the number of queries and of keys; all but `layout`.

    Returns:
      out [*batch, T, N, D]; with return_lse (out, lse), where lse is [*batch, N, T]. As from `attention`.

    Raises:
      TypeError: an argument has the wrong type or dtype, or there is no such option; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.
      NotImplementedError: implementation="kernel" or "emulate" where there is no kernel; raised when the program is
        lowered.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fa4 import attention, attention_qkv
      >>> qkv = jax.random.normal(jax.random.key(0), (2, 5, 3, 4, 16))  # 5 tokens, 4 heads
      >>> out = attention_qkv(qkv, causal=True)
      >>> q, k, v = (qkv[:, :, i] for i in range(3))
      >>> bool(jnp.allclose(out, attention(q, k, v, causal=True), atol=1e-6))
      True
    """
    checks.names("option of attention_qkv", others, Options.__annotations__)
    checks.choice("implementation", others.get("implementation"), (None, "kernel", "xla", "emulate"))
    return_lse = checks.flag("return_lse", return_lse)
    qkv = checks.fused(checks.array("qkv", qkv))
    q, k, v = (qkv[..., i, :, :] for i in range(3))
    scale = options.scale(others.pop("softmax_scale", None), q)
    out, lse = api.attend(Operands(q, k, v, scale, qkv=qkv), **others)
    return (out, lse) if return_lse else out
