"""Control that has no operands worth speaking of: register pools, dependent launches, sleeping, traps.

Branches belong to the loop.
"""

from __future__ import annotations

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.schedule import POLL, Wait
from jax_fa4.emulator.state import Lanes, Warp

REGISTERS_PER_SM = 65536
MIN_REGISTERS, MAX_REGISTERS, REGISTER_STEP = 24, 256, 8


def _nothing(warp: Warp, lanes: Lanes) -> None:
    """Functionally without effect."""


def _registers(warp: Warp) -> int:
    """Registers a thread of this warp has; a launch gives all warps the same share of the file."""
    share = REGISTERS_PER_SM // (32 * len(warp.cta.warps)) // REGISTER_STEP * REGISTER_STEP
    return warp.scratch.setdefault("registers", min(share, MAX_REGISTERS - 1))


def _pool(warp: Warp) -> int:
    """Registers in use by the CTA; warps that have exited keep theirs."""
    return sum(32 * _registers(other) for other in warp.cta.warps)


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
        now = _registers(warp)
        if (grows and wanted < now) or (not grows and wanted > now):
            raise Fault("registers", f"setmaxnreg.{'inc' if grows else 'dec'} from {now} to {wanted}")

        def take() -> None:
            warp.scratch["registers"] = wanted
            warp.machine.progress += 1

        def fits() -> bool:
            return _pool(warp) + 32 * (wanted - _registers(warp)) <= REGISTERS_PER_SM

        def what() -> str:
            return f"{32 * (wanted - now)} registers: {_pool(warp)} of {REGISTERS_PER_SM} are in use"

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
