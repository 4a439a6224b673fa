"""Attention and its gradients by their definitions, in numpy: exact in float64, or rounded as implementations round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Forward", "attention", "gradients", "rounded", "rounded_gradients", "visible"]

Array = np.ndarray[Any, Any]


class Forward(NamedTuple):
    """Result of attention: out in the call's layout, lse [*B, N, T] (natural log, scale included)."""

    out: Array
    lse: Array


def attention(x: Mapping[str, Any], dtype: Any = np.float64, **options: Any) -> Forward:
    """Attention by its definition, computed in `dtype`; `options` are further arguments of `jax_fa4.attention`.

    A row that sees no key: out 0, lse -inf or, with sinks, its head's sink. A row beyond q_lengths: out 0, lse -inf.
    """
    call = _Call.of({**x, **options}, np.dtype(dtype), storage=None)
    return call.forward()


def rounded(x: Mapping[str, Any], **options: Any) -> Forward:
    """The same formula as implementations compute it: float32 softmax, p and out rounded to the inputs' dtype."""
    return _Call.rounded({**x, **options}).forward()


def gradients(
    x: Mapping[str, Any], dout: Any, dlse: Any = None, dtype: Any = np.float64, **options: Any
) -> dict[str, Array]:
    """Gradients of sum(out * dout) + sum(lse * dlse), in closed form.

    Keys: q, k, v, softmax_scale and, of sinks, bias and softcap, those present, each in its argument's shape.
    Rows without a key give nothing to them, but for dlse to sinks.
    """
    return _Call.of({**x, **options}, np.dtype(dtype), storage=None).backward(dout, dlse)


def rounded_gradients(x: Mapping[str, Any], dout: Any, dlse: Any = None, **options: Any) -> dict[str, Array]:
    """`gradients` as implementations compute them: float32, with p, ds and the results in the inputs' dtype."""
    return _Call.rounded({**x, **options}).backward(dout, dlse)


