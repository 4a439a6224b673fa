"""The arrays of one attention call, as every layer below the public API passes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

__all__ = ["Operands"]


class Operands(NamedTuple):
    """Arrays of one call, in [*batch, seq, heads, head_dim] order whatever the memory layout; an absent operand is None.

    Any number of leading batch axes B (also none). Shape letters: T queries, S keys, N query heads, K kv heads,
    D head dim of q and k, E head dim of v. Every operand but q, k and v may have 1 in place of any batch axis; bias and mask
    also in place of N and T. A scalar has no axes, or the batch axes when `vmap` maps it.
    """

    q: jax.Array  # [*B, T, N, D]
    k: jax.Array  # [*B, S, K, D]
    v: jax.Array  # [*B, S, K, E]
    softmax_scale: jax.Array  # [] float32
    softcap: jax.Array | None = None  # [] float32, > 0
    window_left: jax.Array | None = None  # [] int32: key j is visible to query i if j >= i + offset - window_left
    window_right: jax.Array | None = None  # [] int32: ... if j <= i + offset + window_right; causal is 0
    q_offset: jax.Array | None = None  # [*B] int32: key index of query 0's diagonal; absent: kv_length - q_length
    q_lengths: jax.Array | None = None  # [*B] int32: queries at or beyond it are padding
    kv_lengths: jax.Array | None = None  # [*B] int32: keys at or beyond it are padding
    q_segment_ids: jax.Array | None = None  # [*B, T] int32: a query sees the keys of its own segment
    kv_segment_ids: jax.Array | None = None  # [*B, S] int32
    sinks: jax.Array | None = None  # [*B, N] float32: a logit that takes part in the softmax but has no value
    bias: jax.Array | None = None  # [*B, N, T, S], added to the scaled (and capped) scores
    mask: jax.Array | None = None  # [*B, N, T, S] bool: True where the key is visible

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes."""
        return self.q.shape[:-3]

    def map(self, function: Any) -> Operands:
        """Applies `function` to every present operand."""
        return Operands._make(None if x is None else function(x) for x in self)
