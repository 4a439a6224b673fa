"""`clusterlaunchcontrol`, PTX ISA 9.7.13.19: taking over the work of a cluster that has not started.

Clusters that wait for a place (`Options.resident_clusters`) can be taken over, in order, as long as there are any.
"""

from __future__ import annotations

import functools

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, Pure, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.ops.mbarrier import find
from jax_fa4.emulator.ops.memory import owner_of
from jax_fa4.emulator.schedule import AsyncOp
from jax_fa4.emulator.state import Cta, Lanes, Warp

RESPONSE_BYTES = 16
AXIS_BITS = 20  # of a CTA's coordinate in the response's high half; the format is opaque to programs
AXIS_MASK = np.uint64((1 << AXIS_BITS) - 1)
UNDEFINED = np.uint32(0xFFFFFFFF)  # coordinates after a failure
FAILED = "cancellation failed"  # in a cluster's scratch, once a thread has seen it


@family("clusterlaunchcontrol.try_cancel")
def try_cancel(form: Form) -> Effect:
    """Writes a response; its 16 bytes complete on an mbarrier, here or in every CTA of the cluster."""
    form.take("async")
    form.take("shared::cta")
    form.take("mbarrier::complete_tx::bytes")
    is_multicast = form.has("multicast::cluster::all")
    form.take("b128")
    form.end()
    response, bar = form.shared(0), form.shared(1)

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            if FAILED in warp.cta.cluster.scratch:
                raise Fault("undefined", "try_cancel after one that the cluster has seen fail", lane=int(lane))
            address, barrier = int(response.at(warp)[lane]), int(bar.at(warp)[lane])
            find(warp, barrier, "try_cancel").require_async_visible()
            own = owner_of(warp, np.array([address]), "try_cancel", own_only=True)
            answer = _encode(warp.machine.cancel_cluster())
            for cta in warp.cta.cluster.ctas if is_multicast else [own]:
                _answer(warp, cta, address & 0xFFFFFF, barrier & 0xFFFFFF, answer)

    return form.effect(execute)


def _encode(first_cta: tuple[int, int, int] | None) -> int:
    """The response's halves as one integer: low is whether a cluster was cancelled, high its first CTA."""
    if first_cta is None:
        return 0
    x, y, z = first_cta
    return 1 | (x | y << AXIS_BITS | z << 2 * AXIS_BITS) << 64


def _answer(warp: Warp, cta: Cta, offset: int, bar_offset: int, answer: int) -> None:
    cta.smem.check_range(offset, RESPONSE_BYTES, RESPONSE_BYTES, "try_cancel")
    cells = slice(offset >> 2, (offset + RESPONSE_BYTES) >> 2)
    if cta.smem.check_races:
        cta.smem.shadow.check_write(cells, warp.clock.times, what="try_cancel")
        cta.smem.shadow.begin_flight(cells)
    land = functools.partial(_land, cta, offset, bar_offset, answer)
    warp.machine.queues.issue(AsyncOp(steps=(land,), what="try_cancel", blame=warp.blame()))


def _land(cta: Cta, offset: int, bar_offset: int, answer: int) -> None:
    barrier = cta.mbarriers.at(bar_offset)
    cta.smem.data[offset : offset + RESPONSE_BYTES] = np.frombuffer(answer.to_bytes(RESPONSE_BYTES, "little"), np.uint8)
    if cta.smem.check_races:
        cells = slice(offset >> 2, (offset + RESPONSE_BYTES) >> 2)
        cta.smem.shadow.end_flight(cells)
        cta.smem.shadow.mark_write(cells, barrier.agent, barrier.epoch)
    barrier.complete_tx(RESPONSE_BYTES)


@family("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(form: Form) -> Effect:
    form.take("pred")
    form.take("b128")
    form.end()
    result, response = form.dst(0, "pred"), form.src(1, "b128")

    def execute(warp: Warp, lanes: Lanes) -> None:
        was_canceled = warp.v[response][0] != 0
        if not was_canceled[lanes.mask].all():
            warp.cta.cluster.scratch[FAILED] = True
        if result is not None:
            lanes.put(warp.v[result], was_canceled)

    return form.effect(execute)


@family(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"),
)
def get_first_ctaid(form: Form) -> Pure:
    """The coordinates, or the one that the opcode names; the fourth of a vector is undefined."""
    axis = form.instruction.opcode.partition("get_first_ctaid")[2][2:3]
    form.drop("v4", "b32", "b128")
    form.end()
    answer = form.src(1, "b128")
    outputs = [(slot, "b32") for slot in form.dsts(0, "b32")]
    axes = axis if axis in ("x", "y", "z") else "xyz"

    def coordinates(answer):
        found = []
        for name in axes:
            value = answer[1] >> np.uint64("xyz".index(name) * AXIS_BITS) & AXIS_MASK
            found.append(np.where(answer[0] != 0, value, UNDEFINED).astype(np.uint32))
        found += [np.full_like(found[0], UNDEFINED)] * (len(outputs) - len(axes))
        return found[0] if len(outputs) == 1 else tuple(found)

    return form.pure(coordinates, outputs, [answer])
