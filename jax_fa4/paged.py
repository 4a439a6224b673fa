"""`attention_paged` and `append_kv`: keys and values of many sequences in pages of one pool, as servers keep them."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fa4 import checks, debug, options, rules
from jax_fa4.operands import Operands
from jax_fa4.options import Window
from jax_fa4.sequences import sequence_of
from jax_fa4.spec import AttentionSpec, Implementation

__all__ = ["append_kv", "attention_paged"]


class Options(options.Options, total=False):
    """Options of `attention_paged` that don't change how many results it has."""

    cu_seqlens_q: ArrayLike | None


@overload
def attention_paged(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    **others: Unpack[Options],
) -> jax.Array: ...


@overload
def attention_paged(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    return_lse: Literal[True],
    **others: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_paged(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    return_lse: bool,
    **others: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention_paged(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    q_lengths: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    softmax_scale: float | ArrayLike | None = None,
    causal: bool = True,
    window: Window | None = (None, None),
    softcap: float | ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of B sequences whose keys and values lie in pages: decoding, speculative decoding, chunked prefill.

    Shape letters: B sequences, T queries (of each sequence, or of all where they are packed), P pages that a sequence
    may have, N query heads, K kv heads, D head dim of q and k, E head dim of v, as in `attention`. Key s of sequence b
    is row s % page_size of page page_table[b, s // page_size]; sequences may share pages.

    The last query of a sequence stands at its last key, so append the new tokens first (`append_kv`): with `causal`,
    here the default, query i of n sees the keys up to kv_length - n + i. A query that sees no key gets out 0 and lse
    -inf, or the sink; one that is padding gets out 0 and lse -inf always.

    Rows behind a length and pages that no sequence names may hold anything, even NaN. Entries of page_table behind a
    length don't matter. Those before it must name a page: an index outside the pool reads the nearest page there is,
    and with the environment variable JAX_FA4_CHECK=1, read when the call is traced, the program raises when it runs.

    Lengths, offsets and page table stay on the device: other values compile nothing. On a Hopper GPU the keys that a
    sequence's queries see are cut into 8 splits, but of 1024 keys at least and 4096 at most (512 K where K is below 8),
    which CTAs compute side by side. That depends on the sequence's own lengths alone, so its results have the same bits
    in any batch, alone or among others, padded or packed. (Where T is large a sequence has fewer splits, and if that
    cuts their number its bits depend on T: 2**19 // (T * N) of packed queries, 2**16 // (T * N) with q_lengths.)

    Gradients are computed by blockwise JAX, on a GPU too, the one exception among the gradients of 16-bit arrays:
    `implementation="kernel"` makes asking for them an error.
    On a Hopper GPU pages are copied by TMA, as many keys at a time as divide both the page size and a tile (64 keys, or
    128 up to head dim 64): pages of 16 keys take a copy each, pages of 3 keys a copy a key. A decoded token may differ
    within rounding from the same one in a prompt that the kernels of `attention_varlen` read.

    Blockwise JAX gathers about 256 keys of each sequence at a time, and only where a query of any sequence sees one of
    these. `jax.vmap` is blockwise JAX too, and copies pools that it doesn't map.

    Args:
      q: [B, T, N, D] float16, bfloat16, float32 or float64; with cu_seqlens_q [T, N, D].
      k_pages: [num_pages, page_size, K, D], q's dtype, pages of any size.
      v_pages: [num_pages, page_size, K, E], q's dtype.
      page_table: [B, P] integers from 0 to num_pages - 1. With cu_seqlens_q, B * P * page_size is below 2**31.
      kv_lengths: [B] integers from 0 to P * page_size: how many keys each sequence has, the new ones included.
      q_lengths: [B] integers: how many queries each sequence has, its first. None is all.
      cu_seqlens_q: [B + 1] integers from 0 to T that never descend: where each sequence's queries begin, packed as in
        `attention_varlen`.
      softmax_scale: what q k^T is multiplied by, a number > 0; None is 1 / sqrt(D). Differentiable.
      causal: True hides the keys after a query's place, as window[1] = 0 does.
      window: (left, right): how many keys a query sees before and after its place, as in `attention`.
      softcap: scores become softcap * tanh(scores / softcap), a number > 0, above 1e30 as much as that; None caps
        nothing. Differentiable.
      sinks: [N], or [B, N] without cu_seqlens_q, a floating dtype: logits that take part in each head's softmax and
        have no value. Differentiable.
      return_lse: True also returns the logarithm of each row's sum of exponentials.
      implementation: "kernel" runs a GPU kernel or raises, "xla" runs blockwise JAX. None prefers the kernel, and warns
        once where a GPU has to run blockwise JAX. "emulate" is as in `attention`.

    Returns:
      out [B, T, N, E] in q's dtype; with return_lse (out, lse), where lse is [B, N, T] float32 (float64 for float64
      operands), natural logarithm, scale, cap and sinks included. With cu_seqlens_q [T, N, E] and [N, T].
      Differentiable.

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.
      NotImplementedError: implementation="kernel" or "emulate" where there is no kernel; raised when the program is
        lowered.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fa4 import attention, attention_paged
      >>> q = jax.random.normal(jax.random.key(0), (1, 2, 4, 16))  # the 2 newest queries of a sequence
      >>> kv = jax.random.normal(jax.random.key(1), (6, 2, 16))  # its 6 keys, which it has in pages 3 and 1
      >>> pages = jnp.full((5, 4, 2, 16), jnp.nan).at[3].set(kv[:4]).at[1, :2].set(kv[4:])
      >>> out = attention_paged(q, pages, pages, jnp.array([[3, 1, 0]]), jnp.array([6]))
      >>> bool(jnp.allclose(out, attention(q, kv[None], kv[None], causal=True), atol=1e-6))
      True
    """
    checks.choice("implementation", implementation, (None, "kernel", "xla", "emulate"))
    q, k_pages, v_pages = (checks.array(name, x) for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)))
    is_packed = cu_seqlens_q is not None
    checks.pages({"k_pages": k_pages, "v_pages": v_pages})
    checks.paged_queries(q, k_pages, is_packed)
    checks.head_dims({"q": q, "k_pages": k_pages, "v_pages": v_pages})
    causal, return_lse = checks.flag("causal", causal), checks.flag("return_lse", return_lse)
    page_table = checks.page_table(page_table, None if is_packed else q.shape[0])
    num_sequences, num_slots = page_table.shape
    page_size = k_pages.shape[1]
    kv_lengths = checks.sequence_lengths("kv_lengths", kv_lengths, num_sequences, num_slots * page_size, "[B]")
    if q_lengths is not None:
        q_lengths = checks.sequence_lengths("q_lengths", q_lengths, num_sequences, q.shape[-3], "[B]")
    if debug.is_on():
        used = jnp.arange(num_slots) * page_size < kv_lengths[:, None]
        debug.check_pages(page_table, used, k_pages.shape[0])

    x = Operands(q, k_pages, v_pages, options.scale(softmax_scale, q))
    x = x._replace(page_table=page_table, kv_lengths=kv_lengths, q_lengths=q_lengths)
    if cu_seqlens_q is not None:
        checks.packed_page_table(page_table, page_size)
        q_offsets = checks.offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], num_sequences)
        x = _one_row(x, q_offsets)
    x = options.with_softmax_changes(options.with_window(x, causal, window), softcap, sinks)
    spec = AttentionSpec.of(x, implementation=implementation)
    out, lse = rules.attend(x, spec)
    if is_packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _one_row(x: Operands, q_offsets: jax.Array) -> Operands:
    """Packed queries are one batch entry, whose keys are those of all pages of all sequences."""
    assert x.page_table is not None, "keys are in pages"
    kv_offsets = jnp.arange(q_offsets.shape[0], dtype=jnp.int32) * x.seqlen_k
    row = x._replace(cu_seqlens_q=q_offsets, cu_seqlens_kv=kv_offsets, page_table=x.page_table.reshape(-1))
    return row.map(lambda a: a[None] if a.ndim else a)._replace(k=x.k, v=x.v)


def append_kv(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    page_table: ArrayLike,
    positions: ArrayLike,
    *,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the keys and values of new tokens into their sequences' pages, where `attention_paged` reads them.

    Shape letters as in `attention_paged`: T new tokens of each of B sequences, or of all where they are packed. The
    token at position s of sequence b goes to row s % page_size of page page_table[b, s // page_size]. All other rows
    stay as they are. A token whose position is outside 0 to P * page_size - 1 is written nowhere (-1 marks padding),
    and so is one whose entry of page_table names no page; for the latter, with the environment variable
    JAX_FA4_CHECK=1, read when the call is traced, the program raises when it runs. Of two tokens for one row either is
    written.

    In a jitted function that donates the pools no pool is copied: `jax.jit(step, donate_argnums=(0, 1))`.

    Args:
      k_pages: [num_pages, page_size, K, D].
      v_pages: [num_pages, page_size, K, E].
      k: [B, T, K, D], k_pages' dtype; with cu_seqlens [T, K, D].
      v: [B, T, K, E], v_pages' dtype; with cu_seqlens [T, K, E].
      page_table: [B, P] integers from 0 to num_pages - 1.
      positions: integers that broadcast to [B, T], with cu_seqlens [T]: where in its sequence each token stands. Those
        of tokens that are appended to `lengths` are lengths[:, None] + jnp.arange(T).
      cu_seqlens: [B + 1] integers from 0 to T that never descend: where each sequence's tokens begin.

    Returns:
      (k_pages, v_pages) with the tokens. Differentiable in pools, k and v.

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_fa4 import append_kv
      >>> pages = jnp.zeros((3, 2, 1, 8))
      >>> new = jnp.ones((1, 1, 1, 8))  # token 3 of a sequence whose pages are 2 and 0
      >>> k_pages, _ = append_kv(pages, pages, new, new, jnp.array([[2, 0]]), jnp.array([[3]]))
      >>> k_pages[:, :, 0, 0].tolist()
      [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    """
    k_pages, v_pages, k, v = (
        checks.array(name, x) for name, x in (("k_pages", k_pages), ("v_pages", v_pages), ("k", k), ("v", v))
    )
    is_packed = cu_seqlens is not None
    checks.pages({"k_pages": k_pages, "v_pages": v_pages})
    checks.append(k, v, k_pages, v_pages, is_packed)
    page_table = checks.page_table(page_table, None if is_packed else k.shape[0])
    tokens = k.shape[:-2]
    positions = checks.integers("positions", positions, tokens, "[T]" if is_packed else "[B, T]")
    offsets = (checks.offsets("cu_seqlens", cu_seqlens, tokens[0], page_table.shape[0]),) if is_packed else ()
    append = rules.automatic(_append, (k_pages, v_pages))
    pools: tuple[jax.Array, jax.Array] = append(k_pages, v_pages, k, v, page_table, positions, *offsets)
    return pools


def _append(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    offsets: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`append_kv` of checked arrays."""
    (num_pages, page_size), (num_sequences, num_slots), tokens = k_pages.shape[:2], page_table.shape, k.shape[:-2]
    positions = jnp.broadcast_to(positions, tokens)
    if offsets is None:
        sequences = jnp.broadcast_to(jnp.arange(num_sequences, dtype=jnp.int32)[:, None], tokens)
    else:
        index = jnp.arange(tokens[0], dtype=jnp.int32)
        sequences = sequence_of(index, offsets)
        positions = jnp.where(index < offsets[0], -1, positions)

    slots = positions // page_size
    is_token = (positions >= 0) & (slots < num_slots) & (sequences < num_sequences)
    entry = jnp.where(is_token, sequences * num_slots + slots, page_table.size)
    page = jnp.append(page_table, jnp.asarray(num_pages, jnp.int32))[entry]
    if debug.is_on():
        used = jnp.zeros(page_table.size, bool).at[entry].set(True, mode="drop").reshape(page_table.shape)
        debug.check_pages(page_table, used, num_pages)
    page = jnp.where(page < 0, num_pages, page)  # which is outside the pool, while negative indices count from its end
    row = positions % page_size
    return (
        k_pages.at[page, row].set(k, mode="drop"),
        v_pages.at[page, row].set(v, mode="drop"),
    )
