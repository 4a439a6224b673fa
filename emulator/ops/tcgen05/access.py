"""tcgen05.ld, st and wait: a warp moves registers from and to its quarter of tensor memory, asynchronously.

Results of an ld that an instruction uses before tcgen05.wait::ld are there all the same: the use waits for that ld.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.decode import Effect, Form, SharedAddress, family
from jax_fa4.emulator.layout import tensor_memory as layout
from jax_fa4.emulator.ops.registers import RegisterVector
from jax_fa4.emulator.ops.tcgen05.pipe import memory_of
from jax_fa4.emulator.schedule import AsyncOp, Wait
from jax_fa4.emulator.state import Hold, Lanes, Warp
from jax_fa4.emulator.tmem import GROUP_LANES, TensorMemory, shadow_cells

__all__: list[str] = []


class Footprint(NamedTuple):
    """The cells of one access relative to its address."""

    places: npt.NDArray[np.int64]  # lane * COLUMNS + column: [registers, 32] or [registers, 32, 2]
    lanes: int
    spans: tuple[tuple[int, int], ...]  # (first column, columns)


@functools.cache
def _footprint(shape: str, repeat: int, halves: bool, split: int) -> Footprint:
    cells = layout.register_cells(shape, repeat, halves=halves, split=split)
    columns = np.unique(cells.column)
    edges = np.flatnonzero(np.diff(columns) > 1)
    starts, ends = columns[np.r_[0, edges + 1]], columns[np.r_[edges, -1]] + 1
    spans = tuple((int(start), int(end - start)) for start, end in zip(starts, ends, strict=True))
    return Footprint(cells.lane * layout.COLUMNS + cells.column, layout.SHAPES[shape].lanes, spans)


@dataclasses.dataclass(slots=True, eq=False)
class Transfers:
    """The ld (or the st) of one warp, numbered from 1."""

    agent: int
    issued: int = 0
    finished: int = 0  # all up to here are complete, and the warp knows
    in_flight: deque[tuple[int, AsyncOp, Hold | None]] = dataclasses.field(default_factory=deque)

    def settle(self, warp: Warp) -> None:
        """Forget what is complete at the head of the line; the warp learns that it has happened."""
        while self.in_flight and self.in_flight[0][1].is_complete and self.in_flight[0][2] is None:
            self.finished = self.in_flight.popleft()[0]
        warp.clock.learn(self.agent, self.finished)

    def release(self, warp: Warp) -> None:
        """All are complete: their registers are free."""
        for _, _, hold in self.in_flight:
            if hold is not None:
                warp.unhold(hold)
        self.in_flight.clear()
        self.finished = self.issued
        warp.clock.learn(self.agent, self.finished)


def _transfers(warp: Warp, kind: str) -> Transfers:
    key = f"tcgen05.{kind}"
    if key not in warp.scratch:
        name = f"{key} of warp {warp.index} of CTA {warp.cta.rank}"
        warp.scratch[key] = Transfers(warp.cta.cluster.clocks.agent(name, is_async=True, is_tensor=True))
    return warp.scratch[key]


class Access(NamedTuple):
    """Where one executed ld or st goes."""

    memory: TensorMemory
    places: npt.NDArray[np.int64]  # in the flat cells
    cells: npt.NDArray[np.int64]  # of the shadow


def _locate(warp: Warp, lanes: Lanes, address: SharedAddress, footprint: Footprint, what: str) -> Access:
    """Check an address against the rules for this warp."""
    memory = memory_of(warp.cta)
    lane, column = layout.split_address(lanes.uniform(address.at(warp), f"address of {what}"))
    memory.check_quarter(lane, footprint.lanes, warp.index, what)
    groups = tuple(range(lane // GROUP_LANES, (lane + footprint.lanes) // GROUP_LANES))
    for first, count in footprint.spans:
        memory.check_columns(column + first, count, what)
    cells = [shadow_cells(groups, column + first, count) for first, count in footprint.spans]
    places = footprint.places + (lane * layout.COLUMNS + column)
    return Access(memory, places, cells[0] if len(cells) == 1 else np.concatenate(cells))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """What ld and st have in common."""

    shape: str
    repeat: int
    halves: bool

    @property
    def registers(self) -> int:
        """How many registers the vector operand has."""
        return layout.SHAPES[self.shape].registers * self.repeat


def _decode(form: Form, packing: str) -> Decoded:
    for word in ("sync", "aligned", "b32"):
        form.take(word)
    shape = form.take(*layout.SHAPES)
    limit = layout.SHAPES[shape].max_repeat
    repeat = int(form.take(*(f"x{1 << i}" for i in range(limit.bit_length())))[1:])
    halves = form.has(packing)
    form.end()
    return Decoded(shape=shape, repeat=repeat, halves=halves)


def _split(form: Form, decoded: Decoded, operand: int) -> int:
    return form.immediate(operand) if decoded.shape == "16x32bx2" else 0


def _check_count(form: Form, decoded: Decoded, vector: RegisterVector) -> None:
    if len(vector) != decoded.registers:
        raise form.unknown(f"has {len(vector)} registers, the shape takes {decoded.registers}")


@family("tcgen05.ld")
def load(form: Form) -> Effect:
    """Tensor memory to registers."""
    decoded = _decode(form, "pack::16b")
    vector = RegisterVector([slot for slot in form.dsts(0, "b32") if slot is not None])
    _check_count(form, decoded, vector)
    address = form.shared(1)
    footprint = _footprint(decoded.shape, decoded.repeat, decoded.halves, _split(form, decoded, 2))
    mask = form.registers_of(0)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "tcgen05.ld")
        memory, places, cells = _locate(warp, lanes, address, footprint, "tcgen05.ld")
        transfers = _transfers(warp, "ld")
        transfers.issued += 1
        memory.check_written(memory.written.reshape(-1)[places], "tcgen05.ld")
        if memory.check_races:
            memory.shadow.check_read(cells, warp.clock.times, by_async=False, what="tcgen05.ld")
            memory.shadow.mark_read(cells, transfers.agent, transfers.issued)

        def arrive() -> None:
            values = memory.cells.reshape(-1)[places]
            if decoded.halves:
                values = values[..., 0] & np.uint32(0xFFFF) | values[..., 1] << np.uint32(16)
            vector.write(warp, values)

        op = AsyncOp(steps=(arrive,), what="tcgen05.ld", queue=transfers, blame=warp.blame())

        def use(hold: Hold) -> None:
            warp.machine.queues.drain(op)
            warp.unhold(hold)
            entry = next(i for i, (_, other, _) in enumerate(transfers.in_flight) if other is op)
            transfers.in_flight[entry] = (transfers.in_flight[entry][0], op, None)
            if not warp.machine.options.strict:  # the text knows no end of a load but tcgen05.wait::ld
                transfers.settle(warp)

        transfers.in_flight.append((transfers.issued, op, warp.hold(mask, use)))
        warp.machine.queues.issue(op)

    return form.effect(execute)


@family("tcgen05.st")
def store(form: Form) -> Effect:
    """Registers, read when the instruction is issued, to tensor memory."""
    decoded = _decode(form, "unpack::16b")
    address = form.shared(0)
    split = _split(form, decoded, 1)
    vector = RegisterVector(form.srcs(2 if decoded.shape == "16x32bx2" else 1, "b32"))
    _check_count(form, decoded, vector)
    footprint = _footprint(decoded.shape, decoded.repeat, decoded.halves, split)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "tcgen05.st")
        memory, places, cells = _locate(warp, lanes, address, footprint, "tcgen05.st")
        transfers = _transfers(warp, "st")
        transfers.issued += 1
        if memory.check_races:
            memory.shadow.check_write(cells, warp.clock.times, what="tcgen05.st")
            memory.shadow.mark_write(cells, transfers.agent, transfers.issued)
        memory.written.reshape(-1)[places] = True
        words = vector.read(warp)
        values = np.stack([words & 0xFFFF, words >> 16], -1) if decoded.halves else words

        def arrive() -> None:
            memory.cells.reshape(-1)[places] = values

        op = AsyncOp(steps=(arrive,), what="tcgen05.st", queue=transfers, blame=warp.blame())
        transfers.in_flight.append((transfers.issued, op, None))
        warp.machine.queues.issue(op)

    return form.effect(execute)


def _wait(form: Form, kind: str) -> Effect:
    for word in ("sync", "aligned"):
        form.take(word)
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> Wait:
        warp.require_converged(lanes, f"tcgen05.wait::{kind}")
        transfers = _transfers(warp, kind)
        return Wait(
            what=lambda: f"tcgen05.{kind}: {len(transfers.in_flight)} in flight",
            ready=lambda: all(op.is_complete for _, op, _ in transfers.in_flight),
            then=lambda: transfers.release(warp),
        )

    return form.effect(execute)


@family("tcgen05.wait::ld")
def wait_load(form: Form) -> Effect:
    """Wait for all ld of the warp."""
    return _wait(form, "ld")


@family("tcgen05.wait::st")
def wait_store(form: Form) -> Effect:
    """Wait for all st of the warp."""
    return _wait(form, "st")
