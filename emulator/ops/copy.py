"""`cp.async`: copies of 4 to 16 bytes a lane from global to shared memory by the generic proxy, PTX ISA 9.7.9.25.3."""

from __future__ import annotations

from collections import deque

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.ops.mbarrier import find
from jax_fa4.emulator.ops.memory import _is_hint, owner_of
from jax_fa4.emulator.order import PLAIN
from jax_fa4.emulator.schedule import AsyncOp, Wait
from jax_fa4.emulator.state import Lanes, Warp


class _Copies:
    """The cp.async operations of a warp. Groups are kept per warp: its lanes commit and wait together."""

    def __init__(self, warp: Warp):
        cta = warp.cta
        self.agent = cta.cluster.clocks.agent(f"cp.async of warp {warp.index} of CTA {cta.rank}", is_async=False)
        warp.clock.own.append(self.agent)
        self.queue = ("cp.async", id(cta), warp.index)
        self.open: list[AsyncOp] = []
        self.groups: deque[list[AsyncOp]] = deque()
        self.epoch = 1
        self.lanes = 0  # that have copied, a bit each

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []
        self.epoch += 1

    def are_complete(self, pending: int) -> bool:
        return all(op.is_complete for group in list(self.groups)[: max(len(self.groups) - pending, 0)] for op in group)


def _copies(warp: Warp) -> _Copies:
    if "cp.async" not in warp.scratch:
        warp.scratch["cp.async"] = _Copies(warp)
    return warp.scratch["cp.async"]


@family("cp.async")
def cp_async(form: Form) -> Effect:
    """`cp.async.{ca,cg}.shared.global [d], [s], size{, src-size | ignore-src}`: what lies beyond src-size is zero."""
    form.take("ca", "cg")
    form.take("shared", "shared::cta")
    form.take("global")
    form.modifiers = [word for word in form.modifiers if not _is_hint(word)]
    form.end()
    target, source, size = form.shared(0), form.generic(1), form.immediate(2)
    if size not in (4, 8, 16):
        raise form.unknown(f"copies {size} bytes")
    ignored = wanted = None
    if len(form.operands) > 3:
        if getattr(form.operands[3], "width", None) == 1:
            ignored = form.src(3, "pred")
        else:
            wanted = form.src(3, "u32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        copies, index = _copies(warp), lanes.index
        copies.lanes |= lanes.bits
        targets, sources = target.at(warp)[index], source.at(warp)[index]
        count = (
            np.full(len(index), size) if wanted is None else np.minimum(warp.v[wanted][index], size).astype(np.int64)
        )
        if ignored is not None:
            count = np.where(warp.v[ignored][index], 0, count)
        smem = owner_of(warp, targets, "cp.async", own_only=True).smem
        for offset in targets & 0xFFFFFF:
            smem.check_range(int(offset), size, size, "cp.async")
        cells = ((targets & 0xFFFFFF)[:, None] + np.arange(0, size, 4) >> 2).reshape(-1)
        if smem.check_races:
            smem.shadow.check_write(cells, warp.clock.times, what="cp.async")
            smem.shadow.begin_flight(cells)
        epoch = copies.epoch

        def land() -> None:
            for offset, address, n in zip(targets & 0xFFFFFF, sources, count, strict=True):
                data = np.zeros(size, np.uint8)
                if n:
                    buffer, start = warp.machine.global_memory.find(int(address), int(n), "cp.async")
                    data[:n] = buffer.data[start : start + int(n)]
                smem.data[offset : offset + size] = data
            if smem.check_races:
                smem.shadow.end_flight(cells)
                smem.shadow.mark_write(cells, copies.agent, epoch)

        op = AsyncOp(steps=(land,), what=f"cp.async of warp {warp.index}", queue=copies.queue, blame=warp.blame())
        copies.open.append(op)
        warp.machine.queues.issue(op)

    return form.effect(execute)


@family("cp.async.commit_group")
def commit_group(form: Form) -> Effect:
    form.end()
    return form.effect(lambda warp, lanes: _copies(warp).commit())


def _wait(warp: Warp, pending: int) -> Wait:
    copies = _copies(warp)
    epoch = copies.epoch - 1 - pending

    def then() -> None:
        warp.clock.learn(copies.agent, epoch)
        warp.writing_lanes |= copies.lanes  # each knows of its own copies

    return Wait(
        what=lambda: f"cp.async groups, all but {pending}",
        ready=lambda: copies.are_complete(pending),
        then=then,
    )


@family("cp.async.wait_group")
def wait_group(form: Form) -> Effect:
    form.end()
    pending = form.immediate(0)
    return form.effect(lambda warp, lanes: _wait(warp, pending))


@family("cp.async.wait_all")
def wait_all(form: Form) -> Effect:
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> Wait:
        _copies(warp).commit()
        return _wait(warp, 0)

    return form.effect(execute)


@family("cp.async.mbarrier.arrive")
def arrive(form: Form) -> Effect:
    """An arrival for each lane once the warp's earlier copies are complete."""
    is_counted = form.has("noinc")
    form.take("shared", "shared::cta", default="shared")
    form.take("b64")
    form.end()
    where = form.shared(0)

    def execute(warp: Warp, lanes: Lanes) -> None:
        copies = _copies(warp)
        times = warp.clock.release()
        times[PLAIN, copies.agent] = copies.epoch
        copies.epoch += 1
        barriers = [find(warp, int(where.at(warp)[lane]), "cp.async.mbarrier.arrive") for lane in lanes.index]
        if not is_counted:
            for barrier in barriers:
                barrier.pending += 1

        def land() -> None:
            for barrier in barriers:
                barrier.arrive(1, times)

        op = AsyncOp(steps=(land,), what="cp.async.mbarrier.arrive", queue=copies.queue, blame=warp.blame())
        warp.machine.queues.issue(op)

    return form.effect(execute)
