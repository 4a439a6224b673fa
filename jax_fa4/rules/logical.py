"""Operands as a kernel's call takes them: kv heads behind the batch axes, in every array that XLA may split.

What a call's arrays have in common with q, k and v there is materialised where it is small (a number or a row a
sequence), since XLA gives all operands one sharding of their leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_fa4.configs import BackwardConfig, DecodeConfig, GroupedSm100Config, KernelConfig
from jax_fa4.operands import Operands
from jax_fa4.plan.axes import Axes
from jax_fa4.rules.segments import key_blocks

__all__ = ["dense_operand", "from_query_heads", "logical", "paged", "query_heads", "sequence_operand", "undo_logical"]


def logical(name: str, x: Operands, config: KernelConfig | BackwardConfig | DecodeConfig) -> jax.Array:
    """One operand of the call; the call's layout undoes the transposition of q, k and v."""
    group = x.q.shape[-2] // x.k.shape[-2] if x.k.shape[-2] else 1
    match name:
        case "qkv":
            assert x.qkv is not None, "the spec is fused"
            return jnp.expand_dims(jnp.moveaxis(x.qkv, (-2, -3), (-4, -3)), -2)
        case "q":
            return query_heads(x.q, group)
        case "k" | "v":
            return jnp.moveaxis(getattr(x, name), -2, -3)
        case "softmax_scale" | "window_left" | "window_right" | "softcap":
            return getattr(x, name)
        case "sinks":
            assert x.sinks is not None, "the kernel was compiled with sinks"
            sinks = jnp.broadcast_to(x.sinks, (*x.batch, x.q.shape[-2])).astype(jnp.float32)
            return sinks.reshape(*x.batch, x.k.shape[-2], group)
        case "key_blocks":
            assert x.q_segment_ids is not None, "the kernel was compiled with segments"
            assert x.kv_segment_ids is not None, "ids come in pairs"
            assert not isinstance(config, DecodeConfig), "which takes no segments"
            q_ids = x.q_segment_ids
            if isinstance(config, GroupedSm100Config):  # a tile's rows are those of all heads of a group
                q_ids = jnp.repeat(q_ids, group, axis=-1)
            blocks = key_blocks(q_ids, x.kv_segment_ids, tile_m=config.tile_m, tile_n=config.tile_n)
            return _for_kv_heads(blocks, x)
        case "query_blocks":
            assert x.q_segment_ids is not None, "the kernel was compiled with segments"
            assert x.kv_segment_ids is not None, "ids come in pairs"
            assert not isinstance(config, DecodeConfig), "which takes no segments"
            blocks = key_blocks(x.kv_segment_ids, x.q_segment_ids, tile_m=config.tile_n, tile_n=config.tile_m)
            return _for_kv_heads(blocks, x)
        case _:
            return _for_kv_heads(getattr(x, name), x)


def paged(name: str, a: jax.Array, x: Operands, *, splits: bool) -> jax.Array:
    """An operand of a call whose keys lie in pages, from that of `logical`: kv heads come before the batch.

    The table, offsets and lengths of packed queries have kv heads only where XLA splits the call and so wants them in
    all arrays.
    """
    match name:
        case "k" | "v":
            return jnp.moveaxis(getattr(x, name), -2, 0)
        case "page_table" if not splits:
            assert x.page_table is not None, "keys are in pages"
            return jnp.broadcast_to(x.page_table, (*x.batch, x.page_table.shape[-1]))
        case "cu_seqlens_q" | "q_lengths" | "kv_lengths" if not splits and x.cu_seqlens_q is not None:
            return jnp.asarray(getattr(x, name))  # of the one batch entry
        case _:
            return jnp.moveaxis(a, 0, 1) if a.ndim else a


def dense_operand(a: jax.Array, x: Operands, *, splits: bool) -> tuple[jax.Array, Axes]:
    """A mask or a bias [*B, N, T, S], 1 in place of any axis but S, and its axes.

    Where XLA splits the call it gets all batch entries and heads, so that a device has its own. Otherwise nothing is
    copied, but for an array that has some batch axes and lacks others.
    """
    *_, t, heads, _ = x.q.shape
    lead, (n, rows, keys) = a.shape[:-3], a.shape[-3:]
    row = "t" if rows == t else "z"
    if splits:
        kv_heads = x.k.shape[-2]
        a = jnp.broadcast_to(a, (*x.batch, heads, rows, keys))
        return a.reshape(*x.batch, kv_heads, heads // kv_heads, rows, keys), Axes(f"kg{row}s", f"kg{row}s")
    one = all(size == 1 for size in lead)
    if not one and lead != x.batch:
        a = jnp.broadcast_to(a, (*x.batch, n, rows, keys))
    letters = ("x" if one else "b") + ("n" if n == heads else "y") + row + "s"
    return a.reshape(1 if one else math.prod(x.batch), n, rows, keys), Axes(letters, letters, batched=False)


def sequence_operand(a: jax.Array, x: Operands, axes: Mapping[bool, Axes], *, splits: bool) -> tuple[jax.Array, Axes]:
    """Offsets or lengths of packed sequences [*B, ...], 1 in place of any batch axis, and their axes."""
    if splits:
        return _for_kv_heads(a, x), axes[True]
    a = jnp.broadcast_to(a, (*x.batch, a.shape[-1]))
    return a.reshape(math.prod(x.batch), a.shape[-1]), axes[False]


def undo_logical(name: str, a: jax.Array) -> jax.Array:
    """The gradient of q, k, v or a fused array from the call's result, in the array's own order."""
    match name:
        case "qkv":
            return jnp.moveaxis(jnp.squeeze(a, -2), (-4, -3), (-2, -3))
        case "q":
            return from_query_heads(a)
        case _:
            return jnp.moveaxis(a, -3, -2)


def from_query_heads(a: jax.Array) -> jax.Array:
    """[*B, K, T, G, D] to [*B, T, N, D]."""
    *lead, k, t, group, dim = a.shape
    return jnp.moveaxis(a, -4, -3).reshape(*lead, t, k * group, dim)


def query_heads(a: jax.Array, group: int) -> jax.Array:
    """[*B, T, N, D] to [*B, K, T, G, D]."""
    *lead, n, dim = a.shape
    return jnp.moveaxis(a.reshape(*lead, n // group, group, dim), -3, -4)


def _for_kv_heads(a: jax.Array, x: Operands) -> jax.Array:
    """[*B, ...], 1 in place of any batch axis, to [*B, K, ...]."""
    tail = a.shape[len(x.batch) :]
    return jnp.broadcast_to(jnp.expand_dims(a, len(x.batch)), (*x.batch, x.k.shape[-2], *tail))
