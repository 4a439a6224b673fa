"""tcgen05.alloc, dealloc and relinquish_alloc_permit. With cta_group::2 one warp of each CTA of the pair takes part."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.ops.tcgen05.pipe import ctas_of, memory_of
from jax_fa4.emulator.schedule import Wait
from jax_fa4.emulator.state import Cta, Lanes, Warp

__all__ = ["cta_group_of"]

OFFSET_MASK = 0xFFFFFF  # of a shared address; the bits above are the CTA's rank


@dataclasses.dataclass(slots=True)
class Requests:
    """What a CTA has asked for so far: the k-th request of each CTA of a pair belong together."""

    columns: list[int] = dataclasses.field(default_factory=list)  # of allocations
    warps: list[Warp] = dataclasses.field(default_factory=list)  # that asked for them
    addresses: list[int] = dataclasses.field(default_factory=list)  # that they got
    frees: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (address, columns) of deallocations


def _requests(cta: Cta) -> Requests:
    return cta.scratch.setdefault("tcgen05 requests", Requests())


def cta_group_of(form: Form) -> int:
    """Take the modifier that says whether a CTA or a pair is meant."""
    return int(form.take("cta_group::1", "cta_group::2")[-1])


def _check_equal(ctas: tuple[Cta, ...], number: int, field: str) -> bool:
    """Whether all CTAs have made their request `number`; Fault if they differ."""
    made = [getattr(_requests(cta), field) for cta in ctas]
    if any(len(requests) <= number for requests in made):
        return False
    if len({requests[number] for requests in made}) > 1:
        raise Fault("tensor memory", f"the CTAs of a pair ask differently: {[requests[number] for requests in made]}")
    return True


@family("tcgen05.alloc")
def alloc(form: Form) -> Effect:
    """Wait for free columns and write their address to shared memory."""
    cta_group = cta_group_of(form)
    for word in ("sync", "aligned", "b32"):
        form.take(word)
    form.take("shared::cta", default="")
    form.end()
    destination, count = form.shared(0), form.src(1, "u32")

    def execute(warp: Warp, lanes: Lanes) -> Wait:
        warp.require_converged(lanes, "tcgen05.alloc")
        ctas = ctas_of(warp, cta_group, "tcgen05.alloc")
        offset = lanes.uniform(destination.at(warp), "address") & OFFSET_MASK
        columns = lanes.uniform(warp.v[count], "column count")
        memory = memory_of(warp.cta)
        memory.check_request(columns)
        made = _requests(warp.cta)
        number = len(made.columns)
        made.columns.append(columns)
        made.warps.append(warp)

        def ready() -> bool:
            if number < len(made.addresses):
                return True
            has_room = all(memory_of(cta).find_free(columns) is not None for cta in ctas)
            return _check_equal(ctas, number, "columns") and has_room

        def finish() -> None:
            if number == len(made.addresses):
                _allocate(ctas, number, columns)
            values = np.array([[made.addresses[number]]], np.uint32)
            warp.cta.smem.store(np.array([offset]), values, warp.clock, "tcgen05.alloc")

        what = f"tcgen05.alloc of {columns} columns" + (" in both CTAs of the pair" if cta_group == 2 else "")
        return Wait(what=lambda: what, ready=ready, then=finish)

    return form.effect(execute)


def _allocate(ctas: tuple[Cta, ...], number: int, columns: int) -> None:
    """In all CTAs at once: the warps that asked know of each other's allocation."""
    warps = [_requests(cta).warps[number] for cta in ctas]
    for warp in warps:
        warp.clock.release()  # so that the others learn of nothing else
        address = memory_of(warp.cta).allocate(columns, warp.clock.agent, warp.clock.epoch)
        _requests(warp.cta).addresses.append(address)
    for warp in warps:
        for other in warps:
            warp.clock.learn(other.clock.agent, other.clock.epoch)
    for warp in warps:
        warp.clock.release()


@family("tcgen05.dealloc")
def dealloc(form: Form) -> Effect:
    """Give columns back: once both CTAs of a pair have said so."""
    cta_group = cta_group_of(form)
    for word in ("sync", "aligned", "b32"):
        form.take(word)
    form.end()
    address_slot, count = form.src(0, "u32"), form.src(1, "u32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "tcgen05.dealloc")
        ctas = ctas_of(warp, cta_group, "tcgen05.dealloc", peer_may_exit=True)
        address = lanes.uniform(warp.v[address_slot], "address")
        columns = lanes.uniform(warp.v[count], "column count")
        memory_of(warp.cta).give_back(address, columns, warp.clock.times)
        made = _requests(warp.cta).frees
        made.append((address, columns))
        if _check_equal(ctas, len(made) - 1, "frees"):
            for cta in ctas:
                memory_of(cta).free(address, columns)
        warp.machine.progress += 1

    return form.effect(execute)


@family("tcgen05.relinquish_alloc_permit")
def relinquish(form: Form) -> Effect:
    """Promise not to allocate again."""
    cta_group = cta_group_of(form)
    for word in ("sync", "aligned"):
        form.take(word)
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "tcgen05.relinquish_alloc_permit")
        ctas_of(warp, cta_group, "tcgen05.relinquish_alloc_permit", peer_may_exit=True)
        memory_of(warp.cta).relinquish()

    return form.effect(execute)
