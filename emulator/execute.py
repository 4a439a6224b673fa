"""The inner loop: a fragment of a warp executes steps until it has to wait, ends, or its slice is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import ExecutionError, Fault, Place
from jax_fa4.emulator.program import Step, StepKind
from jax_fa4.emulator.schedule import POLL
from jax_fa4.emulator.state import Fragment, Join, Lanes, Warp, lanes_of

if TYPE_CHECKING:
    from jax_fa4.emulator.run import Machine

__all__ = ["advance", "place_of"]

RUN, EFFECT, BRANCH = StepKind.RUN, StepKind.EFFECT, StepKind.BRANCH


def place_of(machine: Machine, warp: Warp, step: Step) -> Place:
    """Where `warp` is when it executes `step`."""
    instruction = step.instructions[0]
    return Place(
        kernel=machine.program.entry.name,
        line=instruction.line,
        text=instruction.text,
        ctaid=warp.cta.ctaid,
        warp=warp.index,
    )


def advance(machine: Machine, warp: Warp, fragment: Fragment, budget: int) -> None:
    """Execute up to `budget` steps. Raises `ExecutionError` for a broken rule."""
    steps, v, counts = machine.program.steps, warp.v, warp.counts
    pc, lanes, join_pc = fragment.pc, fragment.lanes, fragment.join_pc
    step = steps[pc]
    try:
        while budget > 0:
            if pc == join_pc:
                fragment.pc = pc
                _meet(warp, fragment)
                return
            step = steps[pc]
            budget -= 1
            counts[pc] += 1
            if step.kind is RUN:
                if warp.held & step.touches:
                    warp.touch_held(step.touches)
                warp.touched |= step.matrix_touches
                if lanes.full:
                    step.run.full(v)  # type: ignore[union-attr]  # a RUN step has a run
                else:
                    step.run.masked(v, lanes.mask, lanes.pairs)  # type: ignore[union-attr]
                pc += 1
            elif step.kind is EFFECT:
                active = lanes if step.guard is None else _guarded(lanes, v, step.guard)
                pc += 1
                if active is None:
                    continue
                _prepare(warp, step, active)
                warp.step = step
                wait = step.effect.execute(warp, active)  # type: ignore[union-attr]
                for slot in step.defines:
                    v[slot] |= active.mask
                if wait is None:
                    continue
                if wait is POLL:
                    fragment.pc, fragment.polling = pc, True
                    return
                if wait.ready():
                    if wait.then is not None:
                        wait.then()
                    continue
                fragment.pc, fragment.wait, fragment.waiting_at = pc, wait, step
                return
            elif step.kind is BRANCH:
                taken = lanes if step.guard is None else _guarded(lanes, v, step.guard)
                if taken is lanes:
                    pc = step.target
                elif taken is None:
                    pc += 1
                else:
                    _diverge(warp, fragment, step, taken, pc)
                    return
            else:
                leaving = lanes if step.guard is None else _guarded(lanes, v, step.guard)
                pc += 1
                if leaving is None:
                    continue
                _exit(warp, fragment, leaving, pc)
                if leaving is lanes:
                    return
                lanes, join_pc = fragment.lanes, fragment.join_pc
        fragment.pc = pc
    except Fault as fault:
        raise ExecutionError(place_of(machine, warp, step), fault) from fault


def _guarded(lanes: Lanes, v: list[npt.NDArray[Any]], guard: tuple[int, bool]) -> Lanes | None:
    """The lanes whose predicate holds; the same object if all, None if none."""
    slot, negated = guard
    bits = int.from_bytes(np.packbits(v[slot], bitorder="little").tobytes(), "little")
    bits = lanes.bits & (~bits if negated else bits)
    if bits == lanes.bits:
        return lanes
    return lanes_of(bits) if bits else None


def _prepare(warp: Warp, step: Step, active: Lanes) -> None:
    """What must hold before an effect: its registers are free and defined."""
    assert step.effect is not None  # only effects are prepared
    if warp.held & step.touches and not step.effect.handles_holds:
        warp.touch_held(step.touches)
    warp.touched |= step.matrix_touches
    for predicate, inverse in step.inverts:
        np.logical_not(warp.v[predicate], warp.v[inverse])
    for slot, name in step.defined:
        missing = active.mask & ~warp.v[slot]
        if missing.any():
            raise Fault("uninitialised", f"reads register {name}, which was never written", lane=int(missing.argmax()))


def _diverge(warp: Warp, fragment: Fragment, step: Step, taken: Lanes, pc: int) -> None:
    """Split a fragment at a branch; the parts meet at the branch's join."""
    if step.is_uniform:
        raise Fault("convergence", "lanes of the warp disagree at bra.uni")
    lanes, joins = fragment.lanes, fragment.joins
    if step.join >= 0 and step.join != fragment.join_pc:
        joins = (*joins, Join(step.join, lanes.bits))
    warp.fragments.remove(fragment)
    for target, bits in sorted(((pc + 1, lanes.bits & ~taken.bits), (step.target, taken.bits))):
        warp.fragments.append(Fragment(target, lanes_of(bits), joins))


def _meet(warp: Warp, fragment: Fragment) -> None:
    """A fragment has reached its join: it goes on when the others are there."""
    join = fragment.joins[-1]
    join.arrived |= fragment.lanes.bits
    warp.fragments.remove(fragment)
    _release(warp, join, fragment.joins[:-1])


def _release(warp: Warp, join: Join, joins: tuple[Join, ...]) -> None:
    if join.arrived and join.arrived == join.expected:
        warp.fragments.append(Fragment(join.pc, lanes_of(join.arrived), joins))


def _exit(warp: Warp, fragment: Fragment, leaving: Lanes, pc: int) -> None:
    """Lanes end: joins no longer expect them."""
    warp.alive &= ~leaving.bits
    for depth in range(len(fragment.joins) - 1, -1, -1):
        join = fragment.joins[depth]
        join.expected &= ~leaving.bits
        _release(warp, join, fragment.joins[:depth])
    remaining = fragment.lanes.bits & ~leaving.bits
    if remaining:
        fragment.lanes = lanes_of(remaining)
        fragment.pc = pc
    else:
        warp.fragments.remove(fragment)
    warp.machine.on_exit(warp)
