"""Options of attention: numbers, places, lengths, and arrays that restrict or change scores."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.checks.values import (
    array,
    broadcastable,
    cut_to_int32,
    described,
    fail,
    floating_dtype,
    integer_dtype,
    integers,
    known_number,
    outlier,
    rank_0,
)

__all__ = ["lengths", "mask_and_bias", "offset", "positive", "segment_ids", "sinks", "window"]

LARGEST_POSITION = 2**30  # of windows and offsets, so that sums of three of them stay within int32


def positive(name: str, value: Any, dtype: Any) -> float | jax.Array:
    """A finite number above 0, also in `dtype`, or a traced one, whose value nobody sees here."""
    number = known_number(value)
    if number is not None:
        if not 0 < number < math.inf:
            fail(ValueError, f"{name} must be finite and > 0", number)
        least, most = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
        if not least <= number <= most:
            fail(ValueError, f"{name} must be from {least:.3g} to {most:.3g}", number)
        return float(number)
    x = rank_0(name, value, "a number")
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, f"{name} must be a real number", x.dtype.name)
    return x


def window(value: Any, name: str = "window") -> tuple[int | jax.Array | None, int | jax.Array | None]:
    """(left, right), each None, a number >= 0 or a traced one; None for the pair is (None, None)."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else described(value)
        fail(TypeError, f"{name} must be None or a pair (left, right)", got)
    left, right = (_bound(f"{name}[{i}]", w) for i, w in enumerate(value))
    return left, right


def _bound(name: str, value: Any) -> int | jax.Array | None:
    if value is None:
        return None
    number = known_number(value)
    if isinstance(number, float):
        fail(TypeError, f"{name} must be None or an integer", number)
    if number is not None:
        if number < 0:
            fail(ValueError, f"{name} must be None or >= 0", number, "None is unbounded")
        return min(number, LARGEST_POSITION)  # wider than any sequence is
    return cut_to_int32(integer_dtype(name, rank_0(name, value, "None, an integer")))


def offset(value: Any, batch: tuple[int, ...]) -> jax.Array:
    """q_offset: an integer, or integers that broadcast to the batch."""
    number = known_number(value)
    if isinstance(number, float):
        fail(TypeError, "q_offset must hold integers", number)
    if number is not None and abs(number) > LARGEST_POSITION:
        fail(ValueError, "q_offset must be within +-2**30", number)
    if isinstance(value, np.ndarray) and (furthest := outlier(value, -LARGEST_POSITION, LARGEST_POSITION)) is not None:
        fail(ValueError, "q_offset must be within +-2**30", furthest)
    return integers("q_offset", value if number is None else np.asarray(number, np.int32), batch, "[*batch]")


def lengths(name: str, value: Any, batch: tuple[int, ...], limit: int, letters: str = "[*batch]") -> jax.Array:
    """Lengths that broadcast to the batch; those given as numbers or by numpy must not exceed the array's length."""
    if known_number(value) is not None:
        value = np.asarray(value)
    is_known = isinstance(value, np.ndarray) and isinstance(limit, int)  # neither traced nor of symbolic length
    if is_known and (furthest := outlier(value, 0, limit)) is not None:
        fail(ValueError, f"{name} must be from 0 to {limit}", furthest)
    return integers(name, value, batch, letters)


def segment_ids(q_ids: Any, kv_ids: Any, batch: tuple[int, ...], t: int, s: int) -> tuple[jax.Array, jax.Array]:
    """Segment ids of queries and keys; one without the other means nothing."""
    for name, given, other in ("q_segment_ids", q_ids, kv_ids), ("kv_segment_ids", kv_ids, q_ids):
        if given is None and other is not None:
            fail(
                ValueError,
                f"{name} must be given with the other segment ids",
                None,
                "self-attention passes the same twice",
            )
    ids = []
    for name, value, size, letter in ("q_segment_ids", q_ids, t, "T"), ("kv_segment_ids", kv_ids, s, "S"):
        x = integers(name, value, (*batch, size), f"[*batch, {letter}]", are_ids=True)
        if x.shape[-1] != size:
            fail(ValueError, f"{name} must have {size} entries in its last axis", x.shape[-1])
        ids.append(x)
    return ids[0], ids[1]


def sinks(value: Any, batch: tuple[int, ...], heads: int) -> jax.Array:
    """One logit per query head."""
    x = floating_dtype("sinks", array("sinks", value))
    x = broadcastable("sinks", x, (*batch, heads), "[N] or [*batch, N]")
    if x.shape[-1] != heads:
        fail(ValueError, f"sinks must have {heads} entries in its last axis", x.shape[-1])
    return x


def mask_and_bias(mask: Any, bias: Any, shape: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array | None]:
    """Both broadcast to [*batch, N, T, S] = `shape`; the axis of keys is made full, the others may stay 1."""
    if mask is not None:
        mask = array("mask", mask)
        if mask.dtype != jnp.bool_:
            fail(
                TypeError,
                "mask must be bool",
                mask.dtype.name,
                "numbers to add are `bias`, zeros and ones are `mask != 0`",
            )
        mask = _full_last_axis(broadcastable("mask", mask, shape, "[*batch, N, T, S]"), shape[-1])
    if bias is not None:
        bias = array("bias", bias)
        if bias.dtype == jnp.bool_:
            fail(TypeError, "bias must be a floating-point array", "bool", "a boolean array is `mask`")
        bias = floating_dtype("bias", bias)
        bias = _full_last_axis(broadcastable("bias", bias, shape, "[*batch, N, T, S]"), shape[-1])
    return mask, bias


def _full_last_axis(x: jax.Array, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (*x.shape[:-1], size))
