"""An axis of keys or queries cut into equal blocks, without a padded copy of any operand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["BLOCK", "Blocks"]

BLOCK = 256  # keys or queries of a block at most: the scores of one block are what exists of [T, S] at a time


@dataclasses.dataclass(frozen=True)
class Blocks:
    """`count` blocks of `size`; the last one starts early enough to end with the axis, and so overlaps another.

    Block n owns the indices from `first = n * size`; the `overlap` that the last block repeats must be masked in it.
    """

    length: int
    size: int
    count: int

    @classmethod
    def of(cls, length: Any, step: int = 1) -> Blocks:
        """Blocks of nearly equal size, a multiple of `step` as the length is, and one step long at least.

        A symbolic length (jax.export) can't be cut and is one block.
        """
        if not isinstance(length, int):
            return cls(length, length, 1)
        steps = length // step
        count = -(-steps // max(BLOCK // step, 1))
        return cls(length, -(-steps // max(count, 1)) * step, count)

    @property
    def overlap(self) -> int:
        """Entries of the last block that belong to the one before."""
        return self.count * self.size - self.length

    @property
    def firsts(self) -> jax.Array:
        """[count] int32: the first index that each block owns."""
        return jnp.arange(self.count, dtype=jnp.int32) * self.size

    def start(self, first: jax.Array) -> jax.Array:
        """[] int32: the first index of a block, its own or repeated."""
        return jnp.minimum(first, self.length - self.size) if self.overlap else first

    def indices(self, first: jax.Array) -> jax.Array:
        """[size] int32: the indices of a block."""
        return self.start(first) + jnp.arange(self.size, dtype=jnp.int32)

    def slice(self, x: jax.Array, first: jax.Array, *, axis: int) -> jax.Array:
        """A block's part of an array that has the axis."""
        return jax.lax.dynamic_slice_in_dim(x, self.start(first), self.size, axis)

    def join(self, stacked: jax.Array, *, axis: int) -> jax.Array:
        """Undoes `slice` for results [count, ...] of all blocks; what the last block repeats is left out."""
        axis = axis % (stacked.ndim - 1)
        if self.overlap:
            last = jax.lax.slice_in_dim(stacked[-1], self.overlap, self.size, axis=axis)
            return jnp.concatenate([_merge(stacked[:-1], axis), last], axis)
        return _merge(stacked, axis)


def _merge(stacked: jax.Array, axis: int) -> jax.Array:
    """[count, ..., size, ...] to [..., count * size, ...]."""
    moved = jnp.moveaxis(stacked, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])
