"""The public entry: run a kernel of a PTX module on numpy arrays."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator import execute, program
from jax_fa4.emulator.barriers import ClusterBarrier, Mbarriers, NamedBarriers
from jax_fa4.emulator.errors import EmulatorError, ExecutionError, Fault
from jax_fa4.emulator.launch import Buffer, Launch, Options, Struct, TensorMap
from jax_fa4.emulator.layout import swizzle
from jax_fa4.emulator.layout import tensor_map as layout
from jax_fa4.emulator.memory import (
    DYNAMIC_SMEM_OFFSET,
    PARAM_WINDOW,
    SMEM_LIMIT,
    GlobalBuffer,
    GlobalMemory,
    LocalMemory,
    SharedMemory,
    place,
)
from jax_fa4.emulator.order import Clock, Clocks
from jax_fa4.emulator.program import Program, Step
from jax_fa4.emulator.schedule import AsyncQueues, Scheduler, Wait
from jax_fa4.emulator.slots import DTYPES, PAIRS
from jax_fa4.emulator.state import ALL_BITS, Cluster, Cta, Fragment, Warp, Warpgroup, lanes_of
from jax_fa4.emulator.stats import Stats
from jax_fa4.emulator.text.parser import parse
from jax_fa4.emulator.timeline import Timeline

__all__ = ["BoundTensorMap", "Machine", "Result", "load", "run"]

AGENTS_PER_CTA = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a launch did, besides changing its buffers."""

    stats: Stats
    timeline: Timeline | None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BoundTensorMap:
    """A tensor map parameter in this launch: the map, and the memory that it points into."""

    map: layout.TensorMap
    memory: GlobalBuffer


def run(ptx: str, launch: Launch, options: Options | None = None, *, entry: str | None = None) -> Result:
    """Run one kernel; arrays of `Buffer` parameters change in place.

    Raises `UnknownInstruction` or `PtxSyntaxError` before anything runs, `ExecutionError` for a broken rule,
    `Deadlock`.
    """
    with np.errstate(all="ignore"):
        return Machine(load(ptx, entry), launch, options or Options()).run()


@functools.lru_cache(maxsize=16)
def load(ptx: str, entry: str | None = None) -> Program:
    """Parse and decode a kernel; raises `UnknownInstruction` or `PtxSyntaxError`."""
    return program.build(parse(ptx), entry)


