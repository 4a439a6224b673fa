"""What every argument of the public calls may be, and the text that a user reads when it is something else.

One form for all: `<argument> must <be what>, got <what came>[; <hint>]`. A wrong kind of value is a TypeError, a wrong
value or shape a ValueError. Checks see shapes, dtypes and Python numbers; they never read an array of a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "append",
    "array",
    "broadcastable",
    "choice",
    "fail",
    "flag",
    "fused",
    "head_dims",
    "integers",
    "lengths",
    "mask_and_bias",
    "max_seqlen",
    "names",
    "offset",
    "offsets",
    "page_table",
    "paged_queries",
    "pages",
    "parts",
    "positive",
    "query_key_value",
    "segment_ids",
    "sequence_lengths",
    "sinks",
    "window",
]

LETTERS = {
    "BTNH": "[*batch, seq, heads, head_dim]",
    "BNTH": "[*batch, heads, seq, head_dim]",
    "packed": "[total, heads, head_dim]",
}
FUSED = "[*batch, seq, 3, heads, head_dim]"
PAGES = "[num_pages, page_size, kv_heads, head_dim]"
DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
LARGEST_POSITION = 2**30  # of windows and offsets, so that sums of three of them stay within int32


def fail(kind: type[Exception], what: str, got: object, hint: str = "") -> NoReturn:
    """Raises `kind` in this module's form."""
    raise kind(f"{what}, got {got}{'; ' if hint else ''}{hint}")


def array(name: str, value: Any) -> jax.Array:
    """An array of JAX or numpy, or an object that JAX turns into one, as a JAX array."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(name, value)
    if hasattr(value, "__jax_array__"):
        return jnp.asarray(value)
    fail(TypeError, f"{name} must be an array", _described(value))


def _of_numpy(name: str, value: np.ndarray | np.generic) -> jax.Array:
    try:
        if value.dtype != jax.dtypes.float0:
            return jnp.asarray(value)
    except (TypeError, ValueError):  # the first for a dtype, the second for a masked array
        pass
    kind = "float0" if value.dtype == jax.dtypes.float0 else value.dtype.name
    fail(TypeError, f"{name} must be an array that JAX can hold", f"{type(value).__name__} of {kind}")


def flag(name: str, value: Any) -> bool:
    """A bool that is known when the program is traced."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    hint = "make it a static argument of the jitted function" if isinstance(value, jax.core.Tracer) else ""
    fail(TypeError, f"{name} must be a Python bool", _described(value), hint)


def choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """One of a few words."""
    if not (value is None or isinstance(value, str)):
        fail(TypeError, f"{name} must be {_alternatives(choices)}", _described(value))
    if value not in choices:
        fail(ValueError, f"{name} must be {_alternatives(choices)}", repr(value))


def query_key_value(operands: Mapping[str, jax.Array], layout: str) -> None:
    """Query, key and value in BTNH order, under the names that the user knows; `layout` is that of user's arrays.

    "packed" is the layout without any batch axis.
    """
    (q_name, q), (k_name, k), (v_name, v) = operands.items()
    letters = LETTERS[layout]
    for name, x in operands.items():
        _floating_dtype(name, x)
        if layout == "packed" and x.ndim != 3:
            fail(ValueError, f"{name} must have 3 axes {letters}", f"shape {x.shape}")
        if x.ndim < 3:
            fail(ValueError, f"{name} must have at least 3 axes {letters}", f"shape {_given(x, layout)}")
    for name, x in (k_name, k), (v_name, v):
        _dtype_of(name, x, q_name, q)
        if x.ndim != q.ndim:
            fail(ValueError, f"{name} must have {q.ndim} axes as {q_name}", f"shape {_given(x, layout)}")
        if x.shape[:-3] != q.shape[:-3]:
            fail(ValueError, f"{name} must have {q_name}'s batch axes {q.shape[:-3]}", x.shape[:-3])
    if v.shape[-3] != k.shape[-3]:
        fail(ValueError, f"{v_name} must have {k_name}'s length {k.shape[-3]}", v.shape[-3])
    if v.shape[-2] != k.shape[-2]:
        fail(ValueError, f"{v_name} must have {k_name}'s {k.shape[-2]} heads", v.shape[-2])
    _queries_of_keys(q_name, q, k_name, k, "" if layout == "packed" else f"layout={layout!r} means {letters}")


def fused(qkv: jax.Array) -> jax.Array:
    """Queries, keys and values of the same heads in one array."""
    _floating_dtype("qkv", qkv)
    if qkv.ndim < 4 or qkv.shape[-3] != 3:
        fail(ValueError, f"qkv must have axes {FUSED}", f"shape {qkv.shape}")
    head_dims({"qkv": qkv})
    return qkv