def visible(x: Mapping[str, Any], **options: Any) -> Array:
    """The mask of a call written out: bool [*B, N, T, S], True where query t of head n sees key s."""
    return _Call.of({**x, **options}, np.dtype(np.float64), storage=None).visible()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """One call with q, k, v as [*B, N, T or S, D or E], kv heads repeated, in the precision `dtype`."""

    q: Array
    k: Array
    v: Array
    group: int
    dtype: np.dtype[Any]
    storage: np.dtype[Any] | None  # what p, ds and results are rounded to; None: not rounded
    scale: Array
    options: dict[str, Any]

    @classmethod
    def of(cls, x: dict[str, Any], dtype: np.dtype[Any], storage: np.dtype[Any] | None) -> _Call:
        options = dict(x)
        q, k, v = (np.asarray(options.pop(name)).astype(dtype) for name in ("q", "k", "v"))
        if options.get("layout", "BTNH") == "BTNH":
            q, k, v = (np.swapaxes(a, -3, -2) for a in (q, k, v))
        group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
        scale = options.pop("softmax_scale", None)
        return cls(
            q=q,
            k=np.repeat(k, group, axis=-3),
            v=np.repeat(v, group, axis=-3),
            group=group,
            dtype=dtype,
            storage=storage,
            scale=np.asarray(1 / math.sqrt(q.shape[-1]) if scale is None else scale, dtype),
            options=options,
        )

    @classmethod
    def rounded(cls, x: dict[str, Any]) -> _Call:
        storage = np.asarray(x["q"]).dtype
        return cls.of(x, np.dtype(np.float64 if storage == np.float64 else np.float32), storage)

    def option(self, name: str) -> Array | None:
        value = self.options.get(name)
        return None if value is None else np.asarray(value)

    def per_entry(self, name: str) -> Array | None:
        """A value per batch entry, as [*B, 1, 1, 1]."""
        value = self.option(name)
        return (
            None if value is None else np.broadcast_to(value, self.q.shape[:-3])[..., None, None, None].astype(np.int64)
        )

    def round(self, a: Array) -> Array:
        return a if self.storage is None else a.astype(self.storage).astype(self.dtype)

    def visible(self) -> Array:
        t, s = self.q.shape[-2], self.k.shape[-2]
        i, j = np.arange(t)[:, None], np.arange(s)[None, :]
        q_lengths, kv_lengths = self.per_entry("q_lengths"), self.per_entry("kv_lengths")
        shift = self.per_entry("q_offset")
        if shift is None:
            shift = np.asarray((s if kv_lengths is None else kv_lengths) - (t if q_lengths is None else q_lengths))
        left, right = self.options.get("window") or (None, None)
        right = 0 if self.options.get("causal") else right
        see = np.ones((*self.q.shape[:-3], self.q.shape[-3], t, s), bool)
        if left is not None:
            see &= j >= i + shift - int(left)
        if right is not None:
            see &= j <= i + shift + int(right)
        if q_lengths is not None:
            see &= i < q_lengths
        if kv_lengths is not None:
            see &= j < kv_lengths
        q_ids, kv_ids = self.option("q_segment_ids"), self.option("kv_segment_ids")
        if q_ids is not None and kv_ids is not None:
            see &= q_ids[..., None, :, None] == kv_ids[..., None, None, :]
        mask = self.option("mask")
        return see if mask is None else see & mask

    def weights(self) -> tuple[Array, Array, Array, Array]:
        """p (0 where hidden), lse, the sink's weight, and tanh(scaled score / softcap), which is 0 without a cap."""
        scores = (self.q @ np.swapaxes(self.k, -1, -2)) * self.scale
        cap, bias, sinks = self.option("softcap"), self.option("bias"), self.option("sinks")
        tanh = np.zeros_like(scores)
        if cap is not None:
            cap = cap.astype(self.dtype)
            tanh = np.tanh(scores / cap)
            scores = cap * tanh
        if bias is not None:
            scores = scores + bias.astype(self.dtype)
        scores = np.where(self.visible(), scores, -np.inf)
        row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            live = np.arange(scores.shape[-2])[:, None] < self.live_rows()
            sinks = np.where(live, sinks.astype(self.dtype)[..., :, None, None], -np.inf)
            row_max = np.maximum(row_max, sinks)
        empty = row_max == -np.inf
        shift = np.where(empty, 0, row_max)
        p = np.exp(scores - shift)
        sink = np.zeros_like(shift) if sinks is None else np.exp(sinks - shift)
        row_sum = p.sum(axis=-1, keepdims=True) + sink
        divisor = np.where(empty, 1, row_sum)
        lse = np.where(empty, -np.inf, shift + np.log(divisor))
        return p / divisor, lse[..., 0], (sink / divisor)[..., 0], tanh

    def live_rows(self) -> Array:
        """[*B, 1, 1, 1] or []: how many rows are no padding."""
        q_lengths = self.per_entry("q_lengths")
        return np.asarray(self.q.shape[-2]) if q_lengths is None else q_lengths

    def to_layout(self, a: Array) -> Array:
        return np.swapaxes(a, -3, -2) if self.options.get("layout", "BTNH") == "BTNH" else a

    def forward(self) -> Forward:
        p, lse, _, _ = self.weights()
        return Forward(self.to_layout(self.round(self.round(p) @ self.v)), lse)

    def backward(self, dout: Any, dlse: Any) -> dict[str, Array]:
        p, lse, sink, tanh = self.weights()
        dout = self.to_layout(np.asarray(dout).astype(self.dtype))
        dlse = np.zeros_like(lse) if dlse is None else np.where(np.isfinite(lse), np.asarray(dlse, self.dtype), 0)
        out = self.round(self.round(p) @ self.v)
        row = dlse - (out * dout).sum(axis=-1)  # what a logit's gradient gets beside dp, per row
        ds = p * (dout @ np.swapaxes(self.v, -1, -2) + row[..., None])
        raw = self.q @ np.swapaxes(self.k, -1, -2)
        cap, bias, sinks = self.option("softcap"), self.option("bias"), self.option("sinks")
        dscore = ds * (1 - tanh**2)  # by the scaled score before the cap
        dqk = self.round(dscore)
        grads = {
            "q": self.to_layout(self.round(self.scale * (dqk @ self.k))),
            "k": self.to_layout(self.round(self.over_group(self.scale * (np.swapaxes(dqk, -1, -2) @ self.q)))),
            "v": self.to_layout(self.round(self.over_group(np.swapaxes(self.round(p), -1, -2) @ dout))),
            "softmax_scale": (dscore * raw).sum(),
        }
        if cap is not None:
            grads["softcap"] = (ds * (tanh - (raw * self.scale / cap) * (1 - tanh**2))).sum()
        if bias is not None:
            grads["bias"] = _reduce_to(ds, bias.shape)
        if sinks is not None:
            grads["sinks"] = _reduce_to((sink * row).sum(axis=-1), sinks.shape)
        return grads

    def over_group(self, a: Array) -> Array:
        """Sums the query heads that share a kv head: [*B, N, S, D] to [*B, K, S, D]."""
        n = a.shape[-3]
        return a.reshape(*a.shape[:-3], n // self.group, self.group, *a.shape[-2:]).sum(axis=-3)


def _reduce_to(a: Array, shape: tuple[int, ...]) -> Array:
    """Sums the axes along which an array of `shape` was broadcast to a's shape."""
    a = a.sum(axis=tuple(range(a.ndim - len(shape))))
    return a.sum(axis=tuple(i for i, size in enumerate(shape) if size == 1), keepdims=True)
