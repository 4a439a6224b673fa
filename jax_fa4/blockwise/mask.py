"""Which keys a query may see: every bound of a call, as one boolean block of the score matrix."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.heads import per_batch, split_bias_heads
from jax_fa4.blockwise.keys import KeyBlocks
from jax_fa4.operands import Operands

__all__ = ["padded_rows", "seen_keys", "visible"]

DIAGONAL_LIMIT = 1 << 30  # offsets are clamped to it: key - query - offset then never wraps around in int32


def visible(x: Operands, blocks: KeyBlocks, first: jax.Array) -> jax.Array | None:
    """[*B, K, G, T, keys] or 1 in place of an axis, for the keys of a block; None where nothing is hidden."""
    queries = jnp.arange(x.q.shape[-3], dtype=jnp.int32)[:, None]
    keys = blocks.keys(first)
    conditions = []
    if blocks.overlap:
        conditions.append(keys >= first)
    if x.q_lengths is not None:
        conditions.append(queries < per_batch(x.q_lengths))
    if x.kv_lengths is not None:
        conditions.append(keys < per_batch(x.kv_lengths))
    if x.window_left is not None or x.window_right is not None:
        distance = keys - queries - _diagonal(x)
        if x.window_left is not None:
            conditions.append(distance >= -per_batch(x.window_left))
        if x.window_right is not None:
            conditions.append(distance <= per_batch(x.window_right))
    if x.q_segment_ids is not None and x.kv_segment_ids is not None:
        kv_segment_ids = blocks.slice(x.kv_segment_ids, first, axis=-1)
        conditions.append(x.q_segment_ids[..., None, None, :, None] == kv_segment_ids[..., None, None, None, :])
    if x.mask is not None:
        conditions.append(split_bias_heads(blocks.slice(x.mask, first, axis=-1), x))
    if not conditions:
        return None
    see = functools.reduce(operator.and_, conditions)
    return see.reshape(*[1] * (x.q.ndim + 1 - see.ndim), *see.shape)


def seen_keys(visible: jax.Array) -> jax.Array:
    """[*B, keys, K, 1]: whether any query sees the key. The others may be unused memory, and 0 * NaN is NaN."""
    return jnp.swapaxes(visible.any(axis=(-3, -2)), -1, -2)[..., None]


def padded_rows(x: Operands) -> jax.Array | None:
    """[*B, 1, 1, T]: whether a query lies at or beyond q_lengths; None without lengths."""
    if x.q_lengths is None:
        return None
    return jnp.arange(x.q.shape[-3], dtype=jnp.int32) >= x.q_lengths[..., None, None, None]


def _diagonal(x: Operands) -> jax.Array:
    """Key index that query 0 is aligned with: given, or such that the last query sees the last key."""
    if x.q_offset is not None:
        return per_batch(jnp.clip(x.q_offset, -DIAGONAL_LIMIT, DIAGONAL_LIMIT))
    q_lengths = jnp.int32(x.q.shape[-3]) if x.q_lengths is None else x.q_lengths
    kv_lengths = jnp.int32(x.k.shape[-3]) if x.kv_lengths is None else x.kv_lengths
    return per_batch(kv_lengths - q_lengths)
