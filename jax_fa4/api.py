"""`attention`: checks its arguments, says what the call needs (`AttentionSpec`), and binds the differentiable op."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fa4 import checks, options, rules
from jax_fa4.operands import Operands
from jax_fa4.options import Window
from jax_fa4.spec import AttentionSpec, Implementation, Layout

__all__ = ["Options", "attend", "attention"]


class Options(options.Options, total=False):
    """Options of `attention` that don't change how many results it has."""

    q_offset: int | ArrayLike | None
    bias: ArrayLike | None
    mask: ArrayLike | None
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    kv_lengths: ArrayLike | None
    deterministic: bool
    layout: Layout


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = False, **others: Unpack[Options]
) -> jax.Array: ...


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **others: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool, **others: Unpack[Options]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    softmax_scale: float | ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = (None, None),
    q_offset: int | ArrayLike | None = None,
    softcap: float | ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    layout: Layout = "BTNH",
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of queries to keys and values: softmax(softmax_scale * q k^T + bias) v, exact, in O(T + S) memory.

    Shape letters: *batch any number of batch axes (also none), T queries, S keys, N query heads, K kv heads, D head dim
    of q and k, E head dim of v. N is a multiple of K: query head h reads kv head h // (N // K). D and E are multiples
    of 8 up to 256.

    The last query stands at the last key: query i at key i + S - T or, with lengths, at i + kv_length - q_length.
    `q_offset` puts query 0 at another key. `causal` and `window` bound the keys that a query sees around its place. All
    restrictions hold at once.

    A query that sees no key (T > S with `causal`, no length, a mask of False) gets out 0 and lse -inf, and gradients
    exactly 0; with sinks its lse is the sink. A query at or beyond its q_length gets out 0 and lse -inf always.

    Kernels compute scores in float32, and for gradients once more, from lse: weights are then off by the rounding of
    the largest scores, 1% where these are 1e5. Those beyond 1e7 in float16, 1e9 in bfloat16, may give NaN. In float16
    kernels hold gradients of scores in that type, too: where one is beyond 65504 those of q and k are infinite or
    NaN, which is what loss scaling looks for.

    Values of `softmax_scale`, `window`, `q_offset`, `softcap` and lengths may be traced. Numbers and numpy arrays are
    checked; arrays of JAX are not, and a value outside its range gives an undefined result.

    For policies of `jax.checkpoint` the results are named "jax_fa4_out" and "jax_fa4_lse": saving both spares a second
    forward. Batch and heads may be sharded without communication, heads where K is a multiple of the devices they are
    on; for fewer kv heads repeat k and v along their heads up to a multiple.

    Args:
      q: [*batch, T, N, D] float16, bfloat16, float32 or float64.
      k: [*batch, S, K, D], q's dtype.
      v: [*batch, S, K, E], q's dtype.
      softmax_scale: what q k^T is multiplied by, a number > 0; None is 1 / sqrt(D). Differentiable.
      causal: True hides the keys after a query's place, as window[1] = 0 does.
      window: (left, right): how many keys a query sees before and after its place, which it always sees. Each is an
        integer >= 0, or None for no bound; None is (None, None).
      q_offset: the key at which query 0 stands: an integer, also negative, or integers that broadcast to [*batch].
        Without `causal` and window it has no effect. None aligns the ends.
      softcap: scores become softcap * tanh(scores / softcap), a number > 0, above 1e30 as much as that; None caps
        nothing. Differentiable.
      sinks: [N] or [*batch, N], a floating dtype: logits that take part in each head's softmax and have no value.
        Above 2.3e38 they count as that. Differentiable.
      bias: a floating dtype, broadcasts to [*batch, N, T, S]: added to the scaled and capped scores; -inf hides a
        key, in kernels what is below -2.3e38 as well. Differentiable, with a gradient of its own shape.
      mask: bool, broadcasts to [*batch, N, T, S]: True where the key is visible.
      q_segment_ids: integers of 32 bits that broadcast to [*batch, T]: a query sees the keys with its own id. Needs the
        next.
      kv_segment_ids: integers of 32 bits that broadcast to [*batch, S]. Needs the one before.
      q_lengths: integers from 0 to T that broadcast to [*batch]: queries at or beyond it are padding.
      kv_lengths: integers from 0 to S that broadcast to [*batch]: keys at or beyond it are padding, whose content, even
        NaN, changes nothing.
      return_lse: True also returns the logarithm of each row's sum of exponentials.
      deterministic: True makes gradients bitwise reproducible at some cost; the output always is.
      layout: "BTNH", the order above, or "BNTH": q, k, v and out are [*batch, heads, seq, head_dim]. No shape tells one
        from the other.
      implementation: "kernel" runs GPU kernels, for `grad` as well, or raises. "xla" runs blockwise JAX, as all other
        derivatives always do. None prefers kernels, and warns once where a GPU has to run blockwise JAX. "emulate" is
        for debugging: a host callback runs the kernels for `jax_fa4.target_arch` ("sm_90a"), those of the gradients
        too, in an emulator, on any machine and very slowly.

    Returns:
      out [*batch, T, N, E] in q's dtype; with return_lse (out, lse), where lse is [*batch, N, T] float32 (float64 for
      float64 operands), natural logarithm, of all that the softmax sums: scale, cap, bias and sinks included.
      Differentiable.

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument has the wrong shape or value; the message names it.
      NotImplementedError: implementation="kernel" or "emulate" where there is no kernel; raised when the program is
        lowered.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fa4 import attention
      >>> q = jax.random.normal(jax.random.key(0), (1, 5, 4, 16))  # 5 queries, 4 heads
      >>> kv = jax.random.normal(jax.random.key(1), (1, 8, 2, 16))  # 8 keys, 2 kv heads
      >>> out, lse = attention(q, kv, kv, causal=True, return_lse=True)
      >>> out.shape, lse.shape
      ((1, 5, 4, 16), (1, 4, 5))
      >>> whole = attention(q, kv, kv, causal=True)[:, -1:]  # the last query sees every key
      >>> bool(jnp.allclose(whole, attention(q[:, -1:], kv, kv), atol=1e-6))
      True
    """
    checks.choice("layout", layout, ("BTNH", "BNTH"))
    checks.choice("implementation", implementation, (None, "kernel", "xla", "emulate"))
    given = {name: checks.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    arrays = given if layout == "BTNH" else {name: _swap_seq_and_heads(x) for name, x in given.items()}
    checks.query_key_value(arrays, layout)
    checks.head_dims(arrays)
    return_lse = checks.flag("return_lse", return_lse)
    out, lse = attend(
        Operands(arrays["q"], arrays["k"], arrays["v"], options.scale(softmax_scale, arrays["q"])),
        causal=causal,
        window=window,
        q_offset=q_offset,
        softcap=softcap,
        sinks=sinks,
        bias=bias,
        mask=mask,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        deterministic=deterministic,
        layout=layout,
        implementation=implementation,
    )
    out = out if layout == "BTNH" else _swap_seq_and_heads(out)
    return (out, lse) if return_lse else out


def attend(x: Operands, **given: Unpack[Options]) -> tuple[jax.Array, jax.Array]:
    """out and lse of a call whose arrays and scale have been checked; the other options are checked here."""
    causal, deterministic = (checks.flag(name, given.get(name, False)) for name in ("causal", "deterministic"))
    x = _with_offset(options.with_window(x, causal, given.get("window")), given.get("q_offset"))
    x = _with_lengths(x, given.get("q_lengths"), given.get("kv_lengths"))
    x = _with_segments(x, given.get("q_segment_ids"), given.get("kv_segment_ids"))
    x = _with_mask_and_bias(x, given.get("mask"), given.get("bias"))
    x = options.with_softmax_changes(x, given.get("softcap"), given.get("sinks"))
    spec = AttentionSpec.of(
        x,
        layout=given.get("layout", "BTNH"),
        deterministic=deterministic,
        implementation=given.get("implementation"),
    )
    return rules.attend(x, spec)


def _swap_seq_and_heads(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -3, -2) if x.ndim >= 3 else x


def _with_offset(x: Operands, q_offset: Any) -> Operands:
    offset = None if q_offset is None else checks.offset(q_offset, x.batch)
    is_bounded = x.window_left is not None or x.window_right is not None
    return x._replace(q_offset=offset if is_bounded else None)  # without a bound it would change nothing


def _with_lengths(x: Operands, q_lengths: Any, kv_lengths: Any) -> Operands:
    t, s = x.q.shape[-3], x.k.shape[-3]
    return x._replace(
        q_lengths=None if q_lengths is None else checks.lengths("q_lengths", q_lengths, x.batch, t),
        kv_lengths=None if kv_lengths is None else checks.lengths("kv_lengths", kv_lengths, x.batch, s),
    )


def _with_segments(x: Operands, q_ids: Any, kv_ids: Any) -> Operands:
    if q_ids is None and kv_ids is None:
        return x
    q_ids, kv_ids = checks.segment_ids(q_ids, kv_ids, x.batch, x.q.shape[-3], x.k.shape[-3])
    return x._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids)


def _with_mask_and_bias(x: Operands, mask: Any, bias: Any) -> Operands:
    t, heads = x.q.shape[-3:-1]
    mask, bias = checks.mask_and_bias(mask, bias, (*x.batch, heads, t, x.k.shape[-3]))
    return x._replace(mask=mask, bias=bias)
