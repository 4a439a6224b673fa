"""What backward and tangent take from a forward's results, one number or vector a query row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.blockwise.heads import accumulator_dtype, split_heads, split_rows
from jax_fa4.operands import Operands

__all__ = ["Results", "Rows", "forward_rows", "row_results", "sink_weights"]


class Results(NamedTuple):
    """The results of a forward, their tangents or their cotangents."""

    out: jax.Array  # [*B, T, N, E]
    lse: jax.Array  # [*B, N, T]


class Rows(NamedTuple):
    """Results by row, in accumulator precision."""

    out: jax.Array  # [*B, K, G, T, E]
    lse: jax.Array  # [*B, K, G, T], 0 where live is False: all scores are -inf there, and exp(-inf - 0) = 0
    live: jax.Array  # [*B, K, G, T], whether the row has a key or a sink


def row_results(saved: Results, blocks: Blocks, first: jax.Array) -> Results:
    """The results of one block of queries."""
    return Results(blocks.slice(saved.out, first, axis=-3), blocks.slice(saved.lse, first, axis=-1))


def forward_rows(x: Operands, saved: Results) -> Rows:
    """Splits heads, and makes the lse of rows without a key finite."""
    kv_heads = x.k.shape[-2]
    lse = split_rows(saved.lse, kv_heads)
    live = ~jnp.isneginf(lse)
    return Rows(split_heads(saved.out, kv_heads).astype(accumulator_dtype(x)), jnp.where(live, lse, 0), live)


def sink_weights(sinks: jax.Array, rows: Rows) -> jax.Array:
    """[*B, K, G, T]: the share of each row's softmax that its sink takes; sinks [*B, K, G, T]."""
    return jnp.where(rows.live, jnp.exp(sinks - rows.lse), 0)
