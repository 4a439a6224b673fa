"""Which key blocks a tile of queries visits when both have segment ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["key_blocks"]

LIMITS = np.iinfo(np.int32)


def key_blocks(q_ids: jax.Array, kv_ids: jax.Array, *, tile_m: int, tile_n: int) -> jax.Array:
    """First and one past the last block of two runs: [*B, ceil(T / tile_m), 4] for ids [*B, T] and [*B, S].

    The first run is what a tile visits. A block of `tile_n` keys may hold a segment of the tile's where the ranges of
    their ids overlap. Every block that does lies in between, whatever the order of the ids; with sorted ids no other
    does.

    In the second run every key has the one id that all queries of the tile have, so that nothing is hidden by it. It is
    empty (0, 0) if a tile has several ids, or if other blocks lie among those of its own: with sorted ids none does.

    A backward asks for the blocks of queries that see its tiles of keys, with the roles of the two exchanged.
    """
    (q_low, q_high), (kv_low, kv_high) = _ranges(q_ids, tile_m), _ranges(kv_ids, tile_n)
    q_low, q_high = q_low[..., :, None], q_high[..., :, None]
    kv_low, kv_high = kv_low[..., None, :], kv_high[..., None, :]
    begin, end = _run((q_low <= kv_high) & (kv_low <= q_high))
    is_one = (q_low == q_high) & (kv_low == q_low) & (kv_high == q_high)
    one_begin, one_end = _run(is_one)
    has_gap = is_one.sum(axis=-1, dtype=jnp.int32) != one_end - one_begin
    one_begin, one_end = (jnp.where(has_gap, 0, bound) for bound in (one_begin, one_end))
    return jnp.stack([begin, end, one_begin, one_end], axis=-1)


def _run(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and one past the last of those that are true along the last axis; (greatest, 0) if none is."""
    indices = jnp.arange(blocks.shape[-1], dtype=jnp.int32)
    begin = jnp.where(blocks, indices, LIMITS.max).min(axis=-1, initial=LIMITS.max)
    end = jnp.where(blocks, indices + 1, 0).max(axis=-1, initial=0)
    return begin, end


def _ranges(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest id of each run of `size`."""
    padding = (*[(0, 0)] * (ids.ndim - 1), (0, -ids.shape[-1] % size))
    # rather than windows: XLA reduces a row with many threads, and a window with one
    low, high = (
        jnp.pad(ids, padding, constant_values=beyond).reshape(*ids.shape[:-1], -(-ids.shape[-1] // size), size)
        for beyond in (LIMITS.max, LIMITS.min)
    )
    return low.min(axis=-1), high.max(axis=-1)