class Machine:
    """One launch: memory, asynchronous operations, and the clusters that run."""

    def __init__(self, program: Program, launch: Launch, options: Options):
        self.program = program
        self.launch = launch
        self.options = options
        self.rng = random.Random(options.seed)
        self.queues = AsyncQueues(options.completion, self.rng)
        self.stats = Stats()
        self.timeline = Timeline() if options.record_timeline else None
        self.progress = 0
        self._waiting: deque[tuple[int, int, int]] = deque()  # first CTAs of clusters that have not started
        self.global_memory = GlobalMemory()
        self.tensor_maps: dict[int, BoundTensorMap] = {}
        self.params = self._bind_parameters()
        self._smem_symbols, self._smem_bytes = self._place_shared()
        self._local_symbols, self._local_bytes = place(self._variables("local"), 0)
        self._constants = self._place_constants()
        self._check_launch()

    # construction

    def _bind_parameters(self) -> npt.NDArray[np.uint8]:
        expected = self.program.entry.parameters
        if len(expected) != len(self.launch.params):
            raise ValueError(f"the kernel has {len(expected)} parameters, the launch {len(self.launch.params)}")
        size = max((parameter.offset + parameter.size for parameter in expected), default=0)
        block = np.zeros(-(-size // 16) * 16, np.uint8)
        for parameter, given in zip(expected, self.launch.params, strict=True):
            if isinstance(given, TensorMap):
                self.tensor_maps[parameter.offset] = self._bind_map(given)
                data = bytes(128)
            elif isinstance(given, Struct):
                struct = bytearray(given.size)
                for offset, value in given.fields:
                    field = self._bytes(value)
                    struct[offset : offset + len(field)] = field
                data = bytes(struct)
            else:
                data = self._bytes(given)
            if len(data) != parameter.size:
                raise ValueError(f"parameter {parameter.name} has {parameter.size} bytes, the launch gives {len(data)}")
            block[parameter.offset : parameter.offset + len(data)] = np.frombuffer(data, np.uint8)
        return block

    def _bytes(self, given: bytes | Buffer) -> bytes:
        """A number, or the address of a buffer."""
        if isinstance(given, bytes):
            return given
        return (self.global_memory.add(given.array).base + given.offset).to_bytes(8, "little")

    def _bind_map(self, given: TensorMap) -> BoundTensorMap:
        memory = self.global_memory.add(given.buffer.array)
        bound = layout.TensorMap(
            address=memory.base + given.buffer.offset,
            dtype=given.dtype,
            dims=given.dims,
            strides=given.strides,
            box=given.box,
            element_strides=given.element_strides or (),
            swizzle=swizzle.by_name(given.swizzle),
            fills_nan=given.oob_fill == "nan",
        )
        return BoundTensorMap(map=bound, memory=memory)

    def _variables(self, space: str) -> list[tuple[str, int, int]]:
        found = (*self.program.module.variables, *self.program.entry.variables)
        return [(item.name, item.size, item.align) for item in found if item.space == space]

    def _place_shared(self) -> tuple[dict[str, int], int]:
        static = [item for item in self._variables("shared") if item[1]]
        dynamic = [item for item in self._variables("shared") if not item[1]]
        offsets, end = place(static, DYNAMIC_SMEM_OFFSET)
        for name, _, align in dynamic:
            offsets[name] = -(-end // align) * align
        end = max([end, *(offsets[name] for name, _, _ in dynamic)])
        return offsets, end - DYNAMIC_SMEM_OFFSET + self.launch.smem_bytes

    def _place_constants(self) -> dict[str, int]:
        addresses = {}
        for item in (*self.program.module.variables, *self.program.entry.variables):
            if item.space in ("const", "global"):
                data = np.zeros(item.size, np.uint8)
                if item.initial is not None:
                    data[: len(item.initial)] = np.frombuffer(item.initial, np.uint8)
                addresses[item.name] = self.global_memory.add(data).base
        return addresses

    def _check_launch(self) -> None:
        launch, entry = self.launch, self.program.entry
        if entry.required_threads is not None and entry.required_threads != launch.block_extent:
            raise ValueError(
                f"the kernel needs blocks of {entry.required_threads}, the launch has {launch.block_extent}"
            )
        if launch.threads % 32 or not 0 < launch.threads <= 1024:
            raise ValueError(f"a block has up to 1024 threads in whole warps, the launch has {launch.threads}")
        if any(extent % size for extent, size in zip(launch.grid, launch.cluster, strict=True)):
            raise ValueError(f"grid {launch.grid} is not a multiple of the cluster {launch.cluster}")
        if self._smem_bytes > SMEM_LIMIT:
            raise ValueError(f"{self._smem_bytes} bytes of shared memory, {SMEM_LIMIT} exist")

    # running

    def run(self) -> Result:
        """Run all clusters, `options.resident_clusters` at a time, in order."""
        scheduler = Scheduler(self, execute.advance)
        self._waiting.extend(self._origins())
        while self._waiting:
            count = min(self.options.resident_clusters, len(self._waiting))
            clusters = [self._make_cluster(self._waiting.popleft()) for _ in range(count)]
            warps = [warp for cluster in clusters for cta in cluster.ctas for warp in cta.warps]
            scheduler.run(warps)
            for warp in warps:
                self.stats.add_counts(self.program, warp)
                self.program.slots.free(warp.registers)
        for buffer in self.global_memory.buffers:
            if buffer.array.flags.writeable:
                buffer.write_back()
        return Result(stats=self.stats, timeline=self.timeline)

    def _origins(self) -> Iterator[tuple[int, int, int]]:
        (gx, gy, gz), (cx, cy, cz) = self.launch.grid, self.launch.cluster
        return ((x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx))

    def _make_cluster(self, origin: tuple[int, int, int]) -> Cluster:
        cx, cy, cz = self.launch.cluster
        size = cx * cy * cz
        clocks = Clocks(AGENTS_PER_CTA * size, is_strict=self.options.strict)
        cluster = Cluster(self, self.program, clocks)
        for rank in range(size):
            inside = (rank % cx, rank // cx % cy, rank // (cx * cy))
            ctaid = (origin[0] + inside[0], origin[1] + inside[1], origin[2] + inside[2])
            cluster.ctas.append(self._make_cta(cluster, rank, ctaid, inside))
        cluster.barrier = ClusterBarrier(cluster)
        return cluster

    def _make_cta(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int], inside: tuple[int, int, int]) -> Cta:
        cta = Cta(cluster, rank, ctaid)
        cta.smem = SharedMemory(cluster.clocks, rank, self._smem_bytes, self.options.check_races)
        cta.mbarriers = Mbarriers(cta)
        cta.named_barriers = NamedBarriers(cta)
        for index in range(self.launch.threads // 32):
            registers = self.program.slots.allocate()
            self.program.slots.reset(registers, functools.partial(self._special, cta, index, inside))
            warp = Warp(cta, index, registers, Clock(cluster.clocks, f"warp {index} of CTA {rank}"))
            warp.local = LocalMemory(self._local_bytes)
            warp.fragments.append(Fragment(0, lanes_of(ALL_BITS)))
            cta.warps.append(warp)
        cta.warpgroups = [Warpgroup(cta, index) for index in range(-(-len(cta.warps) // 4))]
        return cta

    def _special(self, cta: Cta, warp: int, inside: tuple[int, int, int], name: str, kind: str) -> npt.NDArray[Any]:
        """The array of a special register, an inverted predicate, an unwanted result or a symbol's address."""
        dtype = DTYPES[kind]
        shape = (64,) if kind in PAIRS else (2, 32) if kind == "b128" else (32,)
        if name == "trash" or name.startswith("!"):
            return np.zeros(shape, dtype)
        lanes = np.arange(32)
        if name.startswith("&"):
            return np.full(shape, self._address(cta, name[1:]), dtype)
        base, _, axis = name.partition(".")
        bx, by, _ = self.launch.block_extent
        linear = 32 * warp + lanes
        cluster = self.launch.cluster
        extents = {
            "tid": (linear % bx, linear // bx % by, linear // (bx * by)),
            "ntid": self.launch.block_extent,
            "ctaid": cta.ctaid,
            "nctaid": self.launch.grid,
            "cluster_ctaid": inside,
            "cluster_nctaid": cluster,
            "clusterid": tuple(c // n for c, n in zip(cta.ctaid, cluster, strict=True)),
            "nclusterid": tuple(c // n for c, n in zip(self.launch.grid, cluster, strict=True)),
        }
        scalars: dict[str, Any] = {
            "laneid": lanes,
            "warpid": warp,
            "nwarpid": self.launch.threads // 32,
            "cluster_ctarank": cta.rank,
            "cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
            "is_explicit_cluster": cluster != (1, 1, 1),
            "smid": 0,
            "nsmid": 132,
            "gridid": 1,
            "dynamic_smem_size": self.launch.smem_bytes,
            "total_smem_size": self._smem_bytes,
            "lanemask_eq": 1 << lanes,
            "lanemask_lt": (1 << lanes) - 1,
            "lanemask_le": (2 << lanes) - 1,
            "lanemask_gt": ~((2 << lanes) - 1),
            "lanemask_ge": ~((1 << lanes) - 1),
            "clock": 0,
            "clock64": 0,
            "globaltimer": 0,
        }
        value = extents[base]["xyz".index(axis)] if axis else scalars[base]
        return np.broadcast_to(np.asarray(value).astype(dtype), shape).copy()

    def _address(self, cta: Cta, symbol: str) -> int:
        if symbol in self._smem_symbols:
            return cta.rank << 24 | self._smem_symbols[symbol]
        if symbol in self._local_symbols:
            return self._local_symbols[symbol]
        if symbol in self._constants:
            return self._constants[symbol]
        for parameter in self.program.entry.parameters:
            if parameter.name == symbol:
                return PARAM_WINDOW + parameter.offset
        raise Fault("undefined", f"unknown symbol {symbol}")

    # services to handlers

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """The first CTA of a cluster that will not start, since the caller takes over its work; None if all have."""
        return self._waiting.popleft() if self._waiting else None

    def tensor_map(self, address: int) -> BoundTensorMap:
        """The tensor map at a generic address."""
        offset = address - PARAM_WINDOW
        if offset not in self.tensor_maps:
            raise Fault("tensor map", "there is no tensor map", address=address)
        return self.tensor_maps[offset]

    def blame(self, warp: Warp, step: Step) -> Callable[[Exception], EmulatorError]:
        """Turns a fault into an error at `step` of `warp`."""

        def with_place(error: Exception) -> EmulatorError:
            if isinstance(error, Fault):
                return ExecutionError(execute.place_of(self, warp, step), error)
            assert isinstance(error, EmulatorError)  # AsyncQueues catches no others
            return error

        return with_place

    def blamed(self, warp: Warp, step: Step | None, action: Callable[[], None]) -> None:
        """Run `action`; its faults are reported at `step`."""
        try:
            action()
        except Fault as fault:
            raise ExecutionError(execute.place_of(self, warp, step or warp.step), fault) from fault

    # events

    def instructions_of(self, warp: Warp) -> int:
        """What the warp has executed so far; only counted for a timeline."""
        if self.timeline is None:
            return 0
        return sum(count * len(step.instructions) for count, step in zip(warp.counts, self.program.steps, strict=True))

    def on_turn(self, warp: Warp, fragment: Fragment, before: int) -> None:
        """A fragment has run until it waits, or its slice is over."""
        if self.timeline is not None:
            self.timeline.ran(warp, self.instructions_of(warp) - before)
            if fragment.wait is not None:
                self.timeline.sleeps(fragment.wait)

    def on_wake(self, warp: Warp, fragment: Fragment, wait: Wait) -> None:
        """A fragment's wait is over."""
        if self.timeline is not None and fragment.waiting_at is not None:
            opcode = fragment.waiting_at.instructions[0].opcode
            self.timeline.wakes(warp, wait, wait.on or opcode, fragment.waiting_at)

    def on_exit(self, warp: Warp) -> None:
        """Threads of a warp have exited."""
        self.progress += 1
        cta = warp.cta
        cta.cluster.barrier.update()
        if cta.has_exited:
            if not self.options.allow_unwaited_stores:
                cta.check_bulk_sources()
            for check in cta.at_exit:
                check()
            if (cta.smem.shadow.busy == 1).any():
                raise Fault("exit", "the CTA exits while a copy into its shared memory is in flight")
