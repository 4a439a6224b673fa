"""`attention_fn` for Flax: fits linen's `MultiHeadDotProductAttention` and nnx's `MultiHeadAttention`.

Flax reads the signature: linen passes only arguments that it finds there by name, so every one that it has is listed,
also those that are refused. This module needs no Flax to be imported.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_fa4 import checks
from jax_fa4.jax_nn import dot_product_attention

__all__ = ["attention_fn"]


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
) -> jax.Array:
    """Attention as a Flax module calls it.

    Shape letters: *B any number of batch axes, T queries, S keys, N query heads, K kv heads (N a multiple of K), D and
    E head dims of query and value.

    `is_causal=True` is the fast way to a causal mask: it reads no mask array and skips the blocks above the diagonal.
    Rows without any visible key give 0; Flax's own attention gives them the mean of all values.

    Args:
      query: [*B, T, N, D].
      key: [*B, S, K, D].
      value: [*B, S, K, E].
      bias: broadcastable to [*B, N, T, S]; added to the scaled scores.
      mask: bool or any number, broadcastable to [*B, N, T, S]; a key is visible where it is not 0.
      dropout_rng: unused, since no dropout runs here.
      dropout_rate: must be 0 unless `deterministic`.
      broadcast_dropout: unused, for the same reason.
      deterministic: True says that dropout is off. It has nothing to do with the reproducibility of gradients.
      dtype: what query, key and value are cast to, and the result's dtype; None promotes the three to a common one.
      precision: accepted; products of float32 are never taken at less than full precision, and those of 16-bit floats
        are summed in float32.
      module: refused unless None; Flax passes it to store the attention weights, which are never formed.
      force_fp32_for_softmax: accepted; the softmax is float32 in any case.
      qk_attn_weights_einsum: refused unless None.
      attn_weights_value_einsum: refused unless None.
      is_causal: query i sees keys 0 to i, counted from the first query and the first key, as in `jax.nn`. Ignored for a
        single query that comes with a mask: that is a step of decoding, whose mask says which cache slots are filled.
      input_positions: refused unless None; rotate query and key before the call.

    Returns:
      [*B, T, N, E].

    Raises:
      TypeError: an argument has the wrong type or dtype; the message names it.
      ValueError: an argument that is refused, or a shape that doesn't fit; the message names it.
      NotImplementedError: for live dropout or stored attention weights.

    >>> from flax import nnx
    >>> layer = nnx.MultiHeadAttention(2, 32, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 8, 32)), is_causal=True).shape
    (1, 8, 32)
    """
    del dropout_rng, broadcast_dropout, precision, force_fp32_for_softmax
    _refuse_dropout(dropout_rate, deterministic)
    _refuse_stored_weights(module)
    _refuse_einsums(qk_attn_weights_einsum=qk_attn_weights_einsum, attn_weights_value_einsum=attn_weights_value_einsum)
    _refuse_positions(input_positions)

    is_causal = checks.flag("is_causal", is_causal)
    query, key, value = _promoted({"query": query, "key": key, "value": value}, dtype)
    if mask is not None:
        mask = checks.array("mask", mask) != 0  # Flax's `make_causal_mask` and its decoding make float32 zeros and ones
        if query.shape[-3:-2] == (1,):
            is_causal = False  # Flax 0.12.8 still sets it when it decodes
    return cast(jax.Array, dot_product_attention(query, key, value, bias, mask, is_causal=is_causal))


def _promoted(operands: dict[str, Any], dtype: DTypeLike | None) -> list[jax.Array]:
    """Casts all to `dtype`, or to their common dtype."""
    arrays = [checks.array(name, x) for name, x in operands.items()]
    common = jnp.result_type(*arrays) if dtype is None else _known_dtype(dtype)
    return [x.astype(common) for x in arrays]


def _known_dtype(dtype: Any) -> np.dtype:
    try:
        return jnp.dtype(dtype)
    except TypeError:
        checks.fail(TypeError, "dtype must be None or a dtype", repr(dtype))


def _refuse_dropout(rate: Any, deterministic: Any) -> None:
    is_off = isinstance(rate, int | float | np.number) and rate == 0
    if not (is_off or (isinstance(deterministic, bool | np.bool_) and deterministic)):
        raise NotImplementedError(
            f"jax_fa4 has no dropout on attention weights: dropout_rate must be 0 or deterministic True, got {rate!r} "
            f"and {deterministic!r}. Drop the layer's output instead, or keep Flax's own attention_fn for this layer"
        )


def _refuse_stored_weights(module: Any) -> None:
    if module is not None:
        raise NotImplementedError(
            "sow_weights=True asks for the attention weights, but jax_fa4 never forms them. "
            "Keep Flax's own attention_fn for a call that stores them"
        )


def _refuse_einsums(**einsums: Any) -> None:
    for name, einsum in einsums.items():
        if einsum is not None:
            raise ValueError(f"{name} must be None: jax_fa4 computes both products itself, got {einsum}")


def _refuse_positions(input_positions: jax.Array | None) -> None:
    if input_positions is not None:
        raise ValueError(
            "input_positions must be None: jax_fa4 applies no rotary embedding. Wrap attention_fn in a function that "
            "rotates query and key first"
        )
