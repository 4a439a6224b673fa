"""mbarrier objects, PTX ISA 9.7.13.15. Every executing lane acts on its own, as in hardware."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.barriers import Mbarrier
from jax_fa4.emulator.decode import Effect, Form, SharedAddress, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.ops.memory import owner_of
from jax_fa4.emulator.schedule import POLL, Wait
from jax_fa4.emulator.state import Lanes, Warp
from jax_fa4.emulator.text.module import Address

EARLY_EXPIRY = 0.25  # of try_wait, in mode "random": a wait may give up although nothing is wrong


def _take_space(form: Form) -> None:
    form.take("shared", "shared::cta", "shared::cluster", default="shared")


def find(warp: Warp, address: int, what: str, *, own_only: bool = False) -> Mbarrier:
    """The live mbarrier at a shared address, visible to this warp."""
    cta = owner_of(warp, np.array([address]), what, own_only=own_only)
    barrier = cta.mbarriers.at(address & 0xFFFFFF)
    barrier.require_visible(warp.clock)
    if cta is not warp.cta:
        barrier.require_async_visible()
    return barrier


def _value(warp: Warp, slot: int | None, lane: int, default: int) -> int:
    return default if slot is None else int(warp.v[slot][lane])


@family("mbarrier.init")
def init(form: Form) -> Effect:
    _take_space(form)
    form.take("b64")
    form.end()
    where, count = form.shared(0), form.src(1, "u32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        addresses, counts = where.at(warp)[lanes.mask].tolist(), warp.v[count][lanes.mask].tolist()
        # lanes that do the same at the same time do it once: known-good kernels initialise with a whole warp
        for address, expected in dict.fromkeys(zip(addresses, counts, strict=True)):
            cta = owner_of(warp, np.array([address]), "mbarrier.init", own_only=True)
            cta.mbarriers.init(address & 0xFFFFFF, expected, warp.clock)

    return form.effect(execute)


@family("mbarrier.inval")
def inval(form: Form) -> Effect:
    _take_space(form)
    form.take("b64")
    form.end()
    where = form.shared(0)

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            address = int(where.at(warp)[lane])
            find(warp, address, "mbarrier.inval", own_only=True)
            warp.cta.mbarriers.inval(address & 0xFFFFFF)

    return form.effect(execute)


class _Arrival:
    """Operands of the arriving forms: optional token, address, optional count or byte count."""

    def __init__(self, form: Form):
        self.is_relaxed = form.take("release", "relaxed", default="release") == "relaxed"
        self.scope = form.take("cta", "cluster", default="cta")
        _take_space(form)
        form.take("b64")
        self.expects = form.has("expect_tx")
        self.must_not_complete = form.has("noComplete")
        form.end()
        at = 0 if isinstance(form.operands[0], Address) else 1
        self.where: SharedAddress = form.shared(at)
        self.extra = form.src(at + 1, "u32") if len(form.operands) > at + 1 else None
        self.token = form.dst(0, "b64") if at else None


@family("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(form: Form) -> Effect:
    """Bytes to expect, if any, are added before the arrival, as one step."""
    drops = form.instruction.opcode.startswith("mbarrier.arrive_drop")
    operands = _Arrival(form)

    def execute(warp: Warp, lanes: Lanes) -> None:
        addresses = operands.where.at(warp)
        times = warp.clock.release(is_relaxed=operands.is_relaxed)
        for lane in lanes.index:
            barrier = find(warp, int(addresses[lane]), "mbarrier.arrive")
            count = 1 if operands.expects else _value(warp, operands.extra, lane, 1)
            if operands.expects:
                barrier.expect_tx(_value(warp, operands.extra, lane, 0))
            if operands.must_not_complete and count >= barrier.pending:
                raise Fault("mbarrier", f"arrive.noComplete completes {barrier.describe()}", address=barrier.address)
            if drops:
                barrier.drop(count)
            is_beyond = operands.scope == "cta" and barrier.cta is not warp.cta
            token = barrier.arrive(count, warp.clock.beyond_scope(times) if is_beyond else times)
            if operands.token is not None:
                warp.v[operands.token][lane] = token

    return form.effect(execute)


@family("mbarrier.expect_tx", "mbarrier.complete_tx")
def transactions(form: Form) -> Effect:
    completes = form.instruction.opcode.startswith("mbarrier.complete_tx")
    form.take("relaxed", default="relaxed")
    form.take("cta", "cluster", default="cta")
    _take_space(form)
    form.take("b64")
    form.end()
    where, size = form.shared(0), form.src(1, "u32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        addresses = where.at(warp)
        for lane in lanes.index:
            barrier = find(warp, int(addresses[lane]), "mbarrier.expect_tx")
            (barrier.complete_tx if completes else barrier.expect_tx)(int(warp.v[size][lane]))

    return form.effect(execute)


@family("mbarrier.pending_count")
def pending_count(form: Form) -> Effect:
    form.take("b64")
    form.end()
    token, result = form.src(1, "b64"), form.dst(0, "b32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        if result is not None:
            lanes.put(warp.v[result], warp.v[token] & np.uint64((1 << 20) - 1))

    return form.effect(execute)


class _WaitForm:
    """Operands of the waits: where the answer goes, the barrier, parity or token."""

    def __init__(self, form: Form):
        self.by_parity = form.has("parity")
        self.is_relaxed = form.take("acquire", "relaxed", default="acquire") == "relaxed"
        form.take("cta", "cluster", default="cta")
        _take_space(form)
        form.take("b64")
        form.end()
        self.where = form.shared(1)
        self.key = form.src(2, "u32" if self.by_parity else "b64")
        if len(form.operands) > 3:
            form.src(3, "u32")  # a time limit, in nanoseconds
        self.answer = form.dst(0, "pred")

    def phase(self, barrier: Mbarrier, key: int) -> int:
        """How many phases must be complete for the wait to pass, given the barrier's state now."""
        if self.by_parity:
            return barrier.phase + (barrier.phase & 1 == key & 1)
        return (key >> 20) + 1

    def put(self, warp: Warp, lanes: Lanes, answer: npt.NDArray[np.bool_] | bool) -> None:
        if self.answer is not None:
            lanes.put(warp.v[self.answer], answer)


