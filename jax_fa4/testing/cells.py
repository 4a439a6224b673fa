"""`Cell`, a point of the test matrix, and random inputs for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = ["Cell", "np_dtype", "random"]

Axes = Literal["full", "keys", "shared"]  # [*B, N, T, S], [*B, 1, 1, S], [T, S]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the test matrix: shapes, dtype and features of a call. `str(cell)` is a readable test id."""

    batch: tuple[int, ...] = (2,)
    q: int = 7  # T, queries
    k: int | None = None  # S, keys; None: as many as queries
    kv_heads: int = 2
    group: int = 1  # query heads per kv head
    head_dim: int = 16
    head_dim_v: int | None = None  # None: head_dim
    dtype: str = "float32"
    layout: Literal["BTNH", "BNTH"] = "BTNH"
    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    q_offset: int | None = None  # batch entry b gets q_offset + b
    softcap: float | None = None
    sinks: bool = False
    bias: Axes | None = None
    mask: Axes | None = None
    segments: int | None = None  # number of segments that a row is divided into
    q_lengths: tuple[int, ...] | None = None  # one per batch entry, in row-major order
    kv_lengths: tuple[int, ...] | None = None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def keys(self) -> int:
        """S."""
        return self.q if self.k is None else self.k

    @property
    def value_dim(self) -> int:
        """E."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def spec(self) -> AttentionSpec:
        """What selects the kernel of a call with such arguments."""
        left, right = self.window
        mask = MaskSpec(
            has_left=left is not None,
            has_right=self.causal or right is not None,
            has_q_offset=self.q_offset is not None,
            has_q_lengths=self.q_lengths is not None,
            has_kv_lengths=self.kv_lengths is not None,
            has_segments=self.segments is not None,
            has_dense=self.mask is not None,
        )
        return AttentionSpec(
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.value_dim,
            group=self.group,
            mask=mask,
            has_softcap=self.softcap is not None,
            has_sinks=self.sinks,
            bias_dtype=None if self.bias is None else "float32",
            layout=self.layout,
        )

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim_v is None else f"d{self.head_dim}.{self.head_dim_v}"
        parts = [dims, f"h{self.heads}.{self.kv_heads}", f"q{self.q}", f"k{self.keys}"]
        if self.batch != (2,):
            parts.insert(0, "b" + ".".join(map(str, self.batch)) if self.batch else "unbatched")
        if self.causal:
            parts.append("causal")
        if self.window != (None, None):
            parts.append("window" + ".".join("inf" if w is None else str(w) for w in self.window))
        for field in ("q_offset", "softcap", "softmax_scale", "segments", "bias", "mask"):
            if (value := getattr(self, field)) is not None:
                parts.append(f"{field.replace('softmax_', '')}{value}")
        parts += [field for field in ("sinks", "q_lengths", "kv_lengths") if getattr(self, field)]
        parts += [] if self.layout == "BTNH" else [self.layout]
        parts += [] if self.dtype == "float32" else [self.dtype]
        return "-".join(parts)


def random(cell: Cell, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `jax_fa4.attention`: numpy arrays that differ for every batch entry, head and position.

    Only the options that the cell has are present, so `attention(**random(cell), return_lse=True)` works.
    """
    rng = np.random.default_rng(seed)
    b, t, s, n, kv = cell.batch, cell.q, cell.keys, cell.heads, cell.kv_heads

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np_dtype(cell.dtype))

    x: dict[str, Any] = {
        "q": normal(*b, t, n, cell.head_dim),
        "k": normal(*b, s, kv, cell.head_dim),
        "v": normal(*b, s, kv, cell.value_dim),
    }
    if cell.layout == "BNTH":
        x = {name: np.swapaxes(array, -3, -2) for name, array in x.items()}
        x["layout"] = "BNTH"
    if cell.softmax_scale is not None:
        x["softmax_scale"] = cell.softmax_scale
    if cell.causal:
        x["causal"] = True
    if cell.window != (None, None):
        x["window"] = cell.window
    if cell.q_offset is not None:
        x["q_offset"] = cell.q_offset + np.arange(math.prod(b), dtype=np.int32).reshape(b)
    if cell.softcap is not None:
        x["softcap"] = cell.softcap
    if cell.sinks:
        x["sinks"] = rng.standard_normal(n).astype(np.float32)
    shapes = {"full": (*b, n, t, s), "keys": (*b, 1, 1, s), "shared": (t, s)}
    if cell.bias:
        x["bias"] = rng.standard_normal(shapes[cell.bias]).astype(np.float32)
    if cell.mask:
        x["mask"] = rng.random(shapes[cell.mask]) < 0.6
    if cell.segments is not None:
        x["q_segment_ids"] = np.sort(rng.integers(cell.segments, size=(*b, t)).astype(np.int32), axis=-1)
        x["kv_segment_ids"] = np.sort(rng.integers(cell.segments, size=(*b, s)).astype(np.int32), axis=-1)
    for name in ("q_lengths", "kv_lengths"):
        if (lengths := getattr(cell, name)) is not None:
            x[name] = np.asarray(lengths, np.int32).reshape(b)
    return x


def np_dtype(dtype: Any) -> np.dtype[Any]:
    """numpy's dtype, bfloat16 included."""
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16 if str(dtype) == "bfloat16" else np.dtype(dtype)
