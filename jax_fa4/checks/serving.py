"""What packed sequences, pages of keys and partial results are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.checks.operands import LETTERS, queries_of_keys
from jax_fa4.checks.options import lengths
from jax_fa4.checks.values import dtype_of, fail, floating_dtype, int32, integer_dtype, known_number, rank_0

__all__ = [
    "append",
    "max_seqlen",
    "offsets",
    "packed_page_table",
    "page_table",
    "paged_queries",
    "pages",
    "parts",
    "sequence_lengths",
]

INT32_MAX = 2**31 - 1
PAGES = "[num_pages, page_size, kv_heads, head_dim]"


def pages(operands: Mapping[str, jax.Array]) -> None:
    """Pools of pages of keys and of values."""
    (k_name, k), (v_name, v) = operands.items()
    for name, x in operands.items():
        floating_dtype(name, x)
        if x.ndim != 4:
            fail(ValueError, f"{name} must have 4 axes {PAGES}", f"shape {x.shape}")
    dtype_of(v_name, v, k_name, k)
    for axis, what in enumerate(("pages", "rows a page", "heads")):
        if v.shape[axis] != k.shape[axis]:
            fail(ValueError, f"{v_name} must have {k_name}'s {k.shape[axis]} {what}", v.shape[axis])
    if 0 in k.shape[:2]:
        fail(ValueError, f"{k_name} must have a page or more, and a row or more in each", f"shape {k.shape}")


def paged_queries(q: jax.Array, k_pages: jax.Array, packed: bool) -> None:
    """Queries of keys in pages: a padded batch of sequences, or a packed row of them."""
    axes, letters = (3, LETTERS["packed"]) if packed else (4, "[batch, seq, heads, head_dim]")
    dtype_of("k_pages", k_pages, "q", q)
    if q.ndim != axes:
        hint = "" if packed else "one query a sequence is q[:, None], packed queries need cu_seqlens_q"
        fail(ValueError, f"q must have {axes} axes {letters}", f"shape {q.shape}", hint)
    queries_of_keys("q", q, "k_pages", k_pages, "")


def page_table(value: Any, num_sequences: int | None) -> jax.Array:
    """[batch, pages] indices of pages, for as many sequences as there are queries of."""
    x = int32("page_table", value)
    if x.ndim != 2:
        fail(ValueError, "page_table must have 2 axes [batch, pages of a sequence]", f"shape {x.shape}")
    if num_sequences is not None and x.shape[0] != num_sequences:
        fail(ValueError, f"page_table must have a row for each of {num_sequences} sequences", x.shape[0])
    return x


def packed_page_table(page_table: jax.Array, page_size: int) -> None:
    """That of packed queries, for which all sequences' keys are numbered together."""
    size = page_table.size * page_size
    if isinstance(size, int) and size > INT32_MAX:  # no symbolic size
        what = f"page_table must name places for up to {INT32_MAX} keys of all sequences with cu_seqlens_q"
        fail(ValueError, what, f"{page_table.shape} pages of {page_size}")


def append(k: jax.Array, v: jax.Array, k_pages: jax.Array, v_pages: jax.Array, packed: bool) -> None:
    """New keys and values, in the form of the queries that they come with."""
    axes, letters = (3, LETTERS["packed"]) if packed else (4, "[batch, seq, heads, head_dim]")
    for (name, x), (pool_name, pool) in (("k", k), ("k_pages", k_pages)), (("v", v), ("v_pages", v_pages)):
        dtype_of(name, x, pool_name, pool)
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
    floating_dtype("outs", outs)
    floating_dtype("lses", lses)
    if outs.ndim < 4:
        fail(ValueError, f"outs must have at least 4 axes {letters}", f"shape {outs.shape}")
    *lead, a, b, _ = outs.shape
    rows = (*lead, b, a) if layout == "BTNH" else (*lead, a, b)
    if lses.shape != rows:
        fail(ValueError, f"lses must have the shape [parts, *batch, heads, seq] = {rows}", lses.shape)


def sequence_lengths(name: str, value: Any, num_sequences: int, limit: int, letters: str) -> jax.Array:
    """A length for each of some sequences."""
    return jnp.broadcast_to(lengths(name, value, (num_sequences,), limit, letters), (num_sequences,))


def offsets(name: str, value: Any, total: int, num_sequences: int | None = None) -> jax.Array:
    """Where each of some packed sequences begins, and the last one ends; those given by numpy must fit the array."""
    x = int32(name, value)
    if x.ndim != 1 or not x.shape[0]:
        fail(ValueError, f"{name} must have 1 axis, of one entry more than there are sequences", f"shape {x.shape}")
    if num_sequences is not None and x.shape[0] != num_sequences + 1:
        fail(ValueError, f"{name} must have {num_sequences + 1} entries, one more than sequences", x.shape[0])
    if isinstance(value, np.ndarray) and isinstance(total, int):  # no symbolic length
        descents = np.flatnonzero(np.diff(value.astype(np.int64)) < 0)
        if descents.size:
            first = int(descents[0])
            got = f"{value[first + 1]} behind {value[first]}"
            fail(ValueError, f"{name} must not descend", f"{got}, at {first + 1}")
        for known in value[0].item(), value[-1].item():
            if not 0 <= known <= total:
                fail(ValueError, f"{name} must be from 0 to {total}", known)
    return x


def max_seqlen(name: str, value: Any) -> None:
    """A bound that a caller may know and nothing here depends on: a number or a traced one."""
    if value is None:
        return
    number = known_number(value)
    if isinstance(number, float):
        fail(TypeError, f"{name} must be None or an integer", number)
    if number is None:
        integer_dtype(name, rank_0(name, value, "None, an integer"))
    elif number < 0:
        fail(ValueError, f"{name} must be None or >= 0", number)
