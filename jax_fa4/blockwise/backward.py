"""Attention backward in plain JAX: a scan over key blocks that recomputes the weights from lse."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.heads import accumulator_dtype, join_heads, sink_rows, split_heads, split_rows
from jax_fa4.blockwise.keys import KeyBlocks
from jax_fa4.blockwise.rows import Results, forward_rows, sink_weights
from jax_fa4.blockwise.scores import ScoreInputs, contract, key_block, own_settings, scaled_queries, scores
from jax_fa4.operands import Operands

__all__ = ["backward"]


class Sums(NamedTuple):
    """Gradients that every key block adds to."""

    q: jax.Array  # [*B, K, G, T, D], of the scaled queries
    softcap: jax.Array | None


class Keys(NamedTuple):
    """Gradients of one key block alone."""

    k: jax.Array  # [*B, keys, K, D]
    v: jax.Array  # [*B, keys, K, E]
    bias: jax.Array | None


@own_settings
def backward(x: Operands, saved: Results, cotangents: Results, wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """Cotangents of the operands named in `wrt` (q, k and v among them), with the operands' shapes and dtypes.

    Rows without a visible key, queries beyond q_lengths and keys beyond kv_lengths get exact zeros.
    """
    dtype, kv_heads = accumulator_dtype(x), x.k.shape[-2]
    blocks = KeyBlocks.of(x.k.shape[-3])
    rows = forward_rows(x, saved)
    live = rows.live[..., None]
    dout = jnp.where(live, split_heads(cotangents.out, kv_heads).astype(dtype), 0)
    dlse = jnp.where(rows.live, split_rows(cotangents.lse, kv_heads), 0)
    delta = (rows.out * dout).sum(axis=-1) - dlse
    live_q = jnp.where(live, split_heads(x.q, kv_heads).astype(dtype), 0)
    q, unscale = jax.vjp(scaled_queries, live_q, x.softmax_scale)

    @jax.checkpoint  # for second order: keeps no [T, keys] array of a block
    def block_gradients(first: jax.Array) -> tuple[ScoreInputs, jax.Array]:
        block = key_block(x, blocks, first)
        s, pullback = jax.vjp(lambda of: scores(of, block.visible), ScoreInputs(q, block.k, x.softcap, block.bias))
        p = jnp.exp(s - rows.lse[..., None])
        dp = contract("...kgte,...ske->...kgts", dout, block.v)
        (of_scores,) = pullback(p * (dp - delta[..., None]))
        return of_scores, contract("...kgts,...kgte->...ske", p, dout)

    def step(sums: Sums, first: jax.Array) -> tuple[Sums, Keys]:
        of_scores, dv = block_gradients(first)
        softcap = None if sums.softcap is None else sums.softcap + of_scores.softcap
        keys = Keys(of_scores.k, dv, of_scores.bias if "bias" in wrt else None)
        return Sums(sums.q + of_scores.q, softcap), keys

    zeros = Sums(jnp.zeros_like(q), jnp.zeros_like(x.softcap) if x.softcap is not None and "softcap" in wrt else None)
    sums, keys = jax.lax.scan(step, zeros, blocks.firsts)
    dq, dscale = unscale(sums.q)
    gradients = {
        "q": join_heads(dq),
        "k": blocks.join(keys.k, axis=-3),
        "v": blocks.join(keys.v, axis=-3),
        "softmax_scale": dscale,
        "softcap": sums.softcap,
    }
    if x.bias is not None and keys.bias is not None:
        gradients["bias"] = blocks.join(keys.bias, axis=-1).reshape(x.bias.shape)
    if "sinks" in wrt:
        sinks, pullback = jax.vjp(lambda sinks: sink_rows(sinks, x), x.sinks)
        (gradients["sinks"],) = pullback(-sink_weights(sinks, rows) * delta)
    return tuple(gradients[name].astype(getattr(x, name).dtype) for name in wrt)
