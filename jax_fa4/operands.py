"""The arrays of one attention call, as every layer below the public API passes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

__all__ = ["Operands"]


class Operands(NamedTuple):
    """Arrays of one call, in [*batch, seq, heads, head_dim] order whatever the memory layout; an absent one is None.

    Any number of leading batch axes B (also none). Shape letters: T queries, S keys, N query heads, K kv heads,
    D head dim of q and k, E head dim of v. Every operand but q, k and v may have 1 in place of any batch axis; bias and
    mask also in place of N and T. A scalar has no axes, or the batch axes when `vmap` maps it.

    With cu_seqlens a batch entry is a row of L sequences, and lengths are [*B, L]: sequence l has the queries from
    cu_seqlens_q[l] on, as many as its length says but none of the next sequence's, and its keys likewise. Queries and
    keys of no sequence are padding. With a page_table k and v are pools of pages, and key s of a batch entry is row
    s % page_size of page page_table[s // page_size]; an index outside the pool reads its nearest page.
    """

    q: jax.Array  # [*B, T, N, D]
    k: jax.Array  # [*B, S, K, D], or pages [*B[:-1], num_pages, page_size, K, D]
    v: jax.Array  # [*B, S, K, E], or pages likewise
    softmax_scale: jax.Array  # [] float32
    softcap: jax.Array | None = None  # [] float32, > 0
    window_left: jax.Array | None = None  # [] int32: key j is visible to query i if j >= i + offset - window_left
    window_right: jax.Array | None = None  # [] int32: ... if j <= i + offset + window_right; causal is 0
    q_offset: jax.Array | None = None  # [*B] int32: key index of query 0's diagonal; absent: kv_length - q_length
    cu_seqlens_q: jax.Array | None = None  # [*B, L + 1] int32, never descending: where each sequence's queries begin
    cu_seqlens_kv: jax.Array | None = None  # [*B, L + 1] int32
    page_table: jax.Array | None = None  # [*B, S // page_size] int32
    q_lengths: jax.Array | None = None  # [*B] int32: queries at or beyond it are padding
    kv_lengths: jax.Array | None = None  # [*B] int32: keys at or beyond it are padding
    q_segment_ids: jax.Array | None = None  # [*B, T] int32: a query sees the keys of its own segment
    kv_segment_ids: jax.Array | None = None  # [*B, S] int32
    sinks: jax.Array | None = None  # [*B, N] float32: a logit that takes part in the softmax but has no value
    bias: jax.Array | None = None  # [*B, N, T, S], added to the scaled (and capped) scores
    mask: jax.Array | None = None  # [*B, N, T, S] bool: True where the key is visible
    qkv: jax.Array | None = None  # [*B, T, 3, N, D]: what q, k and v are slices of, if they are

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes."""
        return self.q.shape[:-3]

    @property
    def seqlen_k(self) -> int:
        """S, of all pages of a batch entry where keys are in pages."""
        return self.k.shape[-3] if self.page_table is None else self.page_table.shape[-1] * self.k.shape[-3]

    def map(self, function: Any) -> Operands:
        """Applies `function` to every present operand."""
        return Operands._make(None if x is None else function(x) for x in self)
