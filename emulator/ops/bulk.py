"""Bulk copies and reductions that need no tensor map, and bulk groups, PTX ISA 9.7.9.25.4 and 9.7.9.25.6."""

from __future__ import annotations

import functools

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.ops.mbarrier import find
from jax_fa4.emulator.ops.memory import OPERATIONS, owner_of, reduce_words
from jax_fa4.emulator.schedule import AsyncOp, Wait
from jax_fa4.emulator.state import Cta, Lanes, Warp

ALIGN = 16  # of addresses and sizes
MULTICAST = "multicast::cluster"
COMPLETION = "mbarrier::complete_tx::bytes"


def _check_size(size: int) -> None:
    if size % ALIGN or size <= 0:
        raise Fault("alignment", f"a bulk copy of {size} bytes: needs a positive multiple of {ALIGN}")


def _check_global(warp: Warp, address: int, size: int, what: str):
    if address % ALIGN:
        raise Fault("alignment", f"{what} needs a global address that is a multiple of {ALIGN}", address=address)
    return warp.machine.global_memory.find(address, size, what)


@family("cp.async.bulk")
def bulk_copy(form: Form) -> Effect:
    """To shared memory with an mbarrier, or from shared to global memory with a bulk group."""
    form.drop("L2::")
    spaces = [word for word in form.modifiers if word in ("shared::cta", "shared::cluster", "global")]
    if len(spaces) != 2:
        raise form.unknown("needs two state spaces")
    for word in spaces:
        form.modifiers.remove(word)
    target, source = spaces
    if target == "global":
        return _to_global(form, None, "")
    form.take(COMPLETION)
    is_multicast = form.has(MULTICAST)
    form.end()
    d, size, bar = form.shared(0), form.src(2, "u32"), form.shared(3)
    mask = form.src(4, "b16") if is_multicast else None
    s_global = form.generic(1) if source == "global" else None
    s_shared = None if source == "global" else form.shared(1)

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            count = int(warp.v[size][lane])
            _check_size(count)
            where, barrier = int(d.at(warp)[lane]), int(bar.at(warp)[lane])
            copy = functools.partial(_land, warp, where, barrier, count)
            if s_global is not None:
                ranks = None if mask is None else [r for r in range(16) if int(warp.v[mask][lane]) >> r & 1]
                memory, start = _check_global(warp, int(s_global.at(warp)[lane]), count, "bulk copy")
                copy(lambda memory=memory, start=start, count=count: memory.data[start : start + count].copy(), ranks)
            else:
                assert s_shared is not None  # the other of two sources
                signalled = find(warp, barrier, "bulk copy")  # its phase tells that the source has been read
                reader = (signalled.agent, signalled.epoch)
                copy(_shared_source(warp, reader, int(s_shared.at(warp)[lane]), count), None)

    return form.effect(execute)


def _shared_source(warp: Warp, reader: tuple[int, int], address: int, size: int):
    """Read own shared memory by the async proxy when the copy executes; `reader` is (agent, epoch) of that read."""
    smem = owner_of(warp, np.array([address]), "bulk copy", own_only=True).smem
    offset = address & 0xFFFFFF
    smem.check_range(offset, size, ALIGN, "bulk copy")
    if smem.check_races:
        cells = slice(offset >> 2, (offset + size) >> 2)
        smem.shadow.check_read(cells, warp.clock.times, by_async=True, what="bulk copy")
        smem.shadow.mark_read(cells, *reader)
    return lambda: smem.data[offset : offset + size].copy()


def _land(
    warp: Warp, address: int, bar_address: int, size: int, read, ranks: list[int] | None, align: int = ALIGN
) -> None:
    """Issue the copy of `read()` to shared memory at `address` of its CTA, or of every CTA in `ranks`."""
    owner = owner_of(warp, np.array([address]), "bulk copy")
    targets: list[Cta] = [owner] if ranks is None else [warp.cta.cluster.cta_of(rank << 24) for rank in ranks]
    offset, bar_offset = address & 0xFFFFFF, bar_address & 0xFFFFFF
    if bar_address >> 24 != address >> 24:
        raise Fault("mbarrier", "the mbarrier of a bulk copy must lie in the destination's CTA", address=bar_address)
    find(warp, bar_address, "bulk copy").require_async_visible()
    cells = slice(offset >> 2, offset + size >> 2)
    for cta in targets:
        cta.smem.check_range(offset, size, align, "bulk copy")
        if cta.smem.check_races:
            cta.smem.shadow.check_write(cells, warp.clock.times, what="bulk copy")
            cta.smem.shadow.begin_flight(cells)
    warp.machine.stats.add(warp, "tma_load_bytes", size * len(targets))

    def land(cta: Cta) -> None:
        barrier = cta.mbarriers.at(bar_offset)
        cta.smem.data[offset : offset + size] = read()
        if cta.smem.check_races:
            cta.smem.shadow.end_flight(cells)
            cta.smem.shadow.mark_write(cells, barrier.agent, barrier.epoch)
        barrier.complete_tx(size)

    for cta in targets:
        what = f"bulk copy of {size} bytes to shared memory 0x{cta.rank << 24 | offset:x}"
        warp.machine.queues.issue(AsyncOp(steps=(functools.partial(land, cta),), what=what, blame=warp.blame()))


