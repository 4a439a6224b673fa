"""Launch plans: which kernels one custom call launches, with every extent an expression over its buffers' dimensions.

A plan holds no sizes. XLA may split the call over devices after it was lowered, so the FFI library evaluates the
expressions against the buffers of each run.

    Q, OUT = range(2)
    Launch(cubin=key, entry="scale", grid=(ceil_div(dim(Q, -3), 128), 1, 1), block=128,
           params=(Pointer(buffer=Q), Pointer(buffer=OUT)))
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from jax_fa4.plan.expr import Dim, Expr, ExprLike, Lead, as_expr, postfix, set_exprs
from jax_fa4.plan.limits import (
    BLOCK_LIMIT,
    CLUSTER_LIMIT,
    DTYPES,
    INT64_MAX,
    MAX_BUFFERS,
    MAX_ENTRY,
    MAX_LAUNCHES,
    MAX_NAME,
    MAX_PARAM_BYTES,
    MAX_PARAMS,
    MAX_TAIL,
    MAX_TENSOR_MAPS,
    SMEM_LIMIT,
    check,
)
from jax_fa4.plan.params import Param, Pointer, Record, TensorMap

__all__ = ["BufferSpec", "Launch", "Plan"]

Triple = tuple[ExprLike, ExprLike, ExprLike]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch. A grid with a zero extent launches nothing."""

    cubin: str  # key, 64 hex digits
    entry: str  # the kernel's name in the cubin
    grid: Triple  # CTAs; multiples of `cluster`
    block: int  # threads
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem_bytes: int = 0  # dynamic shared memory
    programmatic: bool = False  # may start before the launch ahead ends; the kernel itself waits for what it reads
    params: tuple[Param, ...]

    def __post_init__(self) -> None:
        check(re.fullmatch("[0-9a-f]{64}", self.cubin) is not None, "cubin", "64 lower-case hex digits", self.cubin)
        check(1 <= len(self.entry.encode()) <= MAX_ENTRY, "entry", f"a name of 1 to {MAX_ENTRY} bytes", self.entry)
        check("\0" not in self.entry, "entry", "a name without NUL", self.entry)
        check(len(self.grid) == 3, "len(grid)", "3", len(self.grid))
        check(1 <= self.block <= BLOCK_LIMIT, "block", f"in [1, {BLOCK_LIMIT}]", self.block)
        check(len(self.cluster) == 3 and min(self.cluster) >= 1, "cluster", "three positive ints", self.cluster)
        size = math.prod(self.cluster)
        check(size <= CLUSTER_LIMIT, "the cluster's size", f"<= {CLUSTER_LIMIT}", size)
        check(0 <= self.smem_bytes <= SMEM_LIMIT, "smem_bytes", f"in [0, {SMEM_LIMIT}]", self.smem_bytes)
        check(len(self.params) <= MAX_PARAMS, "len(params)", f"<= {MAX_PARAMS}", len(self.params))
        maps = sum(isinstance(p, TensorMap) for p in self.params)
        check(maps <= MAX_TENSOR_MAPS, "the number of tensor maps", f"<= {MAX_TENSOR_MAPS}", maps)
        size = sum(p.size for p in self.params if not isinstance(p, TensorMap))
        check(size <= MAX_PARAM_BYTES, "the parameters' size without tensor maps", f"<= {MAX_PARAM_BYTES} bytes", size)
        set_exprs(self, "grid")

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression in it."""
        return (*(as_expr(e) for e in self.grid), *(e for p in self.params for e in p.exprs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """What an operand or result has to look like; the library refuses the call otherwise.

    `shape` lists the axes after the batch: an int is an exact size, a name must have the same size wherever it occurs
    in the plan, None is any size. A batched buffer has one or more axes before them (`[*batch, K]`), which must be
    equal among all batched buffers.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    batched: bool = True

    def __post_init__(self) -> None:
        check(1 <= len(self.name.encode()) <= MAX_NAME, "name", f"1 to {MAX_NAME} bytes", self.name)
        check(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        check(len(self.shape) <= MAX_TAIL, "len(shape)", f"<= {MAX_TAIL}", len(self.shape))
        for axis in self.shape:
            if isinstance(axis, int):
                check(0 <= axis <= INT64_MAX, "a size in shape", "an int64 >= 0", axis)
            elif isinstance(axis, str):
                check(1 <= len(axis.encode()) <= MAX_NAME, "a name in shape", f"1 to {MAX_NAME} bytes", axis)

    @property
    def min_rank(self) -> int:
        """Axes that surely exist, so that a plan may refer to them."""
        return len(self.shape) + self.batched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that one custom call does on a device of one architecture."""

    arch: str  # "sm_90a": what the cubins are for
    operands: tuple[BufferSpec, ...]
    results: tuple[BufferSpec, ...]
    launches: tuple[Launch, ...]  # in stream order

    def __post_init__(self) -> None:
        check(re.fullmatch("sm_[0-9]{2,3}[af]?", self.arch) is not None, "arch", "like sm_90a", self.arch)
        check(len(self.buffers) <= MAX_BUFFERS, "the number of buffers", f"<= {MAX_BUFFERS}", len(self.buffers))
        check(len(self.launches) <= MAX_LAUNCHES, "len(launches)", f"<= {MAX_LAUNCHES}", len(self.launches))
        for launch in self.launches:
            for buffer in _buffers_of(launch.params):
                check(buffer < len(self.buffers), "buffer", f"< {len(self.buffers)}", buffer)
            for expr in launch.exprs:
                for node in postfix(expr):
                    self._check_reference(node)

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Operands, then results: the numbering of the plan."""
        return (*self.operands, *self.results)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of sizes, in order of first appearance."""
        return tuple(dict.fromkeys(axis for spec in self.buffers for axis in spec.shape if isinstance(axis, str)))

    def _check_reference(self, node: Expr) -> None:
        if isinstance(node, (Dim, Lead)):
            check(node.buffer < len(self.buffers), "buffer", f"< {len(self.buffers)}", node.buffer)
            spec = self.buffers[node.buffer]
            axes = -node.axis if isinstance(node, Dim) else node.count
            check(axes <= spec.min_rank, f"axes of {spec.name} counted from its end", f"<= {spec.min_rank}", axes)


def _buffers_of(params: Sequence[Param]) -> Iterator[int]:
    for param in params:
        if isinstance(param, (TensorMap, Pointer)):
            yield param.buffer
        elif isinstance(param, Record):
            yield from (value.buffer for _, value in param.fields if isinstance(value, Pointer))
