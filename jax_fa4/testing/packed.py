"""Packed sequences and sequences in pages by their definition: each on its own, put where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_fa4.testing.reference import Forward, attention, gradients

__all__ = ["attention_paged", "attention_varlen", "gradients_varlen"]

Array = np.ndarray[Any, Any]
SOFTMAX_OPTIONS = ("softmax_scale", "causal", "window", "softcap", "sinks")


def attention_varlen(x: Mapping[str, Any], alone: Callable[..., Forward] = attention) -> Forward:
    """`jax_fa4.attention_varlen` of its keyword arguments x: out [T, N, E] and lse [N, T].

    `alone` is what computes a sequence: `attention` in float64, or `rounded`.
    """
    (t, n, _), e = np.shape(x["q"]), np.shape(x["v"])[-1]
    out, lse = np.zeros((t, n, e)), np.full((n, t), -np.inf)
    for rows, keys in _sequences(x):
        out[rows], lse[:, rows] = alone(_part(x, rows, keys))
    return Forward(out, lse)


def gradients_varlen(
    x: Mapping[str, Any], dout: Any, dlse: Any, alone: Callable[..., dict[str, Array]] = gradients
) -> dict[str, Array]:
    """`gradients` of packed sequences; `alone` is `gradients` in float64, or `rounded_gradients`."""
    shared = [name for name in ("softmax_scale", "softcap", "sinks") if x.get(name) is not None]
    sums = {name: np.zeros(np.shape(x[name])) for name in ("q", "k", "v", *shared)}
    for rows, keys in _sequences(x):
        of = alone(_part(x, rows, keys), np.asarray(dout)[rows], np.asarray(dlse)[:, rows])
        sums["q"][rows] += of["q"]
        for name in ("k", "v"):
            sums[name][keys] += of[name]
        for name in shared:
            sums[name] += of[name]
    return sums


def attention_paged(x: Mapping[str, Any], alone: Callable[..., Forward] = attention) -> Forward:
    """`jax_fa4.attention_paged` of its keyword arguments x, which may have cu_seqlens_q: out and lse of its shapes."""
    q = np.asarray(x["q"])
    is_packed = x.get("cu_seqlens_q") is not None
    packed = q if is_packed else q.reshape(-1, *q.shape[2:])
    keys = [_rows_of(x, b) for b in range(len(x["page_table"]))]
    row = {name: x[name] for name in (*SOFTMAX_OPTIONS, "q_lengths", "kv_lengths") if x.get(name) is not None}
    row |= {
        "q": packed,
        "k": np.concatenate([k for k, _ in keys]),
        "v": np.concatenate([v for _, v in keys]),
        "causal": x.get("causal", True),
        "cu_seqlens_q": x["cu_seqlens_q"] if is_packed else np.arange(len(q) + 1) * q.shape[1],
        "cu_seqlens_kv": np.cumsum([0, *(len(k) for k, _ in keys)]),
    }
    out, lse = attention_varlen(row, alone)
    if is_packed:
        return Forward(out, lse)
    return Forward(out.reshape(*q.shape[:3], -1), np.moveaxis(lse.reshape(q.shape[2], *q.shape[:2]), 0, 1))


class _Span(NamedTuple):
    queries: slice
    keys: slice


def _sequences(x: Mapping[str, Any]) -> Iterator[_Span]:
    q_offsets, kv_offsets = x["cu_seqlens_q"], x.get("cu_seqlens_kv")
    q_lengths, kv_lengths = x.get("q_lengths"), x.get("kv_lengths")
    if kv_offsets is None:
        kv_offsets, kv_lengths = q_offsets, q_lengths if kv_lengths is None else kv_lengths
    for queries, keys in zip(_spans(q_offsets, q_lengths), _spans(kv_offsets, kv_lengths), strict=True):
        yield _Span(queries, keys)


def _spans(offsets: Any, lengths: Any) -> list[slice]:
    starts = [int(offset) for offset in offsets]
    sizes = np.diff(starts) if lengths is None else np.minimum(np.diff(starts), lengths)
    return [slice(start, start + int(size)) for start, size in zip(starts[:-1], sizes, strict=True)]


def _part(x: Mapping[str, Any], rows: slice, keys: slice) -> dict[str, Any]:
    """One sequence as keyword arguments of `attention`."""
    part = {name: x[name] for name in SOFTMAX_OPTIONS if x.get(name) is not None}
    return part | {"q": np.asarray(x["q"])[rows], "k": np.asarray(x["k"])[keys], "v": np.asarray(x["v"])[keys]}


def _rows_of(x: Mapping[str, Any], sequence: int) -> tuple[Array, Array]:
    """All rows of a sequence's pages; an index outside the pool is its nearest page."""
    pools = (np.asarray(x[name]) for name in ("k_pages", "v_pages"))
    k, v = (pool[np.clip(x["page_table"][sequence], 0, len(pool) - 1)].reshape(-1, *pool.shape[2:]) for pool in pools)
    return k, v
