"""Which key blocks a tile of queries visits when both have segment ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["key_blocks"]

LIMITS = np.iinfo(np.int32)


def key_blocks(q_ids: jax.Array, kv_ids: jax.Array, *, tile_m: int, tile_n: int) -> jax.Array:
    """First and one past the last block that a tile visits: [*B, ceil(T / tile_m), 2] for ids [*B, T] and [*B, S].

    A block of `tile_n` keys may hold a segment of the tile's where the ranges of their ids overlap. Every block that
    does lies in between, whatever the order of the ids; with sorted ids no other does. A backward asks for the blocks
    of queries that see its tiles of keys, with the roles of the two exchanged.
    """
    (q_low, q_high), (kv_low, kv_high) = _ranges(q_ids, tile_m), _ranges(kv_ids, tile_n)
    meets = (q_low[..., :, None] <= kv_high[..., None, :]) & (kv_low[..., None, :] <= q_high[..., :, None])
    blocks = jnp.arange(kv_low.shape[-1], dtype=jnp.int32)
    begin = jnp.where(meets, blocks, LIMITS.max).min(axis=-1, initial=LIMITS.max)
    end = jnp.where(meets, blocks + 1, 0).max(axis=-1, initial=0)
    return jnp.stack([begin, end], axis=-1)


def _ranges(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest id of each run of `size`."""
    padding = (*[(0, 0)] * (ids.ndim - 1), (0, -ids.shape[-1] % size))
    # rather than windows: XLA reduces a row with many threads, and a window with one
    low, high = (
        jnp.pad(ids, padding, constant_values=beyond).reshape(*ids.shape[:-1], -(-ids.shape[-1] // size), size)
        for beyond in (LIMITS.max, LIMITS.min)
    )
    return low.min(axis=-1), high.max(axis=-1)
