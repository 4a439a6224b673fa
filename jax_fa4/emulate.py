"""Launch plans on the CPU: the PTX of our kernels, run by the emulator on numpy arrays, as a GPU would run it.

    out, lse, runs = forward(q, k, v, spec=spec, arch="sm_90a", softmax_scale=0.125)
    print(runs[0].stats.table())

A debugging aid: a 128 x 128 tile of scores takes about 0.1 s. Everything between a plan and the kernel's memory
accesses is the same as on a device: parameters, tensor maps, strides, the instructions themselves, but for the rounding
of approximations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_fa4.plan import Launch, Param, Plan, Pointer, Record, Scalar, TensorMap, evaluate

if TYPE_CHECKING:
    from jax_fa4.emulator.launch import Options
    from jax_fa4.emulator.run import Result
    from jax_fa4.spec import AttentionSpec

__all__ = ["OPERANDS", "Array", "Forward", "forward", "run_plan"]

OPERANDS = ("q", "k", "v", "softmax_scale", "window_left", "window_right")  # of a forward that can be emulated

Shapes = Sequence[Sequence[int]]
SCALARS = {"i32": np.int32, "u32": np.uint32, "i64": np.int64, "f32": np.float32}
MAP_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"} | {
    "int32": "s32",
    "uint32": "u32",
    "int64": "s64",
    "uint64": "u64",
    "uint16": "u16",
}  # fmt: skip; types of one byte travel as u8


class Array(NamedTuple):
    """A buffer of a call: contiguous memory, and the shape that the plan's expressions see."""

    memory: np.ndarray[Any, Any]
    shape: tuple[int, ...]


class Forward(NamedTuple):
    """What the forward gives: out in q's dtype and layout, lse [*B, N, T] float32, and one record a launch."""

    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]
    runs: list[Result]


def run_plan(
    plan: Plan, ptx: Mapping[str, str], buffers: Sequence[Array], options: Options | None = None
) -> list[Result]:
    """Run the launches of a plan in order; results, which follow the operands in `buffers`, change in place.

    `ptx` maps the keys of the plan's cubins to their PTX. A launch with an empty grid is skipped. Raises the emulator's
    errors.
    """
    from jax_fa4.emulator.run import run

    shapes = [buffer.shape for buffer in buffers]
    results = []
    for launch in plan.launches:
        bound = _bind(launch, buffers, shapes)
        if all(bound.grid):
            results.append(run(ptx[launch.cubin], bound, options, entry=launch.entry))
    return results


def _bind(launch: Launch, buffers: Sequence[Array], shapes: Shapes) -> Any:
    from jax_fa4.emulator import launch as emulator

    x, y, z = (evaluate(extent, shapes) for extent in launch.grid)
    return emulator.Launch(
        grid=(x, y, z),
        block=launch.block,
        cluster=launch.cluster,
        smem_bytes=launch.smem_bytes,
        params=tuple(_parameter(param, buffers, shapes) for param in launch.params),
    )


def _parameter(param: Param, buffers: Sequence[Array], shapes: Shapes) -> Any:
    from jax_fa4.emulator import launch as emulator

    match param:
        case TensorMap():
            return _tensor_map(param, buffers[param.buffer].memory, shapes)
        case Pointer():
            return emulator.Buffer(buffers[param.buffer].memory, evaluate(param.offset, shapes))
        case Scalar():
            return _scalar(param, shapes)
        case Record():
            return _record(param, shapes)


def _scalar(param: Scalar, shapes: Shapes) -> bytes:
    value = param.value if isinstance(param.value, float) else evaluate(param.value, shapes)
    return np.array(value, SCALARS[param.dtype]).tobytes()


def _record(param: Record, shapes: Shapes) -> bytes:
    data = bytearray(param.size)
    for offset, value in param.fields:
        if isinstance(value, Pointer):
            raise NotImplementedError("pointers inside a struct parameter")
        data[offset : offset + value.size] = _scalar(value, shapes)
    return bytes(data)


def _tensor_map(param: TensorMap, memory: np.ndarray[Any, Any], shapes: Shapes) -> Any:
    from jax_fa4.emulator import launch as emulator

    dims = tuple(evaluate(extent, shapes) for extent in param.dims)
    strides = tuple(evaluate(stride, shapes) for stride in param.strides)
    offset = evaluate(param.offset, shapes)
    if not memory.size or not all(dims):  # as the library does: a valid map of one element that no kernel touches
        memory, offset, dims = np.zeros(math.prod(param.box), memory.dtype), 0, (1,) * len(dims)
        strides = (16,) * len(strides)
    return emulator.TensorMap(
        buffer=emulator.Buffer(memory, offset),
        dtype=MAP_DTYPES.get(param.dtype, "u8"),
        dims=dims,
        strides=strides,
        box=param.box,
        swizzle="none" if param.swizzle == 0 else f"{param.swizzle}B",  # type: ignore[arg-type]  # 32, 64 or 128
    )


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    spec: AttentionSpec,
    arch: str,
    softmax_scale: float,
    window_left: int = 0,
    window_right: int = 0,
    options: Options | None = None,
) -> Forward:
    """The forward of a call by the kernel that `arch` would use, which is compiled unless it is in the cache.

    q [*B, T, N, D], k [*B, S, K, D] and v [*B, S, K, E] lie in memory as `spec.layout` says (BNTH: [*B, N, T, D] ...).
    Windows are only read if the spec has them; causal is a right window of 0. Raises ValueError where there is no
    kernel.
    """
    from jax_fa4 import cubins
    from jax_fa4.configs import forward_config
    from jax_fa4.plan import forward as plans
    from jax_fa4.plan.bind import Kernel
    from jax_fa4.support import why_unsupported

    config = forward_config(spec, arch)
    if config is None:
        raise ValueError(why_unsupported(spec, arch))
    if unknown := sorted(set(plans.operand_names(config)) - set(OPERANDS)):
        raise ValueError(f"the emulated forward takes {', '.join(OPERANDS)}, the call has {', '.join(unknown)}")
    cubin = cubins.get(config)
    plan = plans.forward(config, Kernel(cubin.key, cubin.entry), spec.layout)

    q, k, v = (np.ascontiguousarray(a) for a in (q, k, v))
    heads, length = (-2, -3) if spec.layout == "BTNH" else (-3, -2)
    batch, t, n, s, kv_heads = q.shape[:-3], q.shape[length], q.shape[heads], k.shape[length], k.shape[heads]
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse = np.full((*batch, n, t), np.nan, np.float32)
    rows = (*batch, kv_heads, t, n // kv_heads)
    scalars = {
        "softmax_scale": np.array(softmax_scale, np.float32),
        "window_left": np.array(window_left, np.int32),
        "window_right": np.array(window_right, np.int32),
    }
    arrays = {
        "q": Array(q, (*rows, q.shape[-1])),
        "k": Array(k, (*batch, kv_heads, s, k.shape[-1])),
        "v": Array(v, (*batch, kv_heads, s, v.shape[-1])),
        **{name: Array(value, ()) for name, value in scalars.items()},
        "out": Array(out, (*rows, v.shape[-1])),
        "lse": Array(lse, (*batch, kv_heads, n // kv_heads, t)),
    }
    names = (*plans.operand_names(config), *plans.RESULTS)
    runs = run_plan(plan, {cubin.key: cubin.ptx}, [arrays[name] for name in names], options)
    return Forward(out, lse, runs)
