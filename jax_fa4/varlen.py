"""`attention_varlen`: attention of sequences that lie one behind the other in packed arrays."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_fa4 import checks, options, rules
from jax_fa4.operands import Operands
from jax_fa4.options import Window
from jax_fa4.spec import AttentionSpec, Implementation

__all__ = ["attention_varlen"]


class Options(options.Options, total=False):
    """Options of `attention_varlen` that don't change how many results it has."""

    max_seqlen_q: int | ArrayLike | None
    max_seqlen_kv: int | ArrayLike | None
    kv_lengths: ArrayLike | None
    deterministic: bool


@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **others: Unpack[Options],
) -> jax.Array: ...


@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **others: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike | None = None,
    *,
    return_lse: bool,
    **others: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike | None = None,
    *,
    max_seqlen_q: int | ArrayLike | None = None,
    max_seqlen_kv: int | ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    softmax_scale: float | ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = (None, None),
    softcap: float | ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of L sequences packed into one row: each sequence's queries see its own keys and no others.

    Shape letters: T queries and S keys of all sequences together, N query heads, K kv heads, D head dim of q and k, E
    head dim of v, as in `attention`. Sequence l has the queries from cu_seqlens_q[l] to before cu_seqlens_q[l + 1] and
    the keys between its cu_seqlens_kv, or only the first of them that its lengths say. Sequences may be empty.

    In each sequence the last query stands at the last key: `causal` and `window` mean there what they mean in
    `attention`. A query that sees no key gets out 0 and lse -inf, or the sink; one that belongs to no sequence (before
    the first offset, in a gap behind a length, behind the last offset) gets out 0 and lse -inf always. Both get
    gradients of exactly 0, and so does a key or value of no sequence, whose content, even NaN, changes nothing.

    Offsets and lengths stay on the device: other values, as a new batch of documents has, compile nothing. Those given
    as numpy arrays are checked; others are not, and offsets that descend give an undefined result. A length that is
    larger than the distance of its two offsets means the whole distance. `jax.vmap` maps it over rows.

    Blockwise JAX visits the tiles of 256 queries by 256 keys in which a query sees a key, so sequences that follow each
    other cost what they cost alone, up to such tiles.

    Args:
      q: [T, N, D] float16, bfloat16, float32 or float64.
      k: [S, K, D], q's dtype.
      v: [S, K, E], q's dtype.
      cu_seqlens_q: [L + 1] integers from 0 to T that never descend.
      cu_seqlens_kv: [L + 1] integers from 0 to S that never descend. None is cu_seqlens_q.
      max_seqlen_q: an integer, which may be traced: an upper bound of the queries of a sequence. Nothing needs it.
      max_seqlen_kv: the same for keys.
      q_lengths: [L] integers: how many queries each sequence has, its first. None is all between its offsets.
      kv_lengths: the same for keys. Where neither cu_seqlens_kv nor kv_lengths is given it is q_lengths.
      softmax_scale: what q k^T is multiplied by, a number > 0; None is 1 / sqrt(D). Differentiable.
      causal: True hides the keys after a query's place, as window[1] = 0 does.
      window: (left, right): how many keys a query sees before and after its place, as in `attention`.
      softcap: scores become softcap * tanh(scores / softcap), a number > 0, above 1e30 as much as that; None caps
        nothing. Differentiable.
      sinks: [N], a floating dtype: logits that take part in each head's softmax and have no value. Differentiable.
      return_lse: True also returns the logarithm of each row's sum of exponentials.
      deterministic: True makes gradients bitwise reproducible at some cost; the output always is.
      implementation: "kernel" runs a GPU kernel or raises, "xla" runs blockwise JAX. None prefers the kernel, and warns
        once where a GPU has to run blockwise JAX. "emulate" is as in `attention`.

    Returns:
      out [T, N, E] in q's dtype; with return_lse (out, lse), where lse is [N, T] float32 (float64 for float64
      operands), natural logarithm, scale, cap and sinks included. Differentiable.

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.
      NotImplementedError: implementation="kernel" or "emulate" where there is no kernel; raised when the program is
        lowered.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fa4 import attention, attention_varlen
      >>> x = jax.random.normal(jax.random.key(0), (8, 4, 16))  # documents of 3, 0 and 4 tokens, and one unused row
      >>> out = attention_varlen(x, x, x, jnp.array([0, 3, 3, 7]), causal=True)
      >>> bool(jnp.allclose(out[3:7], attention(x[3:7], x[3:7], x[3:7], causal=True), atol=1e-6))
      True
      >>> bool((out[7] == 0).all())
      True
    """
    checks.choice("implementation", implementation, (None, "kernel", "xla", "emulate"))
    arrays = {name: checks.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    checks.query_key_value(arrays, "packed")
    checks.head_dims(arrays)
    causal, return_lse, deterministic = (
        checks.flag(name, value)
        for name, value in (("causal", causal), ("return_lse", return_lse), ("deterministic", deterministic))
    )
    checks.max_seqlen("max_seqlen_q", max_seqlen_q)
    checks.max_seqlen("max_seqlen_kv", max_seqlen_kv)
    x = Operands(arrays["q"], arrays["k"], arrays["v"], options.scale(softmax_scale, arrays["q"]))
    x = _with_sequences(x, cu_seqlens_q, cu_seqlens_kv, q_lengths, kv_lengths, may_overlap=not deterministic)
    x = options.with_softmax_changes(options.with_window(x, causal, window), softcap, sinks)
    spec = AttentionSpec.of(x, deterministic=deterministic, implementation=implementation)
    out, lse = rules.attend(x, spec)
    return (out, lse) if return_lse else out


def _with_sequences(
    x: Operands,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike | None,
    q_lengths: ArrayLike | None,
    kv_lengths: ArrayLike | None,
    *,
    may_overlap: bool,
) -> Operands:
    total_q, total_kv = x.q.shape[0], x.k.shape[0]
    q_offsets = checks.offsets("cu_seqlens_q", cu_seqlens_q, total_q)
    num_sequences = q_offsets.shape[0] - 1
    if cu_seqlens_kv is None:
        # their last offset is checked for the keys, too
        cu_seqlens_kv, kv_lengths = cu_seqlens_q, q_lengths if kv_lengths is None else kv_lengths
    kv_offsets = checks.offsets("cu_seqlens_kv", cu_seqlens_kv, total_kv, num_sequences)
    if not may_overlap:  # where offsets descend, sequences would wait for each other's turns forever
        q_offsets, kv_offsets = jax.lax.cummax(q_offsets), jax.lax.cummax(kv_offsets)
    x = x._replace(cu_seqlens_q=q_offsets, cu_seqlens_kv=kv_offsets)
    if q_lengths is not None:
        x = x._replace(q_lengths=checks.sequence_lengths("q_lengths", q_lengths, num_sequences, total_q, "[L]"))
    if kv_lengths is not None:
        x = x._replace(kv_lengths=checks.sequence_lengths("kv_lengths", kv_lengths, num_sequences, total_kv, "[L]"))
    return x
