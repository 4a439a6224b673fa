"""Asynchronous matrix multiply of a warpgroup, PTX ISA 9.7.15 (sm_90a).

The four warps of a warpgroup reach an instruction one by one: the k-th wgmma of each of them is one operation, issued
when the last of the four has come. A warp that is ahead of the others waits in wgmma.wait_group only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator import mma
from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.layout import fragment, matrix, number
from jax_fa4.emulator.layout.number import Format
from jax_fa4.emulator.ops.operand import SharedMatrix, shared_matrix
from jax_fa4.emulator.ops.registers import RegisterVector
from jax_fa4.emulator.order import Times
from jax_fa4.emulator.schedule import AsyncOp, Wait
from jax_fa4.emulator.state import Hold, Lanes, Warp, Warpgroup
from jax_fa4.emulator.text.module import Vector

__all__ = ["Multiply"]

ROWS = 64  # M of every wgmma
WARPS = 4
UNWRITTEN = 0xFFFFFFFF  # registers start as this NaN, which no instruction produces
FP8_PAIRS = {(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")}
OPERAND_PAIRS = {  # by accumulator
    "f32": {("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), *FP8_PAIRS},
    "f16": {("f16", "f16"), *FP8_PAIRS},
    "s32": {(a, b) for a in ("s8", "u8") for b in ("s8", "u8")},
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Multiply:
    """One wgmma instruction of a program: D[64, n] (+)= A[64, K] B[n, K]."""

    n: int
    accumulator: str  # f32, f16 or s32
    a: Format
    b: Format
    d_registers: RegisterVector
    a_registers: RegisterVector | None  # None: A lies in shared memory
    negate_a: bool = False
    negate_b: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    saturate: bool = False

    def compute(
        self, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], d_bits: npt.NDArray | None, is_exact: bool
    ) -> npt.NDArray:
        """Bit patterns or values of the new D [64, n] from decoded operands and the old D (None: not accumulated)."""
        if self.accumulator == "s32":
            old = None if d_bits is None else d_bits.view(np.int32)
            return mma.multiply_accumulate_integer(a, b, old, saturate=self.saturate)
        a = -a if self.negate_a != self.negate_b else a
        c = None
        if d_bits is not None:
            c = (number.F32 if self.accumulator == "f32" else number.F16).decode(d_bits)
        precision = mma.FP8_WGMMA if self.a.element_bytes == 1 else mma.PRECISE
        if self.accumulator == "f16":  # rounded once, from all bits of the sum
            precision = dataclasses.replace(precision, result_bits=mma.PRECISE.result_bits)
        d = mma.multiply_accumulate(a, b, c, formats=(self.a, self.b), precision=precision, is_exact=is_exact)
        return d if self.accumulator == "f32" else mma.to_float16(d)

    @property
    def d_dtype(self) -> np.dtype:
        """Bit patterns of D's elements."""
        return np.dtype(np.uint16 if self.accumulator == "f16" else np.uint32)


class Operands(NamedTuple):
    """Run-time operands of one wgmma, which the four warps must agree on."""

    a_descriptor: int | None
    b_descriptor: int
    accumulates: bool


@dataclasses.dataclass(slots=True, eq=False)
class Meeting:
    """A wgmma that not all four warps have reached."""

    multiply: Multiply
    operands: Operands
    times: Times  # what all warps that have come know
    warps: int = 1


@dataclasses.dataclass(slots=True, eq=False)
class WarpState:
    """What one warp has issued. Operations are numbered from 1 and complete in order."""

    issued: int = 0
    has_fenced: bool = False
    groups: deque[int] = dataclasses.field(default_factory=deque)  # the last operation of each committed group
    in_flight: deque[tuple[int, int, int]] = dataclasses.field(
        default_factory=deque
    )  # operation, registers D, registers A
    hold: Hold | None = None


