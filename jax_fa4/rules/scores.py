"""Gradients of what the scores depend on beside q and k, from numbers that the backward kernels leave behind."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa4.operands import Operands
from jax_fa4.rules.logical import query_heads

__all__ = ["of_scale", "of_sinks"]


def of_scale(x: Operands, dq_sum: jax.Array) -> jax.Array:
    """[] from dq before it is scaled, [*B, K, G, T, W] float32 with columns as the kernel adds them.

    Places 16 j + 4 t + 2 h + p of a row are columns 16 j + 8 h + 2 t + p.
    """
    *rows, columns = dq_sum.shape
    dq = jnp.swapaxes(dq_sum.reshape(*rows, columns // 16, 4, 2, 2), -3, -2).reshape(*rows, columns)
    dq = dq[..., : x.q.shape[-1]]
    q = query_heads(x.q, rows[-2]).swapaxes(-2, -3).astype(dq.dtype)
    terms = jnp.where(dq == 0, 0, dq * q)  # a query that sees no key may be NaN
    return terms.sum().astype(x.softmax_scale.dtype)


def of_sinks(x: Operands, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """In the shape of the sinks, from statistics [*B, K, G, T]: a row's sink gets -delta times its share of the row."""
    assert x.sinks is not None, "its gradient was asked for"
    *batch, kv_heads, group, _ = lse.shape
    heads = (*batch, kv_heads * group)
    sinks, pullback = jax.vjp(lambda sinks: jnp.broadcast_to(sinks, heads).reshape(*batch, kv_heads, group), x.sinks)
    share = jnp.exp(sinks[..., None].astype(lse.dtype) - lse)
    live = ~jnp.isneginf(lse)
    (gradient,) = pullback(-jnp.where(live, share * delta, 0).sum(axis=-1).astype(sinks.dtype))
    return gradient
