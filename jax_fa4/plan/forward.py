"""The forward's launch plan: one kernel, its parameters bound to the call's buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jax_fa4.configs import KernelConfig, KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.plan.axes import (
    KEY_BLOCKS,
    KV_IDS,
    LSE,
    PER_SEQUENCE,
    Q_IDS,
    SCALAR,
    SINKS,
    Axes,
    key_axes,
    query_axes,
    value_axes,
)
from jax_fa4.plan.expr import ExprLike, ceil_div
from jax_fa4.plan.limits import DTYPES
from jax_fa4.plan.params import Param, Pointer, Scalar, TensorMap
from jax_fa4.plan.plan import BufferSpec, Launch, Plan
from jax_fa4.spec import Layout

__all__ = ["Kernel", "axes_of", "forward", "operand_names"]

RESULTS = ("out", "lse")
SCALARS = ("softmax_scale", "window_left", "window_right", "softcap")
ARRAYS = {
    "lse": LSE,
    "q_offset": PER_SEQUENCE,
    "q_lengths": PER_SEQUENCE,
    "kv_lengths": PER_SEQUENCE,
    "sinks": SINKS,
    "q_segment_ids": Q_IDS,
    "kv_segment_ids": KV_IDS,
    "key_blocks": KEY_BLOCKS,
}


class Kernel(NamedTuple):
    """What a plan says of a binary."""

    key: str
    entry: str


class Buffer(NamedTuple):
    """One buffer of the call: its number and its axes."""

    index: int
    axes: Axes


def operand_names(config: KernelConfig) -> tuple[str, ...]:
    """The kernel's operands, in the order of the custom call."""
    pointers = (param.name for param in config.params if isinstance(param, PointerParam))
    return ("q", "k", "v", *(name for name in pointers if name not in RESULTS))


def axes_of(name: str, layout: Layout) -> Axes:
    """Axes of a named operand or result; those of a mask or a bias depend on the call."""
    if name in SCALARS:
        return SCALAR
    arrays = {"q": query_axes(layout), "k": key_axes(layout), "v": value_axes(layout), "out": query_axes(layout, "e")}
    return {**arrays, **ARRAYS}[name]


def forward(config: KernelConfig, kernel: Kernel, layout: Layout, dense: Mapping[str, Axes] | None = None) -> Plan:
    """The plan of a forward call; q, k, v and out lie in memory as `layout` says, mask and bias as `dense` does."""
    names = (*operand_names(config), *RESULTS)
    dense = dense or {}
    buffers = {name: Buffer(i, dense.get(name) or axes_of(name, layout)) for i, name in enumerate(names)}
    extents = _extents(buffers["q"], buffers["k"])
    extents["q_tiles"] = ceil_div(extents["q_len"], config.tile_m)
    for name in dense:
        extents |= _dense_extents(name, buffers[name])
    grid = extents["q_tiles"] * extents["q_heads"] * extents["batch"]
    specs = {name: _buffer_spec(name, config, buffer.axes) for name, buffer in buffers.items()}
    return Plan(
        arch=config.arch,
        operands=tuple(specs[name] for name in operand_names(config)),
        results=tuple(specs[name] for name in RESULTS),
        launches=(
            Launch(
                cubin=kernel.key,
                entry=kernel.entry,
                grid=(grid, 1, 1),
                block=config.threads,
                smem_bytes=config.smem_bytes,
                params=tuple(_bind(param, buffers, extents) for param in config.params),
            ),
        ),
    )


def _extents(q: Buffer, k: Buffer) -> dict[str, ExprLike]:
    """The kernel's names for sizes; those of a head are constants of the kernel."""
    kv_heads = q.axes.size(q.index, "k")
    return {
        "q_len": q.axes.size(q.index, "t"),
        "kv_len": k.axes.size(k.index, "s"),
        "q_heads": kv_heads * q.axes.size(q.index, "g"),
        "kv_heads": kv_heads,
        "batch": q.axes.batch(q.index),
        "range": 2,
    }


def _dense_extents(name: str, buffer: Buffer) -> dict[str, ExprLike]:
    """Strides of a mask or a bias, 0 where it has one element for all, and its number of elements."""
    index, axes = buffer
    batch = "" if axes.batched else "b"
    steps = {"batch": batch, "head": "g" if axes.batched else "n", "row": "t"}
    strides: dict[str, ExprLike] = {
        f"{name}_{what}_stride": axes.stride(index, letter) if letter in axes.logical else 0
        for what, letter in steps.items()
    }
    whole = axes.stride(index, "")
    return {**strides, f"{name}_size": axes.batch(index) * whole if axes.batched else whole}


def _buffer_spec(name: str, config: KernelConfig, axes: Axes) -> BufferSpec:
    dims: Mapping[str, int | str | None] = {
        "d": config.head_dim,
        "e": config.head_dim_v,
        "t": "T",
        "s": "S",
        "g": "G",
        "m": None,
        "c": 2,
        "b": None,
        "n": None,
        "x": 1,
        "y": 1,
        "z": 1,
    }
    dtypes = {param.name: param.dtype for param in config.params if not isinstance(param, ScalarParam)}
    batched = bool(axes.logical) and axes.batched
    shape = tuple(dims[axis] for axis in (axes.logical[1:] if batched else axes.logical))
    return BufferSpec(name=name, dtype=dtypes[name], shape=shape, batched=batched)


def _bind(param: KernelParam, buffers: Mapping[str, Buffer], extents: Mapping[str, ExprLike]) -> Param:
    match param:
        case MapParam():
            return _tensor_map(param, buffers[param.name], extents)
        case PointerParam():
            itemsize = DTYPES[param.dtype].itemsize
            size = math.prod((extents[name] for name in param.dims), start=itemsize)  # type: ignore[call-overload]
            return Pointer(buffer=buffers[param.name].index, extent=size, align=param.pointee_align)
        case ScalarParam():
            return Scalar(dtype="i64" if param.dtype == "int64" else "i32", value=extents[param.name])


def _tensor_map(param: MapParam, buffer: Buffer, extents: Mapping[str, ExprLike]) -> TensorMap:
    """Rows of a head lie apart by the sequence's stride, heads by the innermost head axis's, batches by all axes."""
    index, axes = buffer
    letters = {"q_len": "t", "kv_len": "s", "q_heads": "g", "kv_heads": "k", "batch": ""}
    outer = param.dims[1:]  # the innermost is contiguous
    dims: list[ExprLike] = [axes.size(index, axes.logical[-1]), *(extents[name] for name in outer)]
    strides = tuple(axes.stride(index, letters[name]) * 2 for name in outer)
    return TensorMap(
        buffer=index,
        dtype=param.dtype,
        dims=tuple(dims),
        strides=strides,
        box=param.box,
        swizzle=param.swizzle,
        l2_promotion=param.l2_promotion,
    )
