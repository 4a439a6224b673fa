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
        made = _requests(warp.cta).columns
        number = len(made)
        made.append(columns)

        def ready() -> bool:
            return _check_equal(ctas, number, "columns") and memory.find_free(columns) is not None

        def finish() -> None:
            address = memory.allocate(columns, warp.clock.agent, warp.clock.epoch)
            values = np.array([[address]], np.uint32)
            warp.cta.smem.store(np.array([offset]), values, warp.clock, "tcgen05.alloc")

        what = f"tcgen05.alloc of {columns} columns" + (" in both CTAs of the pair" if cta_group == 2 else "")
        return Wait(what=lambda: what, ready=ready, then=finish)

    return form.effect(execute)


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
