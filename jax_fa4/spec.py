"""What selects a kernel: frozen, hashable descriptions of a call without any of its sizes or values."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jax_fa4.operands import Operands

__all__ = ["AttentionSpec", "Implementation", "Layout", "MaskSpec"]

Layout = Literal["BTNH", "BNTH"]
Implementation = Literal["kernel", "xla", "emulate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which bounds a call has; their values come at run time. Causal is `has_right` with a window_right of 0."""

    has_left: bool = False
    has_right: bool = False
    has_q_offset: bool = False
    has_q_lengths: bool = False
    has_kv_lengths: bool = False
    has_segments: bool = False
    has_cu_seqlens: bool = False  # a batch entry is a row of sequences
    has_dense: bool = False  # a boolean mask array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """All that selects an implementation of one call, and nothing that a kernel takes at run time."""

    dtype: str  # of q, k, v and out: numpy's name
    head_dim: int
    head_dim_v: int
    group: int  # query heads per kv head
    mask: MaskSpec = MaskSpec()
    has_softcap: bool = False
    has_sinks: bool = False
    bias_dtype: str | None = None  # of an additive bias, numpy's name
    has_batched_scalars: bool = False  # vmap gave scale, cap or window a value per batch entry
    page_size: int | None = None  # k and v are pools of pages of so many keys
    layout: Layout = "BTNH"  # of q, k, v and out in memory
    is_fused: bool = False  # q, k and v are slices of one array
    deterministic: bool = False  # of the backward; the forward always is
    implementation: Implementation | None = None

    @classmethod
    def of(
        cls,
        x: Operands,
        *,
        layout: Layout = "BTNH",
        deterministic: bool = False,
        implementation: Implementation | None = None,
    ) -> AttentionSpec:
        """The spec of a call with these operands."""
        q_heads, kv_heads = x.q.shape[-2], x.k.shape[-2]
        scalars = (x.softmax_scale, x.softcap, x.window_left, x.window_right)
        return cls(
            dtype=np.dtype(x.q.dtype).name,
            head_dim=x.q.shape[-1],
            head_dim_v=x.v.shape[-1],
            group=q_heads // kv_heads if kv_heads else 1,
            mask=MaskSpec(
                has_left=x.window_left is not None,
                has_right=x.window_right is not None,
                has_q_offset=x.q_offset is not None,
                has_q_lengths=x.q_lengths is not None,
                has_kv_lengths=x.kv_lengths is not None,
                has_segments=x.q_segment_ids is not None,
                has_cu_seqlens=x.cu_seqlens_q is not None,
                has_dense=x.mask is not None,
            ),
            has_softcap=x.softcap is not None,
            has_sinks=x.sinks is not None,
            bias_dtype=None if x.bias is None else np.dtype(x.bias.dtype).name,
            has_batched_scalars=any(s is not None and s.ndim > 0 for s in scalars),
            page_size=None if x.page_table is None else x.k.shape[-3],
            layout=layout,
            is_fused=x.qkv is not None,
            deterministic=deterministic,
            implementation=implementation,
        )
