"""Which keys a query may see: every bound of a call, as one boolean block of the score matrix."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.blockwise.heads import split_bias_heads
from jax_fa4.blockwise.packed import places
from jax_fa4.operands import Operands

__all__ = ["Spans", "if_seen", "padded_rows", "seen_keys", "spans", "visible"]

R = TypeVar("R")
DIAGONAL_LIMIT = 1 << 30  # offsets are clamped to it: sums with indices then never wrap around in int32


class Spans(NamedTuple):
    """The keys from `first` to before `end` are all that a query may see, [*B, T] int32 or 1 in place of an axis."""

    first: jax.Array
    end: jax.Array  # at or before `first` where there is none


def spans(x: Operands) -> Spans | None:
    """What lengths, causal, windows and packed sequences leave of the keys; None where they leave all of them."""
    queries, seqlen_k = jnp.arange(x.q.shape[-3], dtype=jnp.int32), jnp.int32(x.seqlen_k)
    if x.cu_seqlens_q is not None:
        first, end, diagonal, _ = places(x)
    else:
        if all(bound is None for bound in (x.window_left, x.window_right, x.q_lengths, x.kv_lengths)):
            return None
        first, diagonal = jnp.int32(0), queries + _offset(x)
        end = seqlen_k if x.kv_lengths is None else x.kv_lengths[..., None]
        if x.q_lengths is not None:
            end = jnp.where(queries < x.q_lengths[..., None], end, 0)
    if x.window_left is not None:
        first = jnp.maximum(first, diagonal - jnp.minimum(_per_row(x.window_left), diagonal))
    if x.window_right is not None:
        end = jnp.minimum(end, diagonal + 1 + jnp.minimum(_per_row(x.window_right), seqlen_k - 1 - diagonal))
    return Spans(*(jnp.atleast_1d(bound) for bound in (first, end)))


def if_seen(
    x: Operands,
    within: Spans | None,
    blocks: Blocks,
    first: jax.Array,
    run: Callable[[], R],
    otherwise: Callable[[], R],
) -> R:
    """run(), but otherwise() at run time where no query sees the block, for operands that make this likely.

    Dense operands are never asked: the answer is one for the whole batch, which may be sharded.
    """
    if within is None or (x.cu_seqlens_q is None and x.page_table is None):
        return run()
    start = blocks.start(first)
    seen = jnp.maximum(within.first, start) < jnp.minimum(within.end, start + blocks.size)
    result: R = jax.lax.cond(seen.any(), run, otherwise)
    return result


def visible(x: Operands, within: Spans | None, blocks: Blocks, first: jax.Array) -> jax.Array | None:
    """[*B, K, G, T, keys] or 1 in place of an axis, for the keys of a block; None where nothing is hidden."""
    keys = blocks.indices(first)
    conditions = []
    if blocks.overlap:
        conditions.append(keys >= first)
    if within is not None:
        from_, end = (bound[..., None, None, :, None] for bound in within)
        conditions += [keys >= from_, keys < end]
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
    """[*B, 1, 1, T]: whether a query is padding; None where none can be."""
    if x.cu_seqlens_q is not None:
        return places(x).padded[..., None, None, :]
    if x.q_lengths is None:
        return None
    return jnp.arange(x.q.shape[-3], dtype=jnp.int32) >= x.q_lengths[..., None, None, None]


def _offset(x: Operands) -> jax.Array:
    """Key index that query 0 is aligned with, [*B, 1] or []: given, or such that the last query sees the last key."""
    if x.q_offset is not None:
        return jnp.clip(x.q_offset, -DIAGONAL_LIMIT, DIAGONAL_LIMIT)[..., None]
    q_lengths = jnp.int32(x.q.shape[-3]) if x.q_lengths is None else x.q_lengths[..., None]
    kv_lengths = jnp.int32(x.seqlen_k) if x.kv_lengths is None else x.kv_lengths[..., None]
    return kv_lengths - q_lengths


def _per_row(a: jax.Array) -> jax.Array:
    """[*B] to [*B, 1], which broadcasts to queries; a scalar stays one."""
    return a[..., None] if a.ndim else a