@family("mbarrier.try_wait")
def try_wait(form: Form) -> Effect:
    """Sleeps until the phase completes.

    Gives up (false) only if nothing else can run, or now and then in mode "random".
    """
    operands = _WaitForm(form)

    def execute(warp: Warp, lanes: Lanes) -> Wait | None:
        addresses, keys = operands.where.at(warp)[lanes.mask], warp.v[operands.key][lanes.mask]
        if (addresses != addresses[0]).any() or (keys != keys[0]).any():
            return _test_each(operands, warp, lanes)
        barrier = find(warp, int(addresses[0]), "mbarrier.try_wait", own_only=True)
        phase = operands.phase(barrier, int(keys[0]))
        if barrier.phase >= phase:
            _observe(operands, barrier, warp, lanes)
            return None
        machine = warp.machine
        if machine.options.completion == "random" and machine.rng.random() < EARLY_EXPIRY:
            operands.put(warp, lanes, False)
            return POLL
        return Wait(
            what=functools.partial(_describe, barrier, phase),
            ready=lambda: barrier.phase >= phase,
            then=lambda: _wake(operands, barrier, phase, warp, lanes),
            expire=lambda: operands.put(warp, lanes, False),
            on=f"mbarrier 0x{barrier.address:x}",
        )

    return form.effect(execute)


def _describe(barrier: Mbarrier, phase: int) -> str:
    return f"phase {phase - 1} (parity {phase - 1 & 1}) of {barrier.describe()}"


def _observe(operands: _WaitForm, barrier: Mbarrier, warp: Warp, lanes: Lanes) -> None:
    warp.clock.join(barrier.released, is_relaxed=operands.is_relaxed)
    operands.put(warp, lanes, True)


def _wake(operands: _WaitForm, barrier: Mbarrier, phase: int, warp: Warp, lanes: Lanes) -> None:
    if operands.by_parity and barrier.phase > phase:
        message = f"{barrier.describe()} completed {barrier.phase - phase + 1} phases before a waiter saw the first"
        raise Fault("mbarrier", message, address=barrier.address)
    _observe(operands, barrier, warp, lanes)


def _test_each(operands: _WaitForm, warp: Warp, lanes: Lanes) -> Wait | None:
    """Lanes ask about different barriers or phases: each gets its own answer at once."""
    answer = np.zeros(32, bool)
    addresses = operands.where.at(warp)
    for lane in lanes.index:
        barrier = find(warp, int(addresses[lane]), "mbarrier wait", own_only=True)
        answer[lane] = barrier.phase >= operands.phase(barrier, int(warp.v[operands.key][lane]))
        if answer[lane]:
            warp.clock.join(barrier.released, is_relaxed=operands.is_relaxed)
    operands.put(warp, lanes, answer)
    return None if answer[lanes.mask].all() else POLL


@family("mbarrier.test_wait")
def test_wait(form: Form) -> Effect:
    operands = _WaitForm(form)
    return form.effect(functools.partial(_test_each, operands))