def names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Keyword arguments that a call has."""
    if unknown := sorted(set(given) - set(known)):
        fail(TypeError, f"an {what} must be one of {', '.join(sorted(known))}", unknown[0])


def pages(operands: Mapping[str, jax.Array]) -> None:
    """Pools of pages of keys and of values."""
    (k_name, k), (v_name, v) = operands.items()
    for name, x in operands.items():
        _floating_dtype(name, x)
        if x.ndim != 4:
            fail(ValueError, f"{name} must have 4 axes {PAGES}", f"shape {x.shape}")
    _dtype_of(v_name, v, k_name, k)
    for axis, what in enumerate(("pages", "rows a page", "heads")):
        if v.shape[axis] != k.shape[axis]:
            fail(ValueError, f"{v_name} must have {k_name}'s {k.shape[axis]} {what}", v.shape[axis])
    if 0 in k.shape[:2]:
        fail(ValueError, f"{k_name} must have a page or more, and a row or more in each", f"shape {k.shape}")


def paged_queries(q: jax.Array, k_pages: jax.Array, packed: bool) -> None:
    """Queries of keys in pages: a padded batch of sequences, or a packed row of them."""
    axes, letters = (3, LETTERS["packed"]) if packed else (4, "[batch, seq, heads, head_dim]")
    _dtype_of("k_pages", k_pages, "q", q)
    if q.ndim != axes:
        hint = "" if packed else "one query a sequence is q[:, None], packed queries need cu_seqlens_q"
        fail(ValueError, f"q must have {axes} axes {letters}", f"shape {q.shape}", hint)
    _queries_of_keys("q", q, "k_pages", k_pages, "")


def page_table(value: Any, num_sequences: int | None) -> jax.Array:
    """[batch, pages] indices of pages, for as many sequences as there are queries of."""
    x = _int32("page_table", value)
    if x.ndim != 2:
        fail(ValueError, "page_table must have 2 axes [batch, pages of a sequence]", f"shape {x.shape}")
    if num_sequences is not None and x.shape[0] != num_sequences:
        fail(ValueError, f"page_table must have a row for each of {num_sequences} sequences", x.shape[0])
    return x


def append(k: jax.Array, v: jax.Array, k_pages: jax.Array, v_pages: jax.Array, packed: bool) -> None:
    """New keys and values, in the form of the queries that they come with."""
    axes, letters = (3, LETTERS["packed"]) if packed else (4, "[batch, seq, heads, head_dim]")
    for (name, x), (pool_name, pool) in (("k", k), ("k_pages", k_pages)), (("v", v), ("v_pages", v_pages)):
        _dtype_of(name, x, pool_name, pool)
        if x.ndim != axes:
            fail(ValueError, f"{name} must have {axes} axes {letters}", f"shape {x.shape}")
        if x.shape[-2:] != pool.shape[-2:]:
            what = f"{name} must have {pool_name}'s heads and head_dim {pool.shape[-2:]}"
            fail(ValueError, what, x.shape[-2:])
    if v.shape[:-2] != k.shape[:-2]:
        fail(ValueError, f"v must have k's {axes - 2} first axes {k.shape[:-2]}", v.shape[:-2])


def parts(outs: jax.Array, lses: jax.Array, layout: str) -> None:
    """Partial results of attention, stacked along a first axis."""
    letters = f"[parts, {LETTERS[layout][1:]}"
    _floating_dtype("outs", outs)
    _floating_dtype("lses", lses)
    if outs.ndim < 4:
        fail(ValueError, f"outs must have at least 4 axes {letters}", f"shape {outs.shape}")
    *lead, a, b, _ = outs.shape
    rows = (*lead, b, a) if layout == "BTNH" else (*lead, a, b)
    if lses.shape != rows:
        fail(ValueError, f"lses must have the shape [parts, *batch, heads, seq] = {rows}", lses.shape)


def head_dims(operands: Mapping[str, jax.Array], step: int = 8) -> None:
    """Head dims that a kernel can have; with step=1 those that can be padded to one."""
    for name, x in operands.items():
        head_dim = x.shape[-1]
        if not isinstance(head_dim, int):
            fail(ValueError, f"{name}'s head_dim must be a number", head_dim, "other axes may be symbolic")
        if head_dim % step or not 0 < head_dim <= MAX_HEAD_DIM:
            multiple = "" if step == 1 else f"a multiple of {step} "
            hint = "pad with zeros and give softmax_scale" if head_dim < MAX_HEAD_DIM and step > 1 else ""
            rule = f"{name}'s head_dim must be {multiple}from {step} to {MAX_HEAD_DIM}"
            fail(ValueError, rule, head_dim, hint)


def positive(name: str, value: Any, dtype: Any) -> float | jax.Array:
    """A finite number above 0, also in `dtype`, or a traced one, whose value nobody sees here."""
    number = _known_number(value)
    if number is not None:
        if not 0 < number < math.inf:
            fail(ValueError, f"{name} must be finite and > 0", number)
        least, most = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
        if not least <= number <= most:
            fail(ValueError, f"{name} must be from {least:.3g} to {most:.3g}", number)
        return float(number)
    x = _rank_0(name, value, "a number")
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, f"{name} must be a real number", x.dtype.name)
    return x


def window(value: Any, name: str = "window") -> tuple[int | jax.Array | None, int | jax.Array | None]:
    """(left, right), each None, a number >= 0 or a traced one; None for the pair is (None, None)."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else _described(value)
        fail(TypeError, f"{name} must be None or a pair (left, right)", got)
    left, right = (_bound(f"{name}[{i}]", w) for i, w in enumerate(value))
    return left, right


