"""Tangents of attention in plain JAX, given the forward's results: linear in the operands' tangents."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.heads import accumulator_dtype, join_heads, join_rows, sink_rows, split_heads
from jax_fa4.blockwise.mask import if_seen, spans
from jax_fa4.blockwise.packed import row_blocks, row_tile
from jax_fa4.blockwise.rows import Results, forward_rows, row_results, sink_weights
from jax_fa4.blockwise.scores import ScoreInputs, contract, key_block, key_blocks, own_settings, scaled_queries, scores
from jax_fa4.operands import Operands

__all__ = ["tangent"]


@own_settings
def tangent(x: Operands, saved: Results, tangents: dict[str, jax.Array]) -> Results:
    """Tangents of out and lse for tangents of the operands by name (q, k and v among them); 0 in rows without a key.

    d lse = sum_j p ds,    d out = sum_j p ds v + p dv - out d lse,    with p = exp(s - lse)
    """
    tiles = row_blocks(x)
    if tiles is None:
        return _tangent(x, saved, tangents)

    def tile(first: jax.Array) -> Results:
        dq = {"q": tiles.slice(tangents["q"], first, axis=-3)}
        return _tangent(row_tile(x, tiles, first), row_results(saved, tiles, first), tangents | dq)

    out, lse = jax.lax.map(tile, tiles.firsts)
    return Results(tiles.join(out, axis=-3), tiles.join(lse, axis=-1))


def _tangent(x: Operands, saved: Results, tangents: dict[str, jax.Array]) -> Results:
    dtype, kv_heads = accumulator_dtype(x), x.k.shape[-2]
    blocks, within = key_blocks(x), spans(x)
    rows = forward_rows(x, saved)
    dx = x._replace(bias=None)._replace(**tangents)
    split = [split_heads(a, kv_heads).astype(dtype) for a in (x.q, dx.q)]
    dscale = tangents.get("softmax_scale", jnp.zeros_like(x.softmax_scale))
    q, dq = jax.jvp(scaled_queries, (split[0], x.softmax_scale), (split[1], dscale))
    dcap = None if x.softcap is None else tangents.get("softcap", jnp.zeros_like(x.softcap))

    @jax.checkpoint  # for second order: keeps no [T, keys] array of a block
    def block_tangents(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        block, moved = key_block(x, within, blocks, first), key_block(dx, within, blocks, first)
        dbias = jnp.zeros_like(block.bias) if moved.bias is None and block.bias is not None else moved.bias
        of = ScoreInputs(q, block.k, x.softcap, block.bias)
        s, ds = jax.jvp(lambda of: scores(of, block.visible), (of,), (ScoreInputs(dq, moved.k, dcap, dbias),))
        p = jnp.exp(s - rows.lse[..., None])
        p_ds = p * ds
        dacc = contract("...kgts,...ske->...kgte", p_ds, block.v) + contract("...kgts,...ske->...kgte", p, moved.v)
        return p_ds.sum(axis=-1), dacc

    def step(sums: tuple[jax.Array, jax.Array], first: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        def after() -> tuple[jax.Array, jax.Array]:
            dlse, dacc = block_tangents(first)
            return sums[0] + dlse, sums[1] + dacc

        return if_seen(x, within, blocks, first, after, lambda: sums), None

    (dlse, dacc), _ = jax.lax.scan(step, (jnp.zeros_like(rows.lse), jnp.zeros_like(rows.out)), blocks.firsts)
    if "sinks" in tangents:
        sinks, dsinks = jax.jvp(lambda sinks: sink_rows(sinks, x), (x.sinks,), (tangents["sinks"],))
        dlse = dlse + sink_weights(sinks, rows) * dsinks
    return Results(join_heads(dacc - rows.out * dlse[..., None]).astype(x.q.dtype), join_rows(dlse))
