"""What a call has beside its queries, keys and values, for kernels of every architecture: flags and parameters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jax_fa4.configs.params import Extent, KernelParam, PointerParam, ScalarParam
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = [
    "common_specs",
    "feature_names",
    "feature_params",
    "fields_of",
    "first_that_fits",
    "has_known_dtypes",
    "packs_with_others",
]

R = TypeVar("R")
DTYPES = ("bfloat16", "float16")
BIASES = (None, "float32", "bfloat16", "float16")


def has_known_dtypes(spec: AttentionSpec) -> bool:
    """Whether kernels take arrays of such types."""
    return spec.dtype in DTYPES and spec.bias_dtype in BIASES


def packs_with_others(spec: AttentionSpec) -> bool:
    """Whether packed sequences meet what a call with them can't have: elements or offsets of rows of the batch."""
    mask = spec.mask
    others = mask.has_segments or mask.has_dense or mask.has_q_offset or spec.bias_dtype is not None or spec.is_fused
    return mask.has_cu_seqlens and others


def fields_of(spec: AttentionSpec) -> dict[str, Any]:
    """What a forward's config says of a call, by field."""
    mask = spec.mask
    return {
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "has_left": mask.has_left,
        "has_right": mask.has_right,
        "has_q_offset": mask.has_q_offset and (mask.has_left or mask.has_right),  # else there is nothing to shift
        "has_q_lengths": mask.has_q_lengths and not mask.has_cu_seqlens,  # else a schedule knows all lengths
        "has_kv_lengths": mask.has_kv_lengths and not mask.has_cu_seqlens,
        "has_cu_seqlens": mask.has_cu_seqlens,
        "has_segments": mask.has_segments,
        "has_mask": mask.has_dense,
        "has_softcap": spec.has_softcap,
        "has_sinks": spec.has_sinks,
        "bias": spec.bias_dtype,
    }


def first_that_fits(table: Mapping[tuple[int, int], R], spec: AttentionSpec) -> R | None:
    """The first row of a table with keys (head_dim, head_dim_v) that is for the spec's head dims or greater ones."""
    return next((row for (d, e), row in table.items() if spec.head_dim <= d and spec.head_dim_v <= e), None)


def common_specs(head_dims: Iterable[tuple[int, int]]) -> Iterator[AttentionSpec]:
    """What calls mostly ask for: both dtypes, with each side of a window or without."""
    sides = (False, True)
    for (head_dim, head_dim_v), dtype, has_left, has_right in itertools.product(head_dims, DTYPES, sides, sides):
        mask = MaskSpec(has_left=has_left, has_right=has_right)
        yield AttentionSpec(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, group=1, mask=mask)


def feature_names(config: Any) -> list[str]:
    """The flags of `config` that are set and the type of its bias, as a kernel's name says them."""
    flags = [field.name for field in dataclasses.fields(config) if field.name.startswith("has_")]
    names = [name.removeprefix("has_") for name in flags if getattr(config, name)]
    bias = getattr(config, "bias", None)
    return names if bias is None else [*names, f"bias_{bias}"]


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
