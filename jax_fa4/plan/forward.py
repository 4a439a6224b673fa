"""The forward's launch plan: one kernel, its parameters bound to the call's buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jax_fa4.configs import KernelConfig, KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.plan.axes import LSE, SCALAR, Axes, key_axes, query_axes, value_axes
from jax_fa4.plan.expr import Expr, ExprLike, ceil_div
from jax_fa4.plan.params import Param, Pointer, Scalar, TensorMap
from jax_fa4.plan.plan import BufferSpec, Launch, Plan
from jax_fa4.spec import Layout

__all__ = ["Kernel", "axes_of", "forward", "operand_names"]

RESULTS = ("out", "lse")
SCALARS = {"softmax_scale": "float32", "window_left": "int32", "window_right": "int32"}


class Kernel(NamedTuple):
    """What a plan says of a binary."""

    key: str
    entry: str


class Buffer(NamedTuple):
    """One buffer of the call: its number and its axes."""

    index: int  # type: ignore[assignment]  # a tuple's method of this name is not needed
    axes: Axes


def operand_names(config: KernelConfig) -> tuple[str, ...]:
    """The kernel's operands, in the order of the custom call."""
    pointers = {param.name for param in config.params if isinstance(param, PointerParam)}
    return ("q", "k", "v", *(name for name in SCALARS if name in pointers))


def axes_of(name: str, layout: Layout) -> Axes:
    """Axes of a named operand or result."""
    if name in SCALARS:
        return SCALAR
    arrays = {"q": query_axes(layout), "k": key_axes(layout), "v": value_axes(layout), "out": query_axes(layout, "e")}
    return {**arrays, "lse": LSE}[name]


def forward(config: KernelConfig, kernel: Kernel, layout: Layout) -> Plan:
    """The plan of a forward call whose q, k, v and out lie in memory as `layout` says."""
    names = (*operand_names(config), *RESULTS)
    buffers = {name: Buffer(i, axes_of(name, layout)) for i, name in enumerate(names)}
    extents = _extents(buffers["q"], buffers["k"])
    grid = ceil_div(extents["q_len"], config.tile_m) * extents["q_heads"] * extents["batch"]
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


def _extents(q: Buffer, k: Buffer) -> dict[str, Expr]:
    """The kernel's names for sizes; those of a head are constants of the kernel."""
    kv_heads = q.axes.size(q.index, "k")
    return {
        "q_len": q.axes.size(q.index, "t"),
        "kv_len": k.axes.size(k.index, "s"),
        "q_heads": kv_heads * q.axes.size(q.index, "g"),
        "kv_heads": kv_heads,
        "batch": q.axes.batch(q.index),
    }


def _buffer_spec(name: str, config: KernelConfig, axes: Axes) -> BufferSpec:
    if name in SCALARS:
        return BufferSpec(name=name, dtype=SCALARS[name], shape=(), batched=False)
    dims: Mapping[str, int | str] = {"d": config.head_dim, "e": config.head_dim_v, "t": "T", "s": "S", "g": "G"}
    shape = tuple(dims[axis] for axis in axes.logical[1:])
    return BufferSpec(name=name, dtype="float32" if name == "lse" else config.dtype, shape=shape)


def _bind(param: KernelParam, buffers: Mapping[str, Buffer], extents: Mapping[str, Expr]) -> Param:
    match param:
        case MapParam():
            return _tensor_map(param, buffers[param.name], extents)
        case PointerParam():
            size = math.prod((extents[name] for name in param.dims), start=4)
            return Pointer(buffer=buffers[param.name].index, extent=size, align=4)
        case ScalarParam():
            return Scalar(dtype="i32", value=extents[param.name])


def _tensor_map(param: MapParam, buffer: Buffer, extents: Mapping[str, Expr]) -> TensorMap:
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
        swizzle=param.swizzle,  # type: ignore[arg-type]  # checked by TensorMap
        l2_promotion=param.l2_promotion,  # type: ignore[arg-type]
    )
