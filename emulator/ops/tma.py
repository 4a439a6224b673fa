"""Tensor copies between global and shared memory, PTX ISA 9.7.9.27: boxes of tensor maps, loaded, stored, reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.decode import Effect, Form, GenericAddress, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.layout import swizzle
from jax_fa4.emulator.ops.bulk import issue_store
from jax_fa4.emulator.ops.mbarrier import find
from jax_fa4.emulator.ops.memory import owner_of, reduce_words
from jax_fa4.emulator.schedule import AsyncOp
from jax_fa4.emulator.state import Cta, Lanes, Warp
from jax_fa4.emulator.text.module import Address

if TYPE_CHECKING:
    from jax_fa4.emulator.barriers import Mbarrier
    from jax_fa4.emulator.run import BoundTensorMap

__all__: list[str] = []

SMEM_ALIGNMENT = 128  # of a box in shared memory
MAP_ALIGNMENT = 64
RANK_SHIFT = 24  # of the CTA's rank in a shared address
OFFSET_MASK = (1 << RANK_SHIFT) - 1
ROW_BYTES = 128  # no swizzle moves bytes out of such a row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One copy's box: which map, which coordinates (innermost first), and where in whose shared memory."""

    bound: BoundTensorMap
    coordinates: tuple[int, ...]
    cta: Cta
    offset: int
    what: str

    def check(self) -> None:
        """The box lies inside shared memory and is aligned."""
        self.cta.smem.check_range(self.offset, self.bound.map.box_bytes, SMEM_ALIGNMENT, self.what)

    @property
    def cells(self) -> slice | npt.NDArray[np.int64]:
        """The shadow cells (32-bit words) of the box."""
        tensor = self.bound.map
        if tensor.swizzle is swizzle.NONE or tensor.box_bytes % ROW_BYTES == 0:
            return slice(self.offset >> 2, (self.offset + tensor.box_bytes) >> 2)
        return (2 * tensor.units(self.offset)[:, None] + np.arange(2)).reshape(-1)

    def global_part(self) -> tuple[tuple[slice, ...], npt.NDArray[Any]] | None:
        """The part of the box inside the tensor, and a view of it in global memory; None if there is none."""
        tensor, memory = self.bound.map, self.bound.memory
        clip = tensor.clip(self.coordinates)
        if clip is None:
            return None
        start = clip.address - memory.base
        last = sum((count - 1) * stride for count, stride in zip(clip.shape, clip.strides, strict=True))
        memory.check(start, last + tensor.element_bytes, self.what)
        view = np.ndarray(clip.shape, f"u{tensor.element_bytes}", memory.data, start, clip.strides)
        return clip.inside, view

    def load(self) -> npt.NDArray[Any]:
        """The elements in global memory now, filled where there are none: unsigned, in the shape of the box."""
        tensor = self.bound.map
        values = np.full(tensor.box_shape, tensor.fill, f"u{tensor.element_bytes}")
        if (part := self.global_part()) is not None:
            values[part[0]] = part[1]
        return values

    def write_shared(self, values: npt.NDArray[Any]) -> None:
        """Put the elements of the box into shared memory."""
        units = self.bound.map.units(self.offset)
        self.cta.smem.views[8][units] = values.reshape(-1).view(np.uint64)

    def read_shared(self) -> npt.NDArray[Any]:
        """The elements of the box in shared memory now: unsigned, in the shape of the box."""
        tensor = self.bound.map
        units = self.cta.smem.views[8][tensor.units(self.offset)]
        return units.view(f"u{tensor.element_bytes}").reshape(tensor.box_shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MapOperand:
    """`[map, {c0, c1, ...}]`: slots of the map's address and of the coordinates."""

    address: GenericAddress
    coordinates: tuple[int, ...]

    def values(self, warp: Warp) -> list[npt.NDArray[Any]]:
        """What the operand holds, over lanes."""
        return [self.address.at(warp), *(warp.v[slot] for slot in self.coordinates)]

    def at(self, warp: Warp, lane: int) -> tuple[BoundTensorMap, tuple[int, ...]]:
        """The map and the coordinates of a lane; the map's rank must be that of the instruction."""
        address = int(self.address.at(warp)[lane])
        if address % MAP_ALIGNMENT:
            raise Fault("tensor map", f"the map's address is not a multiple of {MAP_ALIGNMENT}", address=address)
        bound = warp.machine.tensor_map(address)
        if bound.map.rank != len(self.coordinates):
            message = f"{len(self.coordinates)} coordinates for a map of rank {bound.map.rank}"
            raise Fault("tensor map", message, address=address, lane=lane)
        return bound, tuple(int(warp.v[slot][lane]) for slot in self.coordinates)


def _issuers(lanes: Lanes, operands: Sequence[npt.NDArray[Any]]) -> Sequence[int]:
    """The lanes whose stores happen: one for the warp if all agree.

    The assembler turns a store by a whole warp into one instruction, and known-good kernels rely on it; loads and
    reductions become a loop over the lanes (seen in machine code of ptxas 13.0, sm_90a and sm_100a).
    """
    if all((operand[lanes.mask] == operand[lanes.first]).all() for operand in operands):
        return (lanes.first,)
    return lanes.index.tolist()


def _map_operand(form: Form, operand: int, rank: int) -> MapOperand:
    coordinates = form.coordinates(operand)
    if len(coordinates) != rank:
        raise form.unknown(f"has {len(coordinates)} coordinates")
    return MapOperand(address=form.generic(operand), coordinates=coordinates)


def _rank(form: Form) -> int:
    return int(form.take("1d", "2d", "3d", "4d", "5d")[0])


@family("cp.async.bulk.tensor")
def bulk_tensor(form: Form) -> Effect:
    """Loads name shared memory first, stores the map."""
    first = form.operands[0]
    return _store(form) if isinstance(first, Address) and first.coordinates is not None else _load(form)


# loads


def _load(form: Form) -> Effect:
    rank = _rank(form)
    is_cluster = form.take("shared::cluster", "shared::cta") == "shared::cluster"
    form.take("global")
    form.has("tile")
    form.take("mbarrier::complete_tx::bytes")
    is_multicast = form.has("multicast::cluster")
    signals_pair = form.take("cta_group::1", "cta_group::2", default="") == "cta_group::2"
    has_policy = form.has("L2::cache_hint")
    form.end()
    destination, source, barrier = form.shared(0), _map_operand(form, 1, rank), form.shared(2)
    extra = list(range(3, len(form.operands)))
    if len(extra) != is_multicast + has_policy:
        raise form.unknown(f"has {len(form.operands)} operands")
    mask = form.src(extra[0], "b16") if is_multicast else None
    if has_policy:
        form.src(extra[-1], "b64")

    def execute(warp: Warp, lanes: Lanes) -> None:
        to, signal = destination.at(warp), barrier.at(warp)
        for lane in lanes.index.tolist():
            bound, coordinates = source.at(warp, lane)
            offset, signal_offset = int(to[lane]) & OFFSET_MASK, int(signal[lane]) & OFFSET_MASK
            if mask is None:
                pairs = [_destination(warp, int(to[lane]), int(signal[lane]), signals_pair, is_cluster)]
            else:
                pairs = list(_multicast(warp, int(warp.v[mask][lane]), int(signal[lane]), signals_pair))
            for cta, signalled in pairs:
                box = Box(bound=bound, coordinates=coordinates, cta=cta, offset=offset, what="TMA load")
                _issue_load(warp, box, find(warp, signalled.rank << RANK_SHIFT | signal_offset, "TMA load"))

    return form.effect(execute)


def _destination(warp: Warp, to: int, signal: int, signals_pair: bool, is_cluster: bool) -> tuple[Cta, Cta]:
    """The CTA that is written, and the one that is signalled."""
    cluster = warp.cta.cluster
    cta, signalled = cluster.cta_of(to), cluster.cta_of(signal)
    if not is_cluster and cta is not warp.cta:
        raise Fault("bounds", f"shared::cta destination lies in CTA {cta.rank}", address=to)
    if signalled is not cta and not (signals_pair and signalled.rank ^ cta.rank == 1):
        reach = "that CTA or its pair's other" if signals_pair else "that CTA"
        raise Fault("mbarrier", f"destination in CTA {cta.rank}: the mbarrier must be in {reach}", address=signal)
    return cta, signalled


def _multicast(warp: Warp, mask: int, signal: int, signals_pair: bool) -> Iterator[tuple[Cta, Cta]]:
    """For each CTA of the mask, it and the CTA that is signalled for it."""
    ctas = warp.cta.cluster.ctas
    if mask == 0 or mask >> len(ctas):
        raise Fault("bounds", f"multicast mask {mask:#06x} in a cluster of {len(ctas)} CTAs")
    parity = signal >> RANK_SHIFT & 1
    for cta in ctas:
        if mask >> cta.rank & 1:
            yield cta, ctas[cta.rank & ~1 | parity] if signals_pair else cta


def _issue_load(warp: Warp, box: Box, barrier: Mbarrier) -> None:
    cta, shadow = box.cta, box.cta.smem.shadow
    if cta.has_exited:
        raise Fault("exit", f"TMA load into CTA {cta.rank}, which has exited")
    box.check()
    barrier.require_async_visible()
    cells, size = box.cells, box.bound.map.box_bytes
    if cta.smem.check_races:
        shadow.check_write(cells, warp.clock.times, what=box.what)
    shadow.begin_flight(cells)

    def land() -> None:
        shadow.end_flight(cells)
        box.write_shared(box.load())
        shadow.mark_write(cells, barrier.agent, barrier.epoch)
        barrier.complete_tx(size)

    warp.machine.stats.add(warp, "tma_load_bytes", size)
    what = f"TMA load of {size} bytes for {barrier.describe()}"
    warp.machine.queues.issue(AsyncOp(steps=(land,), what=what, blame=warp.blame()))


# stores and reductions

INTEGERS = ("u32", "s32", "u64", "s64")
REDUCTIONS: dict[str, tuple[str, ...]] = {  # legal element types
    "add": (*INTEGERS, "f16", "bf16", "f32"),
    "min": (*INTEGERS, "f16", "bf16"),
    "max": (*INTEGERS, "f16", "bf16"),
    "and": INTEGERS,
    "or": INTEGERS,
    "xor": INTEGERS,
}


def _store(form: Form) -> Effect:
    return _to_global(form, None, "TMA store")


@family("cp.reduce.async.bulk.tensor")
def bulk_reduce_tensor(form: Form) -> Effect:
    """As a store, but each element is combined with what is in global memory."""
    operation = form.take(*REDUCTIONS)
    return _to_global(form, operation, f"TMA reduction ({operation})")


def _to_global(form: Form, operation: str | None, what: str) -> Effect:
    rank = _rank(form)
    for word in ("global", "shared::cta", "bulk_group"):
        form.take(word)
    form.has("tile")
    has_policy = form.has("L2::cache_hint")
    form.end()
    target, source = _map_operand(form, 0, rank), form.shared(1)
    if has_policy:
        form.src(2, "b64")

    def execute(warp: Warp, lanes: Lanes) -> None:
        addresses = source.at(warp)
        every = lanes.index.tolist()
        for lane in every if operation else _issuers(lanes, [addresses, *target.values(warp)]):
            bound, coordinates = target.at(warp, lane)
            if operation is not None and bound.map.dtype not in REDUCTIONS[operation]:
                raise Fault("tensor map", f"{what} of {bound.map.dtype} elements")
            cta = owner_of(warp, addresses[lane : lane + 1], what, own_only=True)
            offset = int(addresses[lane]) & OFFSET_MASK
            if min(coordinates) < 0:  # an illegal instruction on hardware
                raise Fault("tensor map", f"{what} that starts at negative coordinates {coordinates}", lane=lane)
            bound.memory.check_writable(what)
            box = Box(bound=bound, coordinates=coordinates, cta=cta, offset=offset, what=what)
            _issue_store(warp, lane, box, operation)

    return form.effect(execute)


def _issue_store(warp: Warp, lane: int, box: Box, operation: str | None) -> None:
    box.check()
    if box.cta.smem.check_races:
        group = warp.cta.bulk_groups(warp, lane)
        box.cta.smem.shadow.check_read(box.cells, warp.clock.times, by_async=True, what=box.what)
        box.cta.smem.shadow.mark_read(box.cells, group.agent, group.epoch)

    def write(values: npt.NDArray[Any]) -> None:
        if (part := box.global_part()) is not None:
            inside, view = part
            new = np.ascontiguousarray(values[inside])
            if operation is not None:
                new = reduce_words(operation, box.bound.map.dtype, np.ascontiguousarray(view), new, flushes=True)
            view[...] = new

    size = box.bound.map.box_bytes
    warp.machine.stats.add(warp, "tma_store_bytes", size)
    issue_store(warp, lane, box.read_shared, write, f"{box.what} of {size} bytes")


# without effect on results: hints, and fences for maps rewritten in memory, which no launch can have


@family("prefetch.tensormap")
def prefetch_map(form: Form) -> Effect:
    """A hint; the address must be that of a map."""
    form.take("param", default="")
    form.end()
    address = form.generic(0)

    def execute(warp: Warp, lanes: Lanes) -> None:
        for at in address.at(warp)[lanes.index]:
            warp.machine.tensor_map(int(at))

    return form.effect(execute)


@family("cp.async.bulk.prefetch.tensor")
def prefetch_box(form: Form) -> Effect:
    """A hint; map and coordinates must fit each other."""
    rank = _rank(form)
    for word in ("L2", "global"):
        form.take(word)
    form.has("tile")
    has_policy = form.has("L2::cache_hint")
    form.end()
    source = _map_operand(form, 0, rank)
    if has_policy:
        form.src(1, "b64")

    def execute(warp: Warp, lanes: Lanes) -> None:
        for lane in lanes.index:
            source.at(warp, lane)

    return form.effect(execute)


@family("fence.proxy.tensormap::generic")
def fence_map(form: Form) -> Effect:
    """Orders writes to a map in memory before its use."""
    form.take("release", "acquire")
    form.take("cta", "cluster", "gpu", "sys")
    form.end()
    for operand in form.operands:
        if isinstance(operand, Address):
            form.generic(operand)
    return form.effect(lambda warp, lanes: None)
