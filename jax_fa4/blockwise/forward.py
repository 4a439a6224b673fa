"""Attention forward in plain JAX: a scan over key blocks with an online softmax, and no array of size [T, S]."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.heads import accumulator_dtype, join_heads, join_rows, sink_rows, split_heads
from jax_fa4.blockwise.mask import if_seen, padded_rows, spans
from jax_fa4.blockwise.packed import row_blocks, row_tile
from jax_fa4.blockwise.scores import ScoreInputs, contract, key_block, key_blocks, own_settings, scaled_queries, scores
from jax_fa4.operands import Operands

__all__ = ["forward"]


class Softmax(NamedTuple):
    """State of the online softmax after some key blocks."""

    row_max: jax.Array  # [*B, K, G, T], of all scores so far; -inf before the first visible key
    row_sum: jax.Array  # [*B, K, G, T], of exp(s - row_max)
    acc: jax.Array  # [*B, K, G, T, E], of exp(s - row_max) * v


@own_settings
def forward(x: Operands) -> tuple[jax.Array, jax.Array]:
    """out [*B, T, N, E] in q's dtype and lse [*B, N, T] in accumulator precision (natural log, scale and sink in it).

    A row without a visible key has out 0 and lse -inf, or its sink; a row beyond q_lengths has out 0 and lse -inf.
    """
    tiles = row_blocks(x)
    if tiles is None:
        return _forward(x)
    out, lse = jax.lax.map(lambda first: _forward(row_tile(x, tiles, first)), tiles.firsts)
    return tiles.join(out, axis=-3), tiles.join(lse, axis=-1)


def _forward(x: Operands) -> tuple[jax.Array, jax.Array]:
    dtype, kv_heads = accumulator_dtype(x), x.k.shape[-2]
    blocks, within = key_blocks(x), spans(x)
    q = scaled_queries(split_heads(x.q, kv_heads).astype(dtype), x.softmax_scale)

    def after(state: Softmax, first: jax.Array) -> Softmax:
        block = key_block(x, within, blocks, first)
        s = scores(ScoreInputs(q, block.k, x.softcap, block.bias), block.visible)
        row_max = jnp.maximum(state.row_max, s.max(axis=-1, initial=-jnp.inf))
        shift = jnp.where(
            jnp.isneginf(row_max), 0, row_max
        )  # a row that has seen no key yet: exp(-inf - 0) = 0, not NaN
        p = jnp.exp(s - shift[..., None])
        rescale = jnp.exp(state.row_max - shift)
        row_sum = rescale * state.row_sum + p.sum(axis=-1)
        acc = rescale[..., None] * state.acc + contract("...kgts,...ske->...kgte", p, block.v)
        return Softmax(row_max, row_sum, acc)

    def step(state: Softmax, first: jax.Array) -> tuple[Softmax, None]:
        return if_seen(x, within, blocks, first, lambda: after(state, first), lambda: state), None

    state, _ = jax.lax.scan(step, _initial(x, q), blocks.firsts)
    out = state.acc / jnp.where(state.row_sum == 0, 1, state.row_sum)[..., None]
    lse = state.row_max + jnp.log(state.row_sum)
    padded = padded_rows(x)
    if padded is not None:
        lse = jnp.where(padded, -jnp.inf, lse)
    return join_heads(out).astype(x.q.dtype), join_rows(lse)


def _initial(x: Operands, q: jax.Array) -> Softmax:
    """No key yet; a sink is a score that has come first, with nothing to add to acc."""
    rows = q.shape[:-1]
    row_max = jnp.full(rows, -jnp.inf, q.dtype) if x.sinks is None else sink_rows(x.sinks, x)
    row_sum = jnp.where(jnp.isneginf(row_max), 0, jnp.ones_like(row_max))
    return Softmax(row_max, row_sum, jnp.zeros((*rows, x.v.shape[-1]), q.dtype))
