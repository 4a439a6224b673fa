"""Query heads as (kv head, group): the layout in which scores are computed, [*B, K, G, T, ...].

Batch and kv heads stay axes of their own, so a program whose batch or heads are sharded needs no communication.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa4.operands import Operands

__all__ = [
    "accumulator_dtype",
    "join_heads",
    "join_rows",
    "per_batch",
    "sink_rows",
    "split_bias_heads",
    "split_heads",
    "split_rows",
]


def accumulator_dtype(x: Operands) -> jnp.dtype:
    """Precision of scores, sums and lse: float64 for float64 operands, else float32."""
    return jnp.dtype("float64" if x.q.dtype == jnp.float64 else "float32")


def split_heads(a: jax.Array, kv_heads: int) -> jax.Array:
    """[*B, T, N, D] to [*B, K, G, T, D]."""
    return jnp.moveaxis(a.reshape(*a.shape[:-2], *_split(a.shape[-2], kv_heads), a.shape[-1]), -4, -2)


def join_heads(a: jax.Array) -> jax.Array:
    """[*B, K, G, T, D] to [*B, T, N, D]."""
    a = jnp.moveaxis(a, -2, -4)
    return a.reshape(*a.shape[:-3], a.shape[-3] * a.shape[-2], a.shape[-1])


def split_rows(a: jax.Array, kv_heads: int) -> jax.Array:
    """[*B, N, T] to [*B, K, G, T]."""
    return a.reshape(*a.shape[:-2], *_split(a.shape[-2], kv_heads), a.shape[-1])


def join_rows(a: jax.Array) -> jax.Array:
    """[*B, K, G, T] to [*B, N, T]."""
    return a.reshape(*a.shape[:-3], a.shape[-3] * a.shape[-2], a.shape[-1])


def split_bias_heads(a: jax.Array, x: Operands) -> jax.Array:
    """[*B, N or 1, T or 1, keys] to [*B, K or 1, G or 1, T or 1, keys]."""
    split = (1, 1) if a.shape[-3] == 1 else _split(a.shape[-3], x.k.shape[-2])
    return a.reshape(*a.shape[:-3], *split, *a.shape[-2:])


def sink_rows(sinks: jax.Array, x: Operands) -> jax.Array:
    """[*B, N] to [*B, K, G, T] in accumulator precision: a sink is a score of every row of its head."""
    shape = *x.batch, *_split(x.q.shape[-2], x.k.shape[-2]), x.q.shape[-3]
    return jnp.broadcast_to(split_rows(sinks[..., None], x.k.shape[-2]), shape).astype(accumulator_dtype(x))


def per_batch(a: jax.Array) -> jax.Array:
    """[*B] to [*B, 1, 1, 1, 1], which broadcasts to scores; a scalar stays one."""
    return a.reshape(*a.shape, 1, 1, 1, 1) if a.ndim else a


def _split(q_heads: int, kv_heads: int) -> tuple[int, int]:
    return kv_heads, q_heads // kv_heads if kv_heads else 1
