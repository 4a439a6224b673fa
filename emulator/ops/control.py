"""Control that has no operands worth speaking of: register pools, dependent launches, sleeping, traps.

Branches belong to the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.schedule import POLL, Wait
from jax_fa4.emulator.state import Lanes, Warp

if TYPE_CHECKING:
    from jax_fa4.emulator.program import Step

REGISTERS_PER_SM = 65536
MIN_REGISTERS, MAX_REGISTERS, REGISTER_STEP = 24, 256, 8


def _nothing(warp: Warp, lanes: Lanes) -> None:
    """Functionally without effect."""


def _share(warp: Warp) -> int:
    """Registers a thread has at launch: an equal part of what an SM has for each of its CTAs, or `.maxnreg`."""
    entry = warp.machine.program.entry
    share = REGISTERS_PER_SM // (entry.min_ctas * 32 * len(warp.cta.warps)) // REGISTER_STEP * REGISTER_STEP
    return min(share, entry.max_registers or MAX_REGISTERS, MAX_REGISTERS - 1)


def _pool(warp: Warp) -> int:
    """Registers that the launch gave to the CTA: whole steps for each thread."""
    return 32 * len(warp.cta.warps) * -(-_share(warp) // REGISTER_STEP) * REGISTER_STEP


def _registers(warp: Warp) -> int:
    """Registers a thread of this warp has."""
    return warp.scratch.setdefault("registers", _share(warp))


def _in_use(warp: Warp) -> int:
    """Registers that the CTA's warps have; those that have exited keep theirs."""
    return sum(32 * _registers(other) for other in warp.cta.warps)


def _check_warpgroup(warp: Warp) -> None:
    """The text asks for the same setmaxnreg in all warps of a warpgroup."""
    done: list[Step] = warp.scratch.setdefault("setmaxnreg", [])
    done.append(warp.step)
    for other in warp.warpgroup.warps:
        theirs = other.scratch.get("setmaxnreg", [])
        if len(theirs) >= len(done) and theirs[len(done) - 1] is not warp.step:
            line = theirs[len(done) - 1].instructions[0].line
            raise Fault(
                "registers", f"warp {other.index} of the warpgroup executes the setmaxnreg of line {line} instead"
            )


@family("setmaxnreg")
def setmaxnreg(form: Form) -> Effect:
    grows = form.take("inc", "dec") == "inc"
    form.take("sync")
    form.take("aligned")
    form.take("u32")
    form.end()
    wanted = form.immediate(0)
    if not MIN_REGISTERS <= wanted <= MAX_REGISTERS or wanted % REGISTER_STEP:
        raise form.unknown(f"needs a multiple of {REGISTER_STEP} in {MIN_REGISTERS}..{MAX_REGISTERS}, not {wanted}")

    def execute(warp: Warp, lanes: Lanes) -> Wait | None:
        warp.require_converged(lanes, "setmaxnreg")
        if warp.machine.options.strict:
            _check_warpgroup(warp)
        now = _registers(warp)
        if (grows and wanted < now) or (not grows and wanted > now):
            raise Fault("registers", f"setmaxnreg.{'inc' if grows else 'dec'} from {now} to {wanted}")

        def take() -> None:
            warp.scratch["registers"] = wanted
            warp.machine.progress += 1

        def fits() -> bool:
            return _in_use(warp) + 32 * (wanted - _registers(warp)) <= _pool(warp)

        def what() -> str:
            return f"{32 * (wanted - now)} registers: {_in_use(warp)} of the CTA's {_pool(warp)} are in use"

        return Wait(what=what, ready=fits, then=take)

    return form.effect(execute)


@family("griddepcontrol")
def griddepcontrol(form: Form) -> Effect:
    """Grids run one after the other here, so that prerequisites are complete."""
    form.take("wait", "launch_dependents")
    form.end()
    return form.effect(_nothing)


@family("nanosleep")
def nanosleep(form: Form) -> Effect:
    form.take("u32")
    form.end()
    form.src(0, "u32")
    return form.effect(lambda warp, lanes: POLL)


@family("trap", "brkpt")
def trap(form: Form) -> Effect:
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        raise Fault("undefined", "the kernel traps")

    return form.effect(execute)


@family("prefetch", "prefetchu", "applypriority", "discard")
def prefetch(form: Form) -> Effect:
    """Hints to the caches."""
    return form.effect(_nothing)


@family("createpolicy")
def createpolicy(form: Form) -> Effect:
    """A cache policy is opaque and has no functional effect."""
    policy = form.dst(0, "b64")

    def execute(warp: Warp, lanes: Lanes) -> None:
        if policy is not None:
            lanes.put(warp.v[policy], 0)

    return form.effect(execute)


@family("fence.proxy.alias", "pmevent")
def nothing(form: Form) -> Effect:
    return form.effect(_nothing)
