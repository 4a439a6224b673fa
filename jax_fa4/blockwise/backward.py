"""Attention backward in plain JAX: a scan over key blocks that recomputes the weights from lse."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.blockwise.heads import accumulator_dtype, join_heads, sink_rows, split_heads, split_rows
from jax_fa4.blockwise.mask import if_seen, spans
from jax_fa4.blockwise.packed import row_blocks, row_tile
from jax_fa4.blockwise.pages import add_to_pages
from jax_fa4.blockwise.rows import Results, forward_rows, row_results, sink_weights
from jax_fa4.blockwise.scores import ScoreInputs, contract, key_block, key_blocks, own_settings, scaled_queries, scores
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
    tiles = row_blocks(x)
    gradients = _backward(x, saved, cotangents, wrt) if tiles is None else _by_tiles(x, saved, cotangents, wrt, tiles)
    if x.page_table is not None:
        gradients |= {name: add_to_pages(gradients[name], x.page_table, getattr(x, name)) for name in ("k", "v")}
    return tuple(gradients[name].astype(getattr(x, name).dtype) for name in wrt)


def _by_tiles(
    x: Operands, saved: Results, cotangents: Results, wrt: tuple[str, ...], tiles: Blocks
) -> dict[str, jax.Array]:
    """Every block of queries has its own rows of dq and adds to the gradients of all other operands."""

    def tile(first: jax.Array) -> dict[str, jax.Array]:
        own = tiles.indices(first) >= first
        of = row_results(cotangents, tiles, first)
        of = Results(jnp.where(own[:, None, None], of.out, 0), jnp.where(own, of.lse, 0))
        return _backward(row_tile(x, tiles, first), row_results(saved, tiles, first), of, wrt)

    def step(sums: dict[str, jax.Array], first: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        gradients = tile(first)
        return {name: total + gradients[name] for name, total in sums.items()}, gradients["q"]

    shapes = jax.eval_shape(tile, tiles.firsts[0])
    zeros = {name: jnp.zeros(a.shape, a.dtype) for name, a in shapes.items() if name != "q"}
    sums, dq = jax.lax.scan(step, zeros, tiles.firsts)
    return sums | {"q": tiles.join(dq, axis=-3)}


def _backward(x: Operands, saved: Results, cotangents: Results, wrt: tuple[str, ...]) -> dict[str, jax.Array]:
    """In accumulator precision; those of pages as [*B, S, K, D]."""
    dtype, kv_heads = accumulator_dtype(x), x.k.shape[-2]
    blocks, within = key_blocks(x), spans(x)
    rows = forward_rows(x, saved)
    live = rows.live[..., None]
    dout = jnp.where(live, split_heads(cotangents.out, kv_heads).astype(dtype), 0)
    dlse = jnp.where(rows.live, split_rows(cotangents.lse, kv_heads), 0)
    delta = (rows.out * dout).sum(axis=-1) - dlse
    live_q = jnp.where(live, split_heads(x.q, kv_heads).astype(dtype), 0)
    q, unscale = jax.vjp(scaled_queries, live_q, x.softmax_scale)

    @jax.checkpoint  # for second order: keeps no [T, keys] array of a block
    def block_gradients(first: jax.Array) -> tuple[ScoreInputs, jax.Array]:
        block = key_block(x, within, blocks, first)
        s, pullback = jax.vjp(lambda of: scores(of, block.visible), ScoreInputs(q, block.k, x.softcap, block.bias))
        p = jnp.exp(s - rows.lse[..., None])
        dp = contract("...kgte,...ske->...kgts", dout, block.v)
        (of_scores,) = pullback(p * (dp - delta[..., None]))
        return of_scores, contract("...kgts,...kgte->...ske", p, dout)

    def after(sums: Sums, first: jax.Array) -> tuple[Sums, Keys]:
        of_scores, dv = block_gradients(first)
        softcap = None if sums.softcap is None else sums.softcap + of_scores.softcap
        keys = Keys(of_scores.k, dv, of_scores.bias if "bias" in wrt else None)
        return Sums(sums.q + of_scores.q, softcap), keys

    def step(sums: Sums, first: jax.Array) -> tuple[Sums, Keys]:
        def unchanged() -> tuple[Sums, Keys]:
            _, keys = jax.eval_shape(after, sums, first)
            return sums, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), keys)

        return if_seen(x, within, blocks, first, lambda: after(sums, first), unchanged)

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
    return {name: gradients[name] for name in wrt}
