"""Launch plans on the CPU: the PTX of our kernels, run by the emulator on numpy arrays, as a GPU would run it.

    with emulate.recording() as launches:
        out = jax.block_until_ready(jax_fa4.attention(q, k, v, implementation="emulate"))
    print(launches[0].entry, launches[0].result.stats.table())

A debugging aid: a 128 x 128 tile of scores takes about 0.1 s. Everything between a plan and the kernel's memory
accesses is the same as on a device: parameters, tensor maps, strides, the instructions themselves, but for the rounding
of approximations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_fa4.plan import BufferSpec, Launch, Param, Plan, Pointer, Record, Scalar, TensorMap, evaluate

if TYPE_CHECKING:
    from jax_fa4.emulator.launch import Options
    from jax_fa4.emulator.run import Result

__all__ = ["Array", "Emulated", "recording", "run_plan"]

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


class Emulated(NamedTuple):
    """One launch of a plan that was run."""

    entry: str  # the kernel's name
    result: Result


@dataclasses.dataclass(frozen=True, eq=False)
class _Recording:
    options: Options | None
    launches: list[Emulated]


_recordings: list[_Recording] = []  # of this process: JAX calls back from threads of its own


@contextlib.contextmanager
def recording(options: Options | None = None) -> Iterator[list[Emulated]]:
    """Within it every plan that is emulated runs with `options`; the list fills with their launches, in order.

    Wait for the results of `implementation="emulate"` inside: JAX hands them out before they exist.
    """
    own = _Recording(options, [])
    _recordings.append(own)
    try:
        yield own.launches
    finally:
        _recordings.remove(own)


def run_plan(plan: Plan, ptx: Mapping[str, str], buffers: Sequence[Array]) -> None:
    """Run the launches of a plan in order; results, which follow the operands in `buffers`, change in place.

    `ptx` maps the keys of the plan's cubins to their PTX. A launch with an empty grid is skipped. Raises ValueError for
    a buffer that the plan does not allow, and the emulator's errors.
    """
    from jax_fa4.emulator.run import run

    _check(plan.buffers, buffers)
    shapes = [buffer.shape for buffer in buffers]
    own = _recordings[-1] if _recordings else _Recording(None, [])
    for launch in plan.launches:
        bound = _bind(launch, buffers, shapes)
        if all(bound.grid):
            result = run(ptx[launch.cubin], bound, own.options, entry=launch.entry)
            own.launches.append(Emulated(launch.entry, result))


def _check(specs: Sequence[BufferSpec], buffers: Sequence[Array]) -> None:
    """What the library checks of a call: dtypes, ranks, and sizes that must agree."""
    sizes: dict[str, int] = {}
    batch: tuple[int, ...] | None = None
    for spec, (memory, shape) in zip(specs, buffers, strict=True):
        if memory.dtype.name != spec.dtype:
            raise ValueError(f"{spec.name} must be {spec.dtype}, got {memory.dtype.name}")
        lead, tail = shape[: len(shape) - len(spec.shape)], shape[len(shape) - len(spec.shape) :]
        legal = len(tail) == len(spec.shape) and (not spec.batched or bool(lead))
        for size, asked in zip(tail, spec.shape, strict=False):
            legal &= asked is None or size == (asked if isinstance(asked, int) else sizes.setdefault(asked, size))
        if spec.batched:
            batch = lead if batch is None else batch
            legal &= lead == batch
        if not legal:
            wanted = ", ".join(["*batch"] * spec.batched + ["any" if n is None else str(n) for n in spec.shape])
            raise ValueError(f"{spec.name} must be [{wanted}] with batch {batch} and {sizes}, got {list(shape)}")


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
            fields = tuple((offset, _parameter(value, buffers, shapes)) for offset, value in param.fields)
            return emulator.Struct(size=param.size, fields=fields)


def _scalar(param: Scalar, shapes: Shapes) -> bytes:
    value = param.value if isinstance(param.value, float) else evaluate(param.value, shapes)
    return np.array(value, SCALARS[param.dtype]).tobytes()


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
