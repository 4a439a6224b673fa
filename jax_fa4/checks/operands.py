"""Queries, keys and values, alone or in one array."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jax_fa4.checks.values import dtype_of, fail, floating_dtype

__all__ = ["LETTERS", "fused", "head_dims", "queries_of_keys", "query_key_value"]

LETTERS = {
    "BTNH": "[*batch, seq, heads, head_dim]",
    "BNTH": "[*batch, heads, seq, head_dim]",
    "packed": "[total, heads, head_dim]",
}
FUSED = "[*batch, seq, 3, heads, head_dim]"
MAX_HEAD_DIM = 256


def query_key_value(operands: Mapping[str, jax.Array], layout: str) -> None:
    """Query, key and value in BTNH order, under the names that the user knows; `layout` is that of user's arrays.

    "packed" is the layout without any batch axis.
    """
    (q_name, q), (k_name, k), (v_name, v) = operands.items()
    letters = LETTERS[layout]
    for name, x in operands.items():
        floating_dtype(name, x)
        if layout == "packed" and x.ndim != 3:
            fail(ValueError, f"{name} must have 3 axes {letters}", f"shape {x.shape}")
        if x.ndim < 3:
            fail(ValueError, f"{name} must have at least 3 axes {letters}", f"shape {_given(x, layout)}")
    for name, x in (k_name, k), (v_name, v):
        dtype_of(name, x, q_name, q)
        if x.ndim != q.ndim:
            fail(ValueError, f"{name} must have {q.ndim} axes as {q_name}", f"shape {_given(x, layout)}")
        if x.shape[:-3] != q.shape[:-3]:
            fail(ValueError, f"{name} must have {q_name}'s batch axes {q.shape[:-3]}", x.shape[:-3])
    if v.shape[-3] != k.shape[-3]:
        fail(ValueError, f"{v_name} must have {k_name}'s length {k.shape[-3]}", v.shape[-3])
    if v.shape[-2] != k.shape[-2]:
        fail(ValueError, f"{v_name} must have {k_name}'s {k.shape[-2]} heads", v.shape[-2])
    queries_of_keys(q_name, q, k_name, k, "" if layout == "packed" else f"layout={layout!r} means {letters}")


def fused(qkv: jax.Array) -> jax.Array:
    """Queries, keys and values of the same heads in one array."""
    floating_dtype("qkv", qkv)
    if qkv.ndim < 4 or qkv.shape[-3] != 3:
        fail(ValueError, f"qkv must have axes {FUSED}", f"shape {qkv.shape}")
    head_dims({"qkv": qkv})
    return qkv


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


def queries_of_keys(q_name: str, q: jax.Array, k_name: str, k: jax.Array, hint: str) -> None:
    if k.shape[-1] != q.shape[-1]:
        fail(ValueError, f"{k_name} must have {q_name}'s head_dim {q.shape[-1]}", k.shape[-1])
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    if q_heads % kv_heads if kv_heads else q_heads:
        fail(ValueError, f"{q_name} must have a multiple of {k_name}'s {kv_heads} heads", q_heads, hint)


def _given(x: jax.Array, layout: str) -> tuple[int, ...]:
    """The shape as the user wrote it."""
    if layout == "BTNH" or x.ndim < 3:
        return x.shape
    return (*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1])
