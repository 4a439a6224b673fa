"""`clusterlaunchcontrol`, PTX ISA 9.7.13.19: taking over the work of a cluster that has not started.

Clusters run one after the other here, so that a request always fails: each cluster does its own work only.
"""

from __future__ import annotations

import functools

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, Pure, family
from jax_fa4.emulator.ops.mbarrier import find
from jax_fa4.emulator.ops.memory import owner_of
from jax_fa4.emulator.schedule import AsyncOp
from jax_fa4.emulator.state import Cta, Lanes, Warp

RESPONSE_BYTES = 16
IS_CANCELED = np.uint64(1)  # bit of the response's low half


@family("clusterlaunchcontrol.try_cancel")
def try_cancel(form: Form) -> Effect:
    """Writes a response that says no; its 16 bytes complete on an mbarrier, here or in every CTA of the cluster."""
    form.take("async")
    form.take("shared::cta")
    form.take("mbarrier::complete_tx::bytes")
    is_multicast = form.has("multicast::cluster::all")
    form.take("b128")
    form.end()
    response, bar = form.shared(0), form.shared(1)

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            address, barrier = int(response.at(warp)[lane]), int(bar.at(warp)[lane])
            find(warp, barrier, "try_cancel").require_async_visible()
            own = owner_of(warp, np.array([address]), "try_cancel", own_only=True)
            for cta in warp.cta.cluster.ctas if is_multicast else [own]:
                _answer(warp, cta, address & 0xFFFFFF, barrier & 0xFFFFFF)

    return form.effect(execute)


def _answer(warp: Warp, cta: Cta, offset: int, bar_offset: int) -> None:
    cta.smem.check_range(offset, RESPONSE_BYTES, RESPONSE_BYTES, "try_cancel")
    cells = slice(offset >> 2, (offset + RESPONSE_BYTES) >> 2)
    if cta.smem.check_races:
        cta.smem.shadow.check_write(cells, warp.clock.times, what="try_cancel")
        cta.smem.shadow.begin_flight(cells)
    land = functools.partial(_land, cta, offset, bar_offset)
    warp.machine.queues.issue(AsyncOp(steps=(land,), what="try_cancel", blame=warp.blame()))


def _land(cta: Cta, offset: int, bar_offset: int) -> None:
    barrier = cta.mbarriers.at(bar_offset)
    cta.smem.data[offset : offset + RESPONSE_BYTES] = 0
    if cta.smem.check_races:
        cells = slice(offset >> 2, (offset + RESPONSE_BYTES) >> 2)
        cta.smem.shadow.end_flight(cells)
        cta.smem.shadow.mark_write(cells, barrier.agent, barrier.epoch)
    barrier.complete_tx(RESPONSE_BYTES)


@family("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(form: Form) -> Pure:
    form.take("pred")
    form.take("b128")
    form.end()
    outputs = [(form.dst(0, "pred"), "pred")]
    return form.pure(lambda answer: (answer[0] & IS_CANCELED) != 0, outputs, [form.src(1, "b128")])


@family(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"),
)
def get_first_ctaid(form: Form) -> Pure:
    """Undefined after a failure, and requests always fail: zeros."""
    form.drop("v4", "b32", "b128")
    form.end()
    answer = form.src(1, "b128")
    outputs = [(slot, "b32") for slot in form.dsts(0, "b32")]
    zero = np.zeros(32, np.uint32)
    count = len(outputs)
    return form.pure(lambda answer: zero if count == 1 else (zero,) * count, outputs, [answer])