class Pipeline:
    """The wgmma queue of one warpgroup."""

    def __init__(self, warpgroup: Warpgroup):
        self.warpgroup = warpgroup
        self.cta = warpgroup.cta
        self.agent = self.cta.cluster.clocks.agent(f"wgmma of warpgroup {warpgroup.index}", is_async=True)
        self.warps = [WarpState() for _ in range(WARPS)]
        self.meetings: dict[int, Meeting] = {}
        self.completed = 0
        self.cta.at_exit.append(self.check_exit)

    def check_exit(self) -> None:
        """Everything issued must have been waited for."""
        for number_, state in enumerate(self.warps):
            if state.in_flight:
                warp = WARPS * self.warpgroup.index + number_
                raise Fault("wgmma", f"warp {warp} ends with {len(state.in_flight)} wgmma that it never waited for")

    def meet(self, warp: Warp, multiply: Multiply, operands: Operands) -> None:
        """A warp has reached its next operation; the last of the four issues it."""
        state = self.warps[warp.index % WARPS]
        state.issued += 1
        meeting = self.meetings.get(state.issued)
        if meeting is None:
            self.meetings[state.issued] = Meeting(multiply, operands, warp.clock.times.copy())
            return
        if meeting.multiply is not multiply or meeting.operands != operands:
            raise Fault("wgmma", f"operation {state.issued} of the warpgroup differs between its warps")
        np.minimum(meeting.times, warp.clock.times, out=meeting.times)
        meeting.warps += 1
        if meeting.warps == WARPS:
            del self.meetings[state.issued]
            self._issue(warp, state.issued, meeting)

    def _issue(self, warp: Warp, operation: int, meeting: Meeting) -> None:
        multiply, operands = meeting.multiply, meeting.operands
        b = self._shared(operands.b_descriptor, multiply.n, multiply.b, multiply.b_mn_major, "wgmma operand B")
        b.check(meeting.times, self.agent, operation)
        a = None
        if operands.a_descriptor is not None:
            a = self._shared(operands.a_descriptor, ROWS, multiply.a, multiply.a_mn_major, "wgmma operand A")
            a.check(meeting.times, self.agent, operation)
        is_exact = warp.machine.options.exact_mma

        def execute() -> None:
            self._execute(multiply, a, b, operands.accumulates, is_exact)
            self.completed = operation

        warp.machine.stats.add(warp, "wgmma_flops", 2 * ROWS * multiply.n * matrix.K_BYTES // multiply.a.element_bytes)
        what = f"wgmma {operation} of warpgroup {self.warpgroup.index}"
        warp.machine.queues.issue(AsyncOp(steps=(execute,), what=what, queue=self, blame=warp.blame()))

    def _shared(self, bits: int, rows: int, format: Format, mn_major: bool, what: str) -> SharedMatrix:
        return shared_matrix(
            self.cta, bits, matrix.decode_wgmma, rows=rows, format=format, mn_major=mn_major, what=what
        )

    def _execute(
        self, multiply: Multiply, a: SharedMatrix | None, b: SharedMatrix, accumulates: bool, is_exact: bool
    ) -> None:
        warps = self.warpgroup.warps
        if a is None:
            assert multiply.a_registers is not None  # the other place where A can be
            words = np.stack([multiply.a_registers.read(warp) for warp in warps])
            a_values = multiply.a.decode(fragment.gather_a(words, multiply.a.bits_dtype))
        else:
            a_values = a.read()
        d_bits = None
        if accumulates:
            words = np.stack([multiply.d_registers.read(warp) for warp in warps])
            if multiply.accumulator != "s32" and (words == UNWRITTEN).any():
                raise Fault("uninitialised", "wgmma adds to accumulator registers that were never written")
            d_bits = fragment.gather_accumulator(words, multiply.n, multiply.d_dtype)
        d = multiply.compute(a_values, b.read(), d_bits, is_exact)
        for warp, words in zip(warps, fragment.scatter_accumulator(d), strict=True):
            multiply.d_registers.write(warp, words)

    def describe(self, target: int) -> str:
        """A row of the deadlock table."""
        late = [str(WARPS * self.warpgroup.index + i) for i, state in enumerate(self.warps) if state.issued < target]
        if late:
            return (
                f"wgmma.wait_group: operation {target} of the warpgroup, which warp {', '.join(late)} has not reached"
            )
        return f"wgmma.wait_group: operation {target} of the warpgroup, {self.completed} are complete"


def _pipeline(warp: Warp) -> Pipeline:
    scratch = warp.warpgroup.scratch
    if "wgmma" not in scratch:
        if len(warp.warpgroup.warps) != WARPS:
            raise Fault("convergence", f"wgmma in a warpgroup of {len(warp.warpgroup.warps)} warps")
        scratch["wgmma"] = Pipeline(warp.warpgroup)
    return scratch["wgmma"]


def _forbid_touch(_hold: Hold) -> None:
    raise Fault("wgmma", "touches registers of a wgmma in flight: wgmma.wait_group must come first")


def _hold(warp: Warp, state: WarpState) -> None:
    """Guard the registers of all operations in flight with one hold."""
    if state.hold is not None:
        warp.unhold(state.hold)
        state.hold = None
    if state.in_flight:
        registers = functools.reduce(lambda mask, flight: mask | flight[1] | flight[2], state.in_flight, 0)
        state.hold = warp.hold(registers, _forbid_touch)


def _check_registers(warp: Warp, state: WarpState, d_mask: int, a_mask: int) -> None:
    if not state.has_fenced:
        raise Fault("wgmma", "the first wgmma needs a wgmma.fence before it")
    if warp.touched & (d_mask | a_mask):
        raise Fault("wgmma", "registers of this wgmma were touched since the last wgmma.fence")
    for operation, d_other, a_other in state.in_flight:
        if a_mask & d_other:
            raise Fault("wgmma", f"operand A is the accumulator of wgmma {operation}, which is still in flight")
        if d_mask & a_other or (d_mask & d_other and d_mask != d_other):
            raise Fault("wgmma", f"the accumulator overlaps registers of wgmma {operation}, which is still in flight")


# decoding


def _shape(form: Form, a: Format) -> int:
    """N of the instruction."""
    k = matrix.K_BYTES // a.element_bytes
    step = 16 if a.is_integer else 8
    widths = sorted({*range(step, 257, step), *((8, 24) if a.is_integer else ())})
    return int(form.take(*(f"m{ROWS}n{n}k{k}" for n in widths)).split("n")[1].split("k")[0])


def _sign(form: Form, operand: int) -> bool:
    value = form.immediate(operand)
    if value not in (1, -1):
        raise form.unknown(f"has scale {value}, which must be 1 or -1")
    return value == -1


def _majors(form: Form, a_in_registers: bool) -> dict[str, bool]:
    flags = [bool(form.immediate(i)) for i in range(6, len(form.operands))]
    if len(flags) != (1 if a_in_registers else 2):
        raise form.unknown(f"has {len(form.operands)} operands")
    return {"b_mn_major": flags[-1]} if a_in_registers else {"a_mn_major": flags[0], "b_mn_major": flags[1]}


def _multiply(form: Form) -> Multiply:
    form.take("sync")
    form.take("aligned")
    types = form.types()
    if len(types) != 3 or (types[1], types[2]) not in OPERAND_PAIRS.get(types[0], set()):
        raise form.unknown(f"has types {', '.join(types)}")
    accumulator, a, b = types[0], number.FORMATS[types[1]], number.FORMATS[types[2]]
    n = _shape(form, a)
    saturate = a.is_integer and form.has("satfinite")
    form.end()
    a_in_registers = isinstance(form.operands[1], Vector)
    flags = {} if a.is_integer else {"negate_a": _sign(form, 4), "negate_b": _sign(form, 5)}
    if a.element_bytes == 2:
        flags |= _majors(form, a_in_registers)
    d_slots = form.dsts(0, "b32")
    d_registers = RegisterVector([slot for slot in d_slots if slot is not None])
    if len(d_registers) != (expected := n // 4 if accumulator == "f16" else n // 2):
        raise form.unknown(f"has {len(d_registers)} accumulator registers, N = {n} takes {expected}")
    return Multiply(
        n=n,
        accumulator=accumulator,
        a=a,
        b=b,
        d_registers=d_registers,
        a_registers=RegisterVector(form.srcs(1, "b32")) if a_in_registers else None,
        saturate=saturate,
        **flags,
    )


@family("wgmma.mma_async")
def mma_async(form: Form) -> Effect:
    """D (+)= A B: issued when all four warps have come, executed later."""
    multiply = _multiply(form)
    a_slot = form.src(1, "u64") if multiply.a_registers is None else None
    b_slot, scale_slot = form.src(2, "u64"), form.src(3, "pred")
    d_mask = form.registers_of(0)
    a_mask = 0 if multiply.a_registers is None else form.registers_of(1)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "wgmma.mma_async")
        pipeline = _pipeline(warp)
        state = pipeline.warps[warp.index % WARPS]
        _check_registers(warp, state, d_mask, a_mask)
        operands = Operands(
            a_descriptor=None if a_slot is None else lanes.uniform(warp.v[a_slot], "descriptor A"),
            b_descriptor=lanes.uniform(warp.v[b_slot], "descriptor B"),
            accumulates=bool(lanes.uniform(warp.v[scale_slot], "scale-d")),
        )
        state.in_flight.append((state.issued + 1, d_mask, a_mask))
        _hold(warp, state)
        pipeline.meet(warp, multiply, operands)

    return form.effect(execute, handles_holds=True)


@family("wgmma.fence")
def fence(form: Form) -> Effect:
    """Orders earlier accesses of registers before the wgmma that follow."""
    form.take("sync")
    form.take("aligned")
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "wgmma.fence")
        warp.touched = 0
        _pipeline(warp).warps[warp.index % WARPS].has_fenced = True

    return form.effect(execute)


