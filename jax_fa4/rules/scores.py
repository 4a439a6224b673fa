"""Gradients of what the scores depend on beside q and k, from numbers that the backward kernels leave behind."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_fa4.operands import Operands
from jax_fa4.rules.logical import dense_operand, query_heads
from jax_fa4.sequences import sequence_of

__all__ = ["delta_of", "of_bias", "of_scale", "of_sinks", "of_softcap"]


def of_scale(x: Operands, dq_sum: jax.Array, tile_m: int) -> jax.Array:
    """In the scale's shape, from dq before it is scaled: float32 in tiles of `tile_m` queries as kernels add it."""
    dq = _from_tiles(dq_sum)[..., : x.q.shape[-1]]
    if x.cu_seqlens_q is None:
        dq = dq[..., : x.q.shape[-3], :]
    else:
        rows = jnp.broadcast_to(_slot_rows(x.cu_seqlens_q, x.q.shape[-3], tile_m), (*x.batch, x.q.shape[-3]))
        dq = jnp.take_along_axis(dq, rows[..., None, None, :, None], axis=-2)
    q = query_heads(x.q, dq_sum.shape[-3]).swapaxes(-2, -3).astype(dq.dtype)
    terms = jnp.where(dq == 0, 0, dq * q)  # a query that sees no key may be NaN
    return _sum_to(x.softmax_scale, terms).astype(x.softmax_scale.dtype)


def of_softcap(x: Operands, parts: jax.Array) -> jax.Array:
    """In the cap's shape, from what CTAs have summed [*B, K, G, tiles]."""
    assert x.softcap is not None, "its gradient was asked for"
    return _sum_to(x.softcap, parts)


def _sum_to(scalar: jax.Array, terms: jax.Array) -> jax.Array:
    """The sum of terms [*B, ...] for each of the values of a scalar: [], or with all batch axes, some of size 1."""
    if not scalar.ndim:
        return terms.sum()
    own = terms.sum(axis=tuple(range(scalar.ndim, terms.ndim)))
    return own.sum(axis=tuple(i for i, size in enumerate(scalar.shape) if size == 1), keepdims=True)


@functools.partial(jnp.vectorize, excluded=(1, 2), signature="(i)->(t)")
def _slot_rows(cu_seqlens: jax.Array, q_len: int, tile_m: int) -> jax.Array:
    """[T] int32: where queries of packed sequences lie in what has a place for each of their tiles of `tile_m`.

    Those places are what kernels/core/packed.py says.
    """
    rows = jnp.arange(q_len, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), cu_seqlens.astype(jnp.int32)])
    number = sequence_of(rows, begins)  # rows before the first offset count as a sequence, too
    first = begins[number]
    slot = first // tile_m + number + (rows - first) // tile_m
    return slot * tile_m + (rows - first) % tile_m


def _from_tiles(dq_sum: jax.Array) -> jax.Array:
    """[*B, K, G, P, W] from tiles of slabs of 64 queries of blocks j of [warp w, l, t, h, p].

    That is query 16 w + 8 h + l, column 8 j + 2 t + p of a slab.
    """
    *heads, padded, columns = dq_sum.shape
    slabs = dq_sum.reshape(*heads, padded // 64, columns // 8, 4, 8, 4, 2, 2)
    order = [0, 2, 5, 3, 1, 4, 6]  # slab, w, h, l, j, t, p
    lead = len(heads)
    return slabs.transpose(*range(lead), *(lead + axis for axis in order)).reshape(*heads, padded, columns)


def of_bias(x: Operands, made: Mapping[str, jax.Array], *, splits: bool) -> jax.Array:
    """In the shape of the bias, from the results of a call: those of its own elements, or a row a head [*B, K, G, S].

    What the bias was broadcast to for the call is summed in float32.
    """
    assert x.bias is not None, "its gradient was asked for"
    bias = jax.ShapeDtypeStruct(x.bias.shape, jnp.float32)
    if "dbias" in made:
        cotangent, broadcast = made["dbias"], lambda a: dense_operand(a, x, splits=splits)[0]
    else:
        rows = (*x.batch, x.q.shape[-2], 1, x.seqlen_k)
        cotangent, broadcast = made["dbias_rows"].reshape(rows), lambda a: jnp.broadcast_to(a, rows)
    (gradient,) = jax.linear_transpose(broadcast, bias)(cotangent.astype(jnp.float32))
    return gradient.astype(x.bias.dtype)


def delta_of(out: jax.Array, dout: jax.Array, dlse: jax.Array) -> jax.Array:
    """[*B, K, G, T] float32 from out and dout [*B, K, T, G, E] and dlse [*B, K, G, T]."""
    products = out.astype(dlse.dtype) * dout.astype(dlse.dtype)
    return products.sum(axis=-1).swapaxes(-1, -2) - dlse


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