@family("cp.reduce.async.bulk")
def bulk_reduce(form: Form) -> Effect:
    """Element-wise `global op= shared` (or another CTA's shared memory, with an mbarrier: not implemented)."""
    form.drop("L2::")
    form.has("noftz")
    form.take("global")
    form.take("shared::cta")
    operation = form.take(*(name for name in OPERATIONS if name != "exch"))
    (kind,) = form.types()
    return _to_global(form, operation, kind)


def _to_global(form: Form, operation: str | None, kind: str) -> Effect:
    form.take("bulk_group")
    form.end()
    target, source, size = form.generic(0), form.shared(1), form.src(2, "u32")
    width = {"f16": 2, "bf16": 2}.get(kind) or int(kind[1:] or 8) // 8
    dtype = np.dtype(f"u{width}")

    def execute(warp: Warp, lanes: Lanes) -> None:
        operands = (target.at(warp), source.at(warp), warp.v[size])
        agree = all((operand[lanes.mask] == operand[lanes.first]).all() for operand in operands)
        # a store by a whole warp becomes one machine instruction, a reduction a loop over lanes (ptxas 13.0)
        for lane in lanes.index[:1] if agree and operation is None else lanes.index:
            count = int(warp.v[size][lane])
            _check_size(count)
            memory, start = _check_global(warp, int(target.at(warp)[lane]), count, "bulk store")
            memory.check_writable("bulk store")
            group = warp.cta.bulk_groups(warp, int(lane))
            issue_store(
                warp,
                int(lane),
                _shared_source(warp, (group.agent, group.epoch), int(source.at(warp)[lane]), count),
                functools.partial(_write, memory.data[start : start + count].view(dtype), operation, kind),
                f"bulk store of {count} bytes to global memory",
            )
            warp.machine.stats.add(warp, "tma_store_bytes", count)

    return form.effect(execute)


def _write(place, operation: str | None, kind: str, data) -> None:
    words = data.view(place.dtype)
    place[...] = words if operation is None else reduce_words(operation, kind, place, words, flushes=True)


def issue_store(warp: Warp, lane: int, read, write, what: str) -> None:
    """A store in two steps, `write(read())`, as part of the lane's open bulk group."""
    group = warp.cta.bulk_groups(warp, lane)
    held: list[np.ndarray] = []

    def write_held() -> None:
        warp.machine.progress += 1
        write(held.pop())

    steps = (lambda: held.append(read()), write_held)
    op = AsyncOp(steps=steps, what=what, queue=group.queue, blame=warp.blame())
    group.add(op)
    warp.machine.queues.issue(op)


@family("cp.async.bulk.commit_group")
def commit_group(form: Form) -> Effect:
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            warp.cta.bulk_groups(warp, int(lane)).commit()

    return form.effect(execute)


@family("cp.async.bulk.wait_group")
def wait_group(form: Form) -> Effect:
    """`.read`: the sources have been read; otherwise the writes are visible, too."""
    only_read = form.has("read")
    form.end()
    pending = form.immediate(0)

    def execute(warp: Warp, lanes: Lanes) -> Wait:
        groups = [
            warp.cta.bulk_groups(warp, int(lane)) for lane in lanes.index if warp.cta.has_bulk_groups(warp, int(lane))
        ]
        epochs = [max(len(group.groups) - pending, 0) for group in groups]

        def ready() -> bool:
            return all(g.is_read(pending) if only_read else g.is_complete(pending) for g in groups)

        def then() -> None:
            for group, epoch in zip(groups, epochs, strict=True):
                warp.clock.learn(group.agent, epoch)
                group.read_epoch = max(group.read_epoch, epoch)

        return Wait(what=lambda: f"bulk groups, all but {pending}", ready=ready, then=then)

    return form.effect(execute)


@family("st.async")
def store_async(form: Form) -> Effect:
    """A store to shared memory of the cluster that an mbarrier in the same CTA counts."""
    form.has("weak")
    form.take("shared::cluster")
    form.take(COMPLETION)
    count = int(form.take("v2", "v4", default="v1")[1:])
    (kind,) = form.types()
    form.end()
    size = int(kind[1:]) // 8
    target, sources, bar = form.shared(0), form.srcs(1, f"b{8 * size}"), form.shared(2)
    if len(sources) != count or size not in (4, 8):
        raise form.unknown(f"stores {len(sources)} values of {size} bytes")

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            data = np.stack([warp.v[source][lane] for source in sources]).view(np.uint8)
            _land(
                warp, int(target.at(warp)[lane]), int(bar.at(warp)[lane]), len(data), data.copy, None, align=len(data)
            )

    return form.effect(execute)


@family("cp.async.bulk.prefetch")
def prefetch(form: Form) -> Effect:
    """To the L2 cache: without functional effect."""
    return form.effect(lambda warp, lanes: None)
