"""tcgen05.mma, cp, commit and fence: what single threads issue and the tensor core executes in issue order.

Order between MMAs of different accumulators, which the ISA leaves open and known kernels rely on, is taken as given:
all mma and cp of a CTA, or of a CTA pair, execute in the order in which they were issued. Other threads learn that they
are complete by tcgen05.commit only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator import mma
from jax_fa4.emulator.decode import Effect, Form, SharedAddress, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.layout import instruction, matrix, number
from jax_fa4.emulator.layout import tensor_memory as layout
from jax_fa4.emulator.layout.instruction import InstructionDescriptor
from jax_fa4.emulator.layout.tensor_memory import AccumulatorBlock
from jax_fa4.emulator.ops.operand import SharedMatrix, shared_matrix
from jax_fa4.emulator.ops.tcgen05.allocation import cta_group_of
from jax_fa4.emulator.ops.tcgen05.pipe import Pipe, ctas_of, memory_of, pipe_of, queue_of
from jax_fa4.emulator.order import Times
from jax_fa4.emulator.schedule import AsyncOp
from jax_fa4.emulator.state import Cta, Lanes, Warp
from jax_fa4.emulator.text.module import Address, Vector
from jax_fa4.emulator.tmem import GROUP_LANES, shadow_cells

__all__: list[str] = []

OFFSET_MASK = 0xFFFFFF  # of a shared address; the bits above are the CTA's rank
A_COLUMNS = matrix.K_BYTES // 4  # columns that A takes in tensor memory: its 32 bytes of K are packed
MAX_SCALE = 15  # of scale-input-d


class Region(NamedTuple):
    """Cells of one CTA: some lanes, consecutive columns."""

    cta: Cta
    lanes: npt.NDArray[np.int64]
    column: int
    columns: int

    @property
    def cells(self) -> npt.NDArray[np.int64]:
        """Shadow cells."""
        groups = tuple(np.unique(self.lanes // GROUP_LANES).tolist())
        return shadow_cells(groups, self.column, self.columns)

    @property
    def where(self) -> tuple[npt.NDArray[np.int64], slice]:
        """For `TensorMemory.cells` and `.written`."""
        return self.lanes, slice(self.column, self.column + self.columns)

    def check_read(self, times: Times, agent: int, epoch: int, what: str) -> None:
        """All of it is written, by writes that happened before; `agent` reads it at `epoch`."""
        memory = memory_of(self.cta)
        memory.check_written(memory.written[self.where], what)
        if memory.check_races:
            memory.shadow.check_read(self.cells, times, by_async=False, what=what)
            memory.shadow.mark_read(self.cells, agent, epoch)

    def check_write(self, times: Times, agent: int, epoch: int, what: str) -> None:
        """Nobody else may be using it; `agent` writes it at `epoch`."""
        memory = memory_of(self.cta)
        if memory.check_races:
            memory.shadow.check_write(self.cells, times, what=what)
            memory.shadow.mark_write(self.cells, agent, epoch)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one MMA that fills one block of D."""

    block: AccumulatorBlock
    d: Region
    a: Region | None  # None: from shared memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Multiply:
    """One issued MMA."""

    descriptor: InstructionDescriptor
    ctas: tuple[Cta, ...]
    parts: tuple[Part, ...]
    a: tuple[SharedMatrix, ...]  # by CTA; empty if A lies in tensor memory
    b: tuple[SharedMatrix, ...]  # by CTA
    accumulates: bool
    scale: int  # D is multiplied by 2**-scale first
    masked: npt.NDArray[np.bool_] | None  # lanes not to be written, [CTAs * 128]

    def check(self, times: Times, pipe: Pipe, operation: int) -> None:
        """Operands are in place and D is free."""
        for operand in (*self.a, *self.b):
            operand.check(times, pipe.agent, operation)
        for part in self.parts:
            if part.a is not None:
                part.a.check_read(times, pipe.tensor_agent, operation, "tcgen05.mma operand A")
            if self.accumulates:
                part.d.check_read(times, pipe.tensor_agent, operation, "tcgen05.mma accumulator")
            part.d.check_write(times, pipe.tensor_agent, operation, "tcgen05.mma")
            memory_of(part.d.cta).written[self._written(part).where] = True

    def execute(self, is_exact: bool) -> None:
        """Read the operands as they are now, and write D."""
        a = [operand.read() for operand in self.a]
        b = np.concatenate([operand.read() for operand in self.b])
        for part in self.parts:
            a_part = a[part.block.cta][part.block.a_rows] if part.a is None else self._from_tensor_memory(part.a)
            self._multiply(part, a_part, b[part.block.columns], is_exact)

    def _from_tensor_memory(self, region: Region) -> npt.NDArray[np.float32]:
        words = np.ascontiguousarray(memory_of(region.cta).cells[region.where])
        return self.descriptor.a.decode(words.view(self.descriptor.a.bits_dtype))

    def _multiply(self, part: Part, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], is_exact: bool) -> None:
        cells, is_half = memory_of(part.d.cta).cells, self.descriptor.accumulator == "f16"
        if self.descriptor.negate_a != self.descriptor.negate_b:
            a = -a
        c = None
        if self.accumulates:
            old = cells[part.d.where]
            c = number.F16.decode(old.astype(np.uint16)) if is_half else old.view(np.float32)
            c = np.ldexp(c, -self.scale) if self.scale else c
        d = mma.multiply_accumulate(a, b, c, formats=(self.descriptor.a, self.descriptor.b), is_exact=is_exact)
        bits = mma.to_float16(d).astype(np.uint32) if is_half else d.view(np.uint32)
        written = self._written(part)
        cells[written.where] = bits if self.masked is None else bits[np.isin(part.d.lanes, written.lanes)]

    def _written(self, part: Part) -> Region:
        """The lanes of D that are not masked out."""
        if self.masked is None:
            return part.d
        lanes = part.d.lanes
        return part.d._replace(lanes=lanes[~self.masked[layout.LANES * part.block.cta + lanes]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiplyForm:
    """The slots of one tcgen05.mma of a program."""

    cta_group: int
    kind: str
    d: SharedAddress
    a: SharedAddress | int  # in tensor memory, or the slot of a descriptor
    b: int
    descriptor: int
    mask: tuple[int, ...]
    accumulates: int
    scale: int

    def at(self, warp: Warp, lane: int) -> Multiply:
        """The MMA that a lane issues. Raises Fault for illegal descriptors and addresses."""
        ctas = ctas_of(warp, self.cta_group, "tcgen05.mma")
        descriptor = self._descriptor(int(warp.v[self.descriptor][lane]))
        words = np.array([warp.v[slot][lane] for slot in self.mask], "<u4")
        return Multiply(
            descriptor=descriptor,
            ctas=ctas,
            parts=self._parts(warp, lane, descriptor, ctas),
            a=() if isinstance(self.a, SharedAddress) else self._shared_a(int(warp.v[self.a][lane]), descriptor, ctas),
            b=self._shared_b(int(warp.v[self.b][lane]), descriptor, ctas),
            accumulates=bool(warp.v[self.accumulates][lane]),
            scale=self.scale,
            masked=np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool) if self.mask else None,
        )

    def _descriptor(self, bits: int) -> InstructionDescriptor:
        try:
            return instruction.decode(bits, self.kind, self.cta_group)
        except ValueError as error:
            raise Fault("descriptor", f"tcgen05.mma: {error}") from error

    def _parts(self, warp: Warp, lane: int, d: InstructionDescriptor, ctas: tuple[Cta, ...]) -> tuple[Part, ...]:
        d_lane, d_column = layout.split_address(int(self.d.at(warp)[lane]))
        is_half_height = d.m == 64
        if d_lane not in ((0, GROUP_LANES) if is_half_height else (0,)):
            raise Fault("tensor memory", f"accumulator of M = {d.m} at lane {d_lane}", address=d_lane << 16 | d_column)
        a_column = None
        if isinstance(self.a, SharedAddress):
            a_lane, a_column = layout.split_address(int(self.a.at(warp)[lane]))
            if a_lane != d_lane:
                raise Fault("tensor memory", f"operand A at lane {a_lane}, the accumulator at lane {d_lane}")
            if d.a_mn_major:
                raise Fault("descriptor", "operand A in tensor memory can't be MN-major")
            if self.cta_group == 2 and d.n % 32:
                raise Fault("descriptor", f"N is {d.n}; with A in tensor memory cta_group::2 takes multiples of 32")
        blocks = layout.accumulator_blocks(self.cta_group, d.m, d.n, upper_half=d_lane != 0)
        parts = []
        for block in blocks:
            cta = ctas[block.cta]
            columns = block.columns.stop - block.columns.start
            memory_of(cta).check_columns(d_column, columns, "tcgen05.mma accumulator")
            a = None
            if a_column is not None:
                memory_of(cta).check_columns(a_column, A_COLUMNS, "tcgen05.mma operand A")
                a = Region(cta, block.lanes, a_column, A_COLUMNS)
            parts.append(Part(block=block, d=Region(cta, block.lanes, d_column, columns), a=a))
        return tuple(parts)

    def _shared_a(self, bits: int, d: InstructionDescriptor, ctas: tuple[Cta, ...]) -> tuple[SharedMatrix, ...]:
        return _shared(ctas, bits, d.m // self.cta_group, d.a, d.a_mn_major, "tcgen05.mma operand A")

    def _shared_b(self, bits: int, d: InstructionDescriptor, ctas: tuple[Cta, ...]) -> tuple[SharedMatrix, ...]:
        return _shared(ctas, bits, d.n // self.cta_group, d.b, d.b_mn_major, "tcgen05.mma operand B")


def _shared(
    ctas: tuple[Cta, ...], bits: int, rows: int, format: number.Format, mn_major: bool, what: str
) -> tuple[SharedMatrix, ...]:
    """The same descriptor, applied in each CTA."""
    return tuple(
        shared_matrix(cta, bits, matrix.decode_tcgen05, rows=rows, format=format, mn_major=mn_major, what=what)
        for cta in ctas
    )


def _issue(warp: Warp, ctas: tuple[Cta, ...], pipe: Pipe, execute: Callable[[], None], what: str) -> None:
    """Append an operation to a thread's pipe."""
    pipe.issued += 1
    operation = pipe.issued

    def step() -> None:
        execute()
        pipe.completed = operation

    warp.machine.queues.issue(AsyncOp(steps=(step,), what=what, queue=queue_of(ctas), blame=warp.blame()))


def _scale(form: Form, operand: int, kind: str) -> int:
    if operand >= len(form.operands):
        return 0
    scale = form.immediate(operand)
    if kind == "f8f6f4" or not 0 <= scale <= MAX_SCALE:
        raise form.unknown(f"has scale-input-d {scale}")
    return scale


@family("tcgen05.mma")
def multiply(form: Form) -> Effect:
    """D (+)= A B in tensor memory; each executing thread issues one."""
    cta_group = cta_group_of(form)
    kind = form.take("kind::f16", "kind::tf32", "kind::f8f6f4").removeprefix("kind::")
    form.drop("collector::a::")  # which operand to keep in a buffer: no effect on results
    form.end()
    has_mask = len(form.operands) > 4 and isinstance(form.operands[4], Vector)
    mask = form.srcs(4, "u32") if has_mask else ()
    if has_mask and len(mask) != 4 * cta_group:
        raise form.unknown(f"has {len(mask)} words of lane masks, {4 * cta_group} are needed")
    flags = 5 if has_mask else 4
    decoded = MultiplyForm(
        cta_group=cta_group,
        kind=kind,
        d=form.shared(0),
        a=form.shared(1) if isinstance(form.operands[1], Address) else form.src(1, "u64"),
        b=form.src(2, "u64"),
        descriptor=form.src(3, "u32"),
        mask=mask,
        accumulates=form.src(flags, "pred"),
        scale=_scale(form, flags + 1, kind),
    )

    def execute(warp: Warp, lanes: Lanes) -> None:
        is_exact = warp.machine.options.exact_mma
        for lane in lanes.index:
            issued = decoded.at(warp, lane)
            pipe = pipe_of(warp, lane)
            issued.check(pipe.times(warp), pipe, pipe.issued + 1)
            d = issued.descriptor
            flops = 2 * d.m * d.n * matrix.K_BYTES // d.a.element_bytes
            warp.machine.stats.add(warp, "tcgen05_flops", flops)
            _issue(warp, issued.ctas, pipe, functools.partial(issued.execute, is_exact), "tcgen05.mma")

    return form.effect(execute)


@family("tcgen05.cp")
def copy(form: Form) -> Effect:
    """Rows of shared memory to lanes of tensor memory, in each CTA of the group."""
    cta_group = cta_group_of(form)
    shape = form.take("128x256b", "128x128b", "4x256b", "64x128b", "32x128b")
    if shape == "64x128b":
        shape += "." + form.take("warpx2::02_13", "warpx2::01_23")
    if shape == "32x128b":
        shape += "." + form.take("warpx4")
    form.end()
    target, source = form.shared(0), form.src(1, "u64")
    rows = layout.COPY_SHAPES[shape]
    columns = rows.row_bytes // 4

    def issue(warp: Warp, lane: int) -> None:
        ctas = ctas_of(warp, cta_group, "tcgen05.cp")
        pipe = pipe_of(warp, lane)
        times, operation = pipe.times(warp), pipe.issued + 1
        first_lane, column = layout.split_address(int(target.at(warp)[lane]))
        if first_lane:
            raise Fault("tensor memory", f"tcgen05.cp to lane {first_lane}, it must be 0", address=first_lane << 16)
        bits = int(warp.v[source][lane])
        moves = []
        for cta in ctas:
            memory_of(cta).check_columns(column, columns, "tcgen05.cp")
            words = shared_matrix(
                cta, bits, matrix.decode_tcgen05, rows=len(rows.lanes), format=number.F32, mn_major=False,
                what="tcgen05.cp source",
            )  # fmt: skip
            words.check(times, pipe.agent, operation)
            region = Region(cta, rows.lanes.reshape(-1), column, columns)
            region.check_write(times, pipe.tensor_agent, operation, "tcgen05.cp")
            memory_of(cta).written[region.where] = True
            moves.append((words, region))

        def execute() -> None:
            for words, region in moves:
                values = words.read().view(np.uint32)[:, :columns]
                memory_of(region.cta).cells[region.where] = np.repeat(values, rows.lanes.shape[1], axis=0)

        _issue(warp, ctas, pipe, execute, "tcgen05.cp")

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            issue(warp, lane)

    return form.effect(execute)


@family("tcgen05.commit")
def commit(form: Form) -> Effect:
    """One arrival at an mbarrier, here or in several CTAs, once all earlier mma and cp of the thread are complete."""
    cta_group = cta_group_of(form)
    for word in ("mbarrier::arrive::one", "b64"):
        form.take(word)
    form.take("shared::cluster", default="")
    is_multicast = form.has("multicast::cluster")
    form.end()
    barrier = form.shared(0)
    mask = form.src(1, "b16") if is_multicast else None

    def issue(warp: Warp, lane: int) -> None:
        ctas = ctas_of(warp, cta_group, "tcgen05.commit")
        address = int(barrier.at(warp)[lane])
        cluster = warp.cta.cluster
        targets = [cluster.cta_of(address)]
        if mask is not None:
            bits = int(warp.v[mask][lane])
            if bits == 0 or bits >> len(cluster.ctas):
                raise Fault("bounds", f"multicast mask {bits:#06x} in a cluster of {len(cluster.ctas)} CTAs")
            targets = [cta for cta in cluster.ctas if bits >> cta.rank & 1]
        barriers = [cta.mbarriers.at(address & OFFSET_MASK) for cta in targets]
        for target in barriers:
            target.require_async_visible()
        pipe = pipe_of(warp, lane)
        times = warp.clock.release()
        pipe.set(times, pipe.issued)

        def arrive() -> None:
            for target in barriers:
                target.arrive(1, times)

        queue = queue_of(ctas) if pipe.completed < pipe.issued else None
        warp.machine.queues.issue(AsyncOp(steps=(arrive,), what="tcgen05.commit", queue=queue, blame=warp.blame()))

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            issue(warp, lane)

    return form.effect(execute)


@family("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(form: Form) -> Effect:
    """Order accesses to tensor memory against relaxed synchronisation; in strict mode against any."""
    is_before = form.instruction.opcode.startswith("tcgen05.fence::before")
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        if is_before:
            warp.clock.fence_before()
        else:
            warp.clock.fence_after()

    return form.effect(execute)