def _bound(name: str, value: Any) -> int | jax.Array | None:
    if value is None:
        return None
    number = _known_number(value)
    if isinstance(number, float):
        fail(TypeError, f"{name} must be None or an integer", number)
    if number is not None:
        if number < 0:
            fail(ValueError, f"{name} must be None or >= 0", number, "None is unbounded")
        return min(number, LARGEST_POSITION)  # wider than any sequence is
    return _integer_dtype(name, _rank_0(name, value, "None, an integer"))


def offset(value: Any, batch: tuple[int, ...]) -> jax.Array:
    """q_offset: an integer, or integers that broadcast to the batch."""
    number = _known_number(value)
    if isinstance(number, float):
        fail(TypeError, "q_offset must hold integers", number)
    if number is not None and abs(number) > LARGEST_POSITION:
        fail(ValueError, "q_offset must be within +-2**30", number)
    if (
        isinstance(value, np.ndarray)
        and (furthest := _furthest(value, -LARGEST_POSITION, LARGEST_POSITION)) is not None
    ):
        fail(ValueError, "q_offset must be within +-2**30", furthest)
    return integers("q_offset", value if number is None else np.asarray(number, np.int32), batch, "[*batch]")


def lengths(name: str, value: Any, batch: tuple[int, ...], limit: int, letters: str = "[*batch]") -> jax.Array:
    """Lengths that broadcast to the batch; those given as numbers or by numpy must not exceed the array's length."""
    if _known_number(value) is not None:
        value = np.asarray(value)
    is_known = isinstance(value, np.ndarray) and isinstance(limit, int)  # neither traced nor of symbolic length
    if is_known and (furthest := _furthest(value, 0, limit)) is not None:
        fail(ValueError, f"{name} must be from 0 to {limit}", furthest)
    return integers(name, value, batch, letters)


def sequence_lengths(name: str, value: Any, num_sequences: int, limit: int, letters: str) -> jax.Array:
    """A length for each of some sequences."""
    return jnp.broadcast_to(lengths(name, value, (num_sequences,), limit, letters), (num_sequences,))


def offsets(name: str, value: Any, total: int, num_sequences: int | None = None) -> jax.Array:
    """Where each of some packed sequences begins, and the last one ends; those given by numpy must fit the array."""
    x = _int32(name, value)
    if x.ndim != 1 or not x.shape[0]:
        fail(ValueError, f"{name} must have 1 axis, of one entry more than there are sequences", f"shape {x.shape}")
    if num_sequences is not None and x.shape[0] != num_sequences + 1:
        fail(ValueError, f"{name} must have {num_sequences + 1} entries, one more than sequences", x.shape[0])
    if isinstance(value, np.ndarray) and isinstance(total, int):  # no symbolic length
        if (np.diff(value.astype(np.int64)) < 0).any():
            fail(ValueError, f"{name} must not descend", value.tolist())
        for known in value[0].item(), value[-1].item():
            if not 0 <= known <= total:
                fail(ValueError, f"{name} must be from 0 to {total}", known)
    return x


def max_seqlen(name: str, value: Any) -> None:
    """A bound that a caller may know and nothing here depends on: a number or a traced one."""
    if value is None:
        return
    number = _known_number(value)
    if isinstance(number, float):
        fail(TypeError, f"{name} must be None or an integer", number)
    if number is None:
        _integer_dtype(name, _rank_0(name, value, "None, an integer"))
    elif number < 0:
        fail(ValueError, f"{name} must be None or >= 0", number)