@family("wgmma.commit_group")
def commit_group(form: Form) -> Effect:
    """Closes the group of the wgmma issued since the last one; it may be empty."""
    form.take("sync")
    form.take("aligned")
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "wgmma.commit_group")
        state = _pipeline(warp).warps[warp.index % WARPS]
        state.groups.append(state.issued)

    return form.effect(execute)


@family("wgmma.wait_group")
def wait_group(form: Form) -> Effect:
    """Waits until at most N of the newest groups are pending; registers and memory of the others are free."""
    form.take("sync")
    form.take("aligned")
    form.end()
    pending = form.immediate(0)

    def execute(warp: Warp, lanes: Lanes) -> Wait | None:
        warp.require_converged(lanes, "wgmma.wait_group")
        pipeline = _pipeline(warp)
        state = pipeline.warps[warp.index % WARPS]
        if len(state.groups) <= pending:
            return None
        target = state.groups[-1 - pending]

        def finish() -> None:
            while len(state.groups) > pending:
                state.groups.popleft()
            while state.in_flight and state.in_flight[0][0] <= target:
                state.in_flight.popleft()
            _hold(warp, state)
            warp.clock.learn(pipeline.agent, target)

        return Wait(what=lambda: pipeline.describe(target), ready=lambda: pipeline.completed >= target, then=finish)

    return form.effect(execute)
