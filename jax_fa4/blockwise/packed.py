"""Rows of packed sequences: where each query stands among its sequence's keys, and the cut of a long row of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.operands import Operands
from jax_fa4.sequences import sequence_of

__all__ = ["Places", "places", "row_blocks", "row_tile"]


class Places(NamedTuple):
    """What packed queries may see, as indices of keys, [*B, T] int32 each; 1 in place of an axis where all agree."""

    first: jax.Array  # the first key of the query's sequence
    end: jax.Array  # one behind its last key; `first` for a query of no sequence
    diagonal: jax.Array  # the key that the query stands at, aligned at the ends of the sequence
    padded: jax.Array  # bool: the query belongs to no sequence


def places(x: Operands) -> Places:
    """Finds the sequence of every query; a length above the distance of two offsets means the whole distance."""
    q_offsets, kv_offsets = x.cu_seqlens_q, x.cu_seqlens_kv
    assert q_offsets is not None, "only packed queries have places"
    assert kv_offsets is not None, "offsets come in pairs"
    q_lengths = jnp.diff(q_offsets) if x.q_lengths is None else x.q_lengths
    kv_lengths = jnp.diff(kv_offsets) if x.kv_lengths is None else x.kv_lengths
    queries = jnp.arange(x.q.shape[-3], dtype=jnp.int32)
    find = jnp.vectorize(_places, signature="(t),(m),(m),(l),(l)->(t),(t),(t),(t)")
    return Places(*find(queries, q_offsets, kv_offsets, q_lengths, kv_lengths))


def _places(
    queries: jax.Array, q_offsets: jax.Array, kv_offsets: jax.Array, q_lengths: jax.Array, kv_lengths: jax.Array
) -> Places:
    """Of one row. The queries behind the last offset belong to one more sequence, which is empty."""
    sequence = sequence_of(queries, q_offsets)
    q_lengths, kv_lengths = (
        jnp.append(jnp.clip(lengths, 0, jnp.diff(offsets)), 0)
        for lengths, offsets in ((q_lengths, q_offsets), (kv_lengths, kv_offsets))
    )
    first, q_length, kv_length = kv_offsets[sequence], q_lengths[sequence], kv_lengths[sequence]
    place = queries - q_offsets[sequence]  # in the sequence; negative before the first offset
    padded = (place < 0) | (place >= q_length)
    return Places(first, first + jnp.where(padded, 0, kv_length), first + place + kv_length - q_length, padded)


def row_blocks(x: Operands) -> Blocks | None:
    """The cut of a row of packed queries, whose blocks see few of the keys; None where there is nothing to cut."""
    blocks = Blocks.of(x.q.shape[-3])
    return None if x.cu_seqlens_q is None or blocks.count <= 1 else blocks


def row_tile(x: Operands, blocks: Blocks, first: jax.Array) -> Operands:
    """The operands of one block of queries: a row of its own, whose sequences may begin before it."""
    assert x.cu_seqlens_q is not None, "only packed queries are cut"
    q = blocks.slice(x.q, first, axis=-3)
    return x._replace(q=q, cu_seqlens_q=x.cu_seqlens_q - blocks.start(first))