def integers(name: str, value: Any, shape: tuple[int, ...], letters: str) -> jax.Array:
    """An integer array that broadcasts to `shape`, with all its axes, as int32."""
    return broadcastable(name, _int32(name, value), shape, letters)


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
        x = integers(name, value, (*batch, size), f"[*batch, {letter}]")
        if x.shape[-1] != size:
            fail(ValueError, f"{name} must have {size} entries in its last axis", x.shape[-1])
        ids.append(x)
    return ids[0], ids[1]


def sinks(value: Any, batch: tuple[int, ...], heads: int) -> jax.Array:
    """One logit per query head."""
    x = _floating_dtype("sinks", array("sinks", value))
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
        bias = _floating_dtype("bias", bias)
        bias = _full_last_axis(broadcastable("bias", bias, shape, "[*batch, N, T, S]"), shape[-1])
    return mask, bias


def broadcastable(name: str, x: jax.Array, shape: tuple[int, ...], letters: str) -> jax.Array:
    """x with axes of size 1 in front until it has as many as `shape`, to which it must broadcast."""
    fits = x.ndim <= len(shape) and all(
        n in (1, full) for n, full in zip(x.shape, shape[len(shape) - x.ndim :], strict=True)
    )
    if not fits:
        fail(ValueError, f"{name} must broadcast to {letters} = {shape}", f"shape {x.shape}")
    return x.reshape((1,) * (len(shape) - x.ndim) + x.shape)


def _dtype_of(name: str, x: jax.Array, of_name: str, of: jax.Array) -> None:
    if x.dtype != of.dtype:
        fail(TypeError, f"{name} must have {of_name}'s dtype {of.dtype.name}", x.dtype.name, "cast one of them")


def _queries_of_keys(q_name: str, q: jax.Array, k_name: str, k: jax.Array, hint: str) -> None:
    if k.shape[-1] != q.shape[-1]:
        fail(ValueError, f"{k_name} must have {q_name}'s head_dim {q.shape[-1]}", k.shape[-1])
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    if q_heads % kv_heads if kv_heads else q_heads:
        fail(ValueError, f"{q_name} must have a multiple of {k_name}'s {kv_heads} heads", q_heads, hint)


def _full_last_axis(x: jax.Array, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (*x.shape[:-1], size))


def _rank_0(name: str, value: Any, accepted: str) -> jax.Array:
    if not (isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")):
        fail(TypeError, f"{name} must be {accepted} or an array of rank 0", _described(value))
    x = array(name, value)
    if x.ndim:
        fail(ValueError, f"{name} must be {accepted} or an array of rank 0", f"shape {x.shape}")
    return x


def _int32(name: str, value: Any) -> jax.Array:
    """An integer array as int32, which must hold what can be read of it here."""
    x = _integer_dtype(name, array(name, value))
    limits = np.iinfo(np.int32)
    if isinstance(value, np.ndarray) and (furthest := _furthest(value, limits.min, limits.max)) is not None:
        fail(ValueError, f"{name} must hold 32-bit integers", furthest)
    return x.astype(jnp.int32)


def _furthest(value: np.ndarray, lowest: int, highest: int) -> int | None:
    """The least or greatest of the integers `value` if it is outside the bounds, else None."""
    if value.dtype.kind not in "iu" or not value.size:
        return None
    extremes = value.min().item(), value.max().item()
    return next((n for n in extremes if not lowest <= n <= highest), None)


def _integer_dtype(name: str, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, f"{name} must hold integers", x.dtype.name)
    return x


def _floating_dtype(name: str, x: jax.Array) -> jax.Array:
    if x.dtype.name not in DTYPES:
        fail(TypeError, f"{name} must be {_alternatives(DTYPES, quote=False)}", x.dtype.name)
    return x


def _known_number(value: Any) -> int | float | None:
    """The value of a number that can be read without a device, Python's or numpy's; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, np.generic | np.ndarray):
        number: int | float | None = value.item() if value.ndim == 0 and value.dtype.kind in "iuf" else None
        return number
    return value if isinstance(value, int | float) else None


def _given(x: jax.Array, layout: str) -> tuple[int, ...]:
    """The shape as the user wrote it."""
    if layout == "BTNH" or x.ndim < 3:
        return x.shape
    return (*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1])


def _described(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return "a traced value"
    if isinstance(value, jax.Array):
        return "an array"
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, bool | int | float | str | None) else kind


def _alternatives(choices: Sequence[str | None], quote: bool = True) -> str:
    words = [repr(c) if quote else str(c) for c in choices]
    return f"{', '.join(words[:-1])} or {words[-1]}"
