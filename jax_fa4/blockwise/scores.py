"""Scores of all queries against one block of keys; backward and tangent differentiate these very functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.blocks import Blocks
from jax_fa4.blockwise.heads import accumulator_dtype, per_batch, split_bias_heads
from jax_fa4.blockwise.mask import Spans, seen_keys, visible
from jax_fa4.blockwise.pages import rows_of_pages
from jax_fa4.operands import Operands

__all__ = ["KeyBlock", "ScoreInputs", "contract", "key_block", "key_blocks", "own_settings", "scaled_queries", "scores"]

R = TypeVar("R")


class KeyBlock(NamedTuple):
    """What belongs to one block of keys, in accumulator precision; keys that no query sees are zero."""

    k: jax.Array  # [*B, keys, K, D]
    v: jax.Array  # [*B, keys, K, E]
    bias: jax.Array | None  # [*B, K, G, T, keys] or 1 in place of an axis, as is visible
    visible: jax.Array | None  # None: every query sees every key


class ScoreInputs(NamedTuple):
    """What the scores of a block are a function of; also their tangents or cotangents."""

    q: jax.Array  # [*B, K, G, T, D], scaled
    k: jax.Array  # [*B, keys, K, D]
    softcap: jax.Array | None
    bias: jax.Array | None  # as in KeyBlock


def key_blocks(x: Operands) -> Blocks:
    """The cut of the keys; pages stay whole."""
    return Blocks.of(x.seqlen_k, step=1 if x.page_table is None else x.k.shape[-3])


def key_block(x: Operands, within: Spans | None, blocks: Blocks, first: jax.Array) -> KeyBlock:
    """The block that owns the keys from `first`."""
    dtype = accumulator_dtype(x)
    see = visible(x, within, blocks, first)
    k, v = (_rows(x, a, blocks, first).astype(dtype) for a in (x.k, x.v))
    if see is not None:
        seen = seen_keys(see)
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    bias = None
    if x.bias is not None:
        bias = split_bias_heads(blocks.slice(x.bias, first, axis=-1), x).astype(dtype)
    return KeyBlock(k, v, bias, see)


def _rows(x: Operands, a: jax.Array, blocks: Blocks, first: jax.Array) -> jax.Array:
    if x.page_table is None:
        return blocks.slice(a, first, axis=-3)
    return rows_of_pages(a, x.page_table, blocks, first)


def scores(of: ScoreInputs, visible: jax.Array | None) -> jax.Array:
    """[*B, K, G, T, keys]: softcap * tanh(q.k / softcap) + bias, and -inf at invisible keys."""
    s = contract("...kgtd,...skd->...kgts", of.q, of.k)
    if of.softcap is not None:
        cap = per_batch(of.softcap).astype(s.dtype)
        s = cap * jnp.tanh(s / cap)
    if of.bias is not None:
        s = s + of.bias
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def scaled_queries(q: jax.Array, softmax_scale: jax.Array) -> jax.Array:
    """The scale is applied to the queries [*B, K, G, T, D], which are fewer than the scores."""
    return q * per_batch(softmax_scale).astype(q.dtype)


def contract(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two arrays in accumulator precision."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=a.dtype)


def own_settings(function: Callable[..., R]) -> Callable[..., R]:
    """Traces `function(x, ...)` under settings of its own, whatever the user's are.

    Products are as exact as the operands' dtype asks for: by default a GPU keeps 10 mantissa bits of a float32 factor,
    which is all that bfloat16 and float16 operands have. Ranks and dtypes are promoted as JAX does by default.
    """

    @functools.wraps(function)
    def traced(x: Operands, *args: Any) -> R:
        precision = "default" if x.q.dtype.itemsize == 2 else "highest"
        with (
            jax.default_matmul_precision(precision),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
        ):
            return function(x, *args)

    return traced
