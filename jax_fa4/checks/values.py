"""What any argument may be: kinds of values, dtypes and shapes, and the form of the message about another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "array",
    "broadcastable",
    "choice",
    "cut_to_int32",
    "described",
    "dtype_of",
    "fail",
    "flag",
    "floating_dtype",
    "int32",
    "integer_dtype",
    "integers",
    "known_number",
    "names",
    "outlier",
    "rank_0",
]

DTYPES = ("float16", "bfloat16", "float32", "float64")


def fail(kind: type[Exception], what: str, got: object, hint: str = "") -> NoReturn:
    """Raises `kind` in this package's form."""
    raise kind(f"{what}, got {got}{'; ' if hint else ''}{hint}")


def array(name: str, value: Any) -> jax.Array:
    """An array of JAX or numpy, or an object that JAX turns into one, as a JAX array."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(name, value)
    if hasattr(value, "__jax_array__"):
        return jnp.asarray(value)
    fail(TypeError, f"{name} must be an array", described(value))


def _of_numpy(name: str, value: np.ndarray | np.generic) -> jax.Array:
    try:
        if value.dtype != jax.dtypes.float0:
            return jnp.asarray(value)
    except (TypeError, ValueError):  # the first for a dtype, the second for a masked array
        pass
    kind = "float0" if value.dtype == jax.dtypes.float0 else value.dtype.name
    if not value.dtype.isnative:
        kind += " in the other byte order"
    fail(TypeError, f"{name} must be an array that JAX can hold", f"{type(value).__name__} of {kind}")


def flag(name: str, value: Any) -> bool:
    """A bool that is known when the program is traced."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    hint = "make it a static argument of the jitted function" if isinstance(value, jax.core.Tracer) else ""
    fail(TypeError, f"{name} must be a Python bool", described(value), hint)


def choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """One of a few words."""
    if not (value is None or isinstance(value, str)):
        fail(TypeError, f"{name} must be {_alternatives(choices)}", described(value))
    if value not in choices:
        fail(ValueError, f"{name} must be {_alternatives(choices)}", repr(value))


def names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Keyword arguments that a call has."""
    if unknown := sorted(set(given) - set(known)):
        fail(TypeError, f"an {what} must be one of {', '.join(sorted(known))}", unknown[0])


def rank_0(name: str, value: Any, accepted: str) -> jax.Array:
    if not (isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")):
        fail(TypeError, f"{name} must be {accepted} or an array of rank 0", described(value))
    x = array(name, value)
    if x.ndim:
        fail(ValueError, f"{name} must be {accepted} or an array of rank 0", f"shape {x.shape}")
    return x


def known_number(value: Any) -> int | float | None:
    """The value of a number that can be read without a device, Python's or numpy's; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, np.generic | np.ndarray):
        number: int | float | None = value.item() if value.ndim == 0 and value.dtype.kind in "iuf" else None
        return number
    return value if isinstance(value, int | float) else None


def integer_dtype(name: str, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, f"{name} must hold integers", x.dtype.name)
    return x


def int32(name: str, value: Any, *, are_ids: bool = False) -> jax.Array:
    """An integer array as int32, which must hold what can be read of it here; what can't be read is cut.

    `are_ids`: only which are equal matters, so those of uint32 may wrap around.
    """
    x = integer_dtype(name, array(name, value))
    if are_ids and x.dtype == jnp.uint32:
        return x.astype(jnp.int32)
    limits = np.iinfo(np.int32)
    if isinstance(value, np.ndarray) and (furthest := outlier(value, limits.min, limits.max)) is not None:
        fail(ValueError, f"{name} must hold 32-bit integers", furthest)
    return cut_to_int32(x)


def cut_to_int32(x: jax.Array) -> jax.Array:
    """Integers as int32; what that can't hold becomes its nearest number, where a cast alone would wrap around."""
    given, limits = jnp.iinfo(x.dtype), np.iinfo(np.int32)
    if given.min < limits.min:
        x = jnp.maximum(x, jnp.asarray(limits.min, x.dtype))
    if given.max > limits.max:
        x = jnp.minimum(x, jnp.asarray(limits.max, x.dtype))
    return x.astype(jnp.int32)


def outlier(value: np.ndarray, lowest: int, highest: int) -> int | None:
    """The least or greatest of the integers `value` if it is outside the bounds, else None."""
    if value.dtype.kind not in "iu" or not value.size:
        return None
    extremes = value.min().item(), value.max().item()
    return next((n for n in extremes if not lowest <= n <= highest), None)


def integers(name: str, value: Any, shape: tuple[int, ...], letters: str, *, are_ids: bool = False) -> jax.Array:
    """An integer array that broadcasts to `shape`, with all its axes, as int32; see there for `are_ids`."""
    return broadcastable(name, int32(name, value, are_ids=are_ids), shape, letters)


def floating_dtype(name: str, x: jax.Array) -> jax.Array:
    if x.dtype.name not in DTYPES:
        fail(TypeError, f"{name} must be {_alternatives(DTYPES, quote=False)}", x.dtype.name)
    return x


def dtype_of(name: str, x: jax.Array, of_name: str, of: jax.Array) -> None:
    if x.dtype != of.dtype:
        fail(TypeError, f"{name} must have {of_name}'s dtype {of.dtype.name}", x.dtype.name, "cast one of them")


def broadcastable(name: str, x: jax.Array, shape: tuple[int, ...], letters: str) -> jax.Array:
    """x with axes of size 1 in front until it has as many as `shape`, to which it must broadcast."""
    fits = x.ndim <= len(shape) and all(
        n in (1, full) for n, full in zip(x.shape, shape[len(shape) - x.ndim :], strict=True)
    )
    if not fits:
        fail(ValueError, f"{name} must broadcast to {letters} = {shape}", f"shape {x.shape}")
    return x.reshape((1,) * (len(shape) - x.ndim) + x.shape)


def described(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return "a traced value"
    if isinstance(value, jax.Array):
        return "an array"
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, bool | int | float | str | None) else kind


def _alternatives(choices: Sequence[str | None], quote: bool = True) -> str:
    words = [repr(c) if quote else str(c) for c in choices]
    return f"{', '.join(words[:-1])} or {words[-1]}"
