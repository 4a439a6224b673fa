"""What the plans of all calls share: their buffers by name, and kernel parameters bound to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_fa4.configs import Config, KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.plan.axes import LSE, QUERY_SUMS, ROW_STATISTICS, SCALAR, Axes, key_axes, query_axes, value_axes
from jax_fa4.plan.expr import Expr, ExprLike, ceil_div
from jax_fa4.plan.params import Param, Pointer, Scalar, TensorMap
from jax_fa4.plan.plan import BufferSpec, Launch
from jax_fa4.spec import Layout

__all__ = ["SCALARS", "Buffers", "Kernel", "axes_of", "scalars_of"]

SCALARS = {"softmax_scale": "float32", "window_left": "int32", "window_right": "int32"}
FLOATS = ("lse", "dlse", "lse_log2", "delta", "dq_sum")
FLOAT_BYTES = 4


class Kernel(NamedTuple):
    """What a plan says of a binary."""

    key: str
    entry: str


class Buffer(NamedTuple):
    """One buffer of the call: its number and its axes."""

    index: int
    axes: Axes


def scalars_of(config: Config) -> tuple[str, ...]:
    """Scalar operands of a kernel, in the order of the custom call."""
    pointers = {param.name for param in config.params if isinstance(param, PointerParam)}
    return tuple(name for name in SCALARS if name in pointers)


def axes_of(name: str, layout: Layout) -> Axes:
    """Axes of a named operand or result; a gradient has those of its array."""
    q, k, v, out = query_axes(layout), key_axes(layout), value_axes(layout), query_axes(layout, "e")
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": LSE}
    arrays |= {f"d{array}": axes for array, axes in arrays.items()}
    statistics = {"lse_log2": ROW_STATISTICS, "delta": ROW_STATISTICS, "dq_sum": QUERY_SUMS}
    return SCALAR if name in SCALARS else {**arrays, **statistics}[name]


class Buffers:
    """Operands and results of a call by name, and what plans say of them."""

    def __init__(self, operands: Sequence[str], results: Sequence[str], config: Config, layout: Layout) -> None:
        """`config`: of the call's main kernel."""
        self.config = config
        self.buffers = {name: Buffer(i, axes_of(name, layout)) for i, name in enumerate((*operands, *results))}
        self.operands = tuple(self._spec(name) for name in operands)
        self.results = tuple(self._spec(name) for name in results)
        q, k = self.buffers["q"], self.buffers["k"]
        kv_heads = q.axes.size(q.index, "k")
        q_len = q.axes.size(q.index, "t")
        # the kernels' names for sizes
        self.extents: dict[str, Expr] = {
            "q_len": q_len,
            "padded_q_len": ceil_div(q_len, config.tile_m) * config.tile_m,
            "kv_len": k.axes.size(k.index, "s"),
            "q_heads": kv_heads * q.axes.size(q.index, "g"),
            "kv_heads": kv_heads,
            "batch": q.axes.batch(q.index),
            "head_dim": q.axes.size(q.index, "d"),
        }

    def query_tiles(self) -> Expr:
        """A CTA for each tile of queries of each query head."""
        return ceil_div(self.extents["q_len"], self.config.tile_m) * self.extents["q_heads"] * self.extents["batch"]

    def key_tiles(self) -> Expr:
        """A CTA for each tile of keys of each kv head."""
        return ceil_div(self.extents["kv_len"], self.config.tile_n) * self.extents["kv_heads"] * self.extents["batch"]

    def launch(self, config: Config, kernel: Kernel, tiles: Expr) -> Launch:
        """The launch of one of the call's kernels."""
        return Launch(
            cubin=kernel.key,
            entry=kernel.entry,
            grid=(tiles, 1, 1),
            block=config.threads,
            smem_bytes=config.smem_bytes,
            params=tuple(self._bind(param) for param in config.params),
        )

    def _spec(self, name: str) -> BufferSpec:
        if name in SCALARS:
            return BufferSpec(name=name, dtype=SCALARS[name], shape=(), batched=False)
        head_dims = {"d": self.config.head_dim, "e": self.config.head_dim_v}
        dims: Mapping[str, int | str] = {**head_dims, "t": "T", "s": "S", "g": "G", "p": "P"}
        shape = tuple(dims[axis] for axis in self.buffers[name].axes.logical[1:])
        return BufferSpec(name=name, dtype="float32" if name in FLOATS else self.config.dtype, shape=shape)

    def _bind(self, param: KernelParam) -> Param:
        match param:
            case MapParam():
                return self._tensor_map(param)
            case PointerParam():
                size: Any = math.prod((self.extents[name] for name in param.dims), start=FLOAT_BYTES)  # type: ignore[call-overload]
                return Pointer(buffer=self.buffers[param.name].index, extent=size, align=param.pointee_align)
            case ScalarParam():
                return Scalar(dtype="i32", value=self.extents[param.name])

    def _tensor_map(self, param: MapParam) -> TensorMap:
        """Rows of a head lie apart by the sequence's stride, heads by the innermost head axis's, batches by all axes."""
        index, axes = self.buffers[param.name]
        letters = {"q_len": "t", "kv_len": "s", "q_heads": "g", "kv_heads": "k", "batch": ""}
        outer = param.dims[1:]  # the innermost is contiguous
        dims: list[ExprLike] = [axes.size(index, axes.logical[-1]), *(self.extents[name] for name in outer)]
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
