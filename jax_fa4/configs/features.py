"""Parameters of what a call has beside its queries, keys and values: the same for forward and backward kernels."""

from __future__ import annotations

from typing import Any

from jax_fa4.configs.params import Extent, KernelParam, PointerParam, ScalarParam

__all__ = ["feature_params"]


def feature_params(config: Any, *, ranges: str | None, tiles: Extent) -> tuple[KernelParam, ...]:
    """The scale, and what the flags of `config` ask for.

    `ranges` names the blocks of the other side that each of `tiles` visits where there are segments; None: all of them.
    """
    lengths: tuple[Extent, ...] = ("batch", "kv_heads")
    spans: tuple[Extent, ...] = (*lengths, tiles, "range")
    has_sinks = getattr(config, "has_sinks", False)  # a backward kernel finds them in lse
    bias_bytes = 4 if config.bias == "float32" else 2
    bias = PointerParam(name="bias", dtype=config.bias or "", dims=("bias_size",), pointee_align=bias_bytes)
    optional = (
        (config.has_left, PointerParam(name="window_left", dtype="int32")),
        (config.has_right, PointerParam(name="window_right", dtype="int32")),
        (config.has_softcap, PointerParam(name="softcap", dtype="float32")),
        (config.has_q_offset, PointerParam(name="q_offset", dtype="int32", dims=lengths)),
        (config.has_q_lengths, PointerParam(name="q_lengths", dtype="int32", dims=lengths)),
        (config.has_kv_lengths, PointerParam(name="kv_lengths", dtype="int32", dims=lengths)),
        (has_sinks, PointerParam(name="sinks", dtype="float32", dims=("batch", "q_heads"))),
        (config.has_segments, PointerParam(name="q_segment_ids", dtype="int32", dims=(*lengths, "q_len"))),
        (config.has_segments, PointerParam(name="kv_segment_ids", dtype="int32", dims=(*lengths, "kv_len"))),
        (config.has_segments and ranges is not None, PointerParam(name=ranges or "", dtype="int32", dims=spans)),
        (config.has_mask, PointerParam(name="mask", dtype="bool", dims=("mask_size",), pointee_align=1)),
        (config.bias is not None, bias),
    )
    strides = [
        ScalarParam(name=f"{array}_{axis}_stride", dtype="int64", size=8, align=8)  # type: ignore[arg-type]
        for array, present in (("mask", config.has_mask), ("bias", config.bias is not None))
        for axis in ("batch", "head", "row")
        if present
    ]
    return (
        PointerParam(name="softmax_scale", dtype="float32"),
        *(param for present, param in optional if present),
        *strides,
    )
