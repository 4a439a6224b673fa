"""Packed sequences: which of them a row belongs to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["sequence_of"]


def sequence_of(rows: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """[T] int32: the sequence of each of `rows` [T], given where the L of them begin [L + 1].

    Rows before the first offset are counted to sequence 0; those behind the last get L.
    """
    ends = cu_seqlens[1:]
    num_sequences: Any = ends.shape[0]
    if isinstance(num_sequences, int):
        return jnp.searchsorted(ends, rows, side="right", method="scan_unrolled").astype(jnp.int32)
    return (ends[:, None] <= rows[None]).sum(axis=0, dtype=jnp.int32)  # of a symbolic number, which can't be searched
