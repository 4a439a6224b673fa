"""The call of `launch` for implementation="emulate": a callback to this host, which emulates the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import emulate
from jax_fa4.plan import Plan
from jax_fa4.plan.axes import Axes
from jax_fa4.rules.launch import Result

__all__ = ["launch"]

HostArray = np.ndarray[Any, Any]


def launch(
    operands: Sequence[jax.Array],
    axes: Sequence[Axes],
    results: Sequence[Result],
    *,
    plan: Plan,
    ptx: Mapping[str, str],
) -> list[jax.Array]:
    """Emulates `plan` on operands in logical order; `ptx` by the keys of the plan's cubins."""
    num_batch_axes = operands[0].ndim - len(axes[0].logical)

    def run(*arrays: Any) -> list[HostArray]:
        buffers = [
            emulate.Array(_in_memory(np.asarray(a), each, num_batch_axes), a.shape)
            for a, each in zip(arrays, axes, strict=True)
        ]
        written = [emulate.Array(_unwritten(r, num_batch_axes), r.shape) for r in results]
        emulate.run_plan(plan, ptx, [*buffers, *written])
        return [_logical(a.memory, r.axes, num_batch_axes) for a, r in zip(written, results, strict=True)]

    shapes = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
    return list(jax.pure_callback(run, shapes, *operands))


def _order(axes: Axes, num_batch_axes: int) -> tuple[int, ...]:
    """Logical axes from the slowest in memory to the fastest."""
    return axes.layout(num_batch_axes)[::-1]


def _in_memory(a: HostArray, axes: Axes, num_batch_axes: int) -> HostArray:
    """An input: the kernel may not write to it."""
    memory = np.ascontiguousarray(a.transpose(_order(axes, num_batch_axes)))
    memory.flags.writeable = False
    return memory


def _unwritten(result: Result, num_batch_axes: int) -> HostArray:
    """Memory whose bits are all set: NaN in a float."""
    dtype, sizes = jnp.dtype(result.dtype), [result.shape[i] for i in _order(result.axes, num_batch_axes)]
    return np.full(math.prod(sizes) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(sizes)


def _logical(memory: HostArray, axes: Axes, num_batch_axes: int) -> HostArray:
    return memory.transpose(np.argsort(_order(axes, num_batch_axes)))
