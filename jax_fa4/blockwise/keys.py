"""The key axis cut into equal blocks, without a padded copy of any operand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["BLOCK_KEYS", "KeyBlocks"]

BLOCK_KEYS = 256  # keys of a block at most: the scores of one block are what exists of [T, S] at a time


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """`count` blocks of `size` keys; the last one starts early enough to end at seqlen_k, and so overlaps another.

    Block n owns the keys from `first = n * size`; the `overlap` keys that the last block repeats must be masked in it.
    """

    seqlen_k: int
    size: int
    count: int

    @classmethod
    def of(cls, seqlen_k: Any) -> KeyBlocks:
        """Blocks of nearly equal size; a symbolic length (jax.export) can't be cut and is one block."""
        if not isinstance(seqlen_k, int):
            return cls(seqlen_k, seqlen_k, 1)
        count = -(-seqlen_k // BLOCK_KEYS)
        return cls(seqlen_k, -(-seqlen_k // max(count, 1)), count)

    @property
    def overlap(self) -> int:
        """Keys of the last block that belong to the one before."""
        return self.count * self.size - self.seqlen_k

    @property
    def firsts(self) -> jax.Array:
        """[count] int32: the first key that each block owns."""
        return jnp.arange(self.count, dtype=jnp.int32) * self.size

    def keys(self, first: jax.Array) -> jax.Array:
        """[size] int32: indices of the keys in a block."""
        return self._start(first) + jnp.arange(self.size, dtype=jnp.int32)

    def slice(self, x: jax.Array, first: jax.Array, *, axis: int) -> jax.Array:
        """A block's part of an array with a key axis."""
        return jax.lax.dynamic_slice_in_dim(x, self._start(first), self.size, axis)

    def join(self, stacked: jax.Array, *, axis: int) -> jax.Array:
        """Undoes `slice` for results [count, ...] of all blocks, where repeated keys have zeros in the last block."""
        axis = axis % (stacked.ndim - 1)
        if self.overlap:
            last = jax.lax.slice_in_dim(stacked[-1], self.overlap, self.size, axis=axis)
            return jnp.concatenate([_merge(stacked[:-1], axis), last], axis)
        return _merge(stacked, axis)

    def _start(self, first: jax.Array) -> jax.Array:
        return jnp.minimum(first, self.seqlen_k - self.size) if self.overlap else first


def _merge(stacked: jax.Array, axis: int) -> jax.Array:
    """[count, ..., size, ...] to [..., count * size, ...]."""
    moved = jnp.moveaxis(stacked, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])
