"""Registers, masks, warps, warpgroups, CTAs and clusters: what exists, without what instructions mean.

A register of a warp is a numpy array over 32 lanes in `Warp.v`, addressed by slot. A slot is a register *seen as* a
type, so that reading an f32 out of a `.b32` register costs nothing; constants and special registers have slots, too.
Shapes by type: 8 to 64 bit types [32]; "f32x2" [64] (lane l at 2l and 2l+1); "b128" [2, 32] of uint64 (low half first);
"pred" bool [32].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.order import Clock, Clocks
from jax_fa4.emulator.schedule import AsyncOp, Wait

if TYPE_CHECKING:
    from jax_fa4.emulator.barriers import ClusterBarrier, Mbarriers, NamedBarriers
    from jax_fa4.emulator.errors import EmulatorError
    from jax_fa4.emulator.memory import LocalMemory, SharedMemory
    from jax_fa4.emulator.program import Program, Step
    from jax_fa4.emulator.run import Machine
    from jax_fa4.emulator.slots import RegisterFile

__all__ = ["BulkGroups", "Cluster", "Cta", "Fragment", "Hold", "Join", "Lanes", "Warp", "Warpgroup"]

LANES = 32
ALL_BITS = 0xFFFFFFFF
Mask = npt.NDArray[np.bool_]


class Lanes:
    """The lanes that execute an instruction: `mask` bool [32], `bits` the same as an integer, `full` if all 32."""

    __slots__ = ("_index", "_pairs", "bits", "full", "mask")

    def __init__(self, bits: int):
        self.bits = bits
        self.full = bits == ALL_BITS
        self.mask: Mask = np.array([bits >> lane & 1 for lane in range(LANES)], bool)
        self._pairs: Mask | None = None
        self._index: npt.NDArray[np.intp] | None = None

    @property
    def pairs(self) -> Mask:
        """`mask` for f32x2 registers: bool [64]."""
        if self._pairs is None:
            self._pairs = np.repeat(self.mask, 2)
        return self._pairs

    @property
    def index(self) -> npt.NDArray[np.intp]:
        """Numbers of the executing lanes, ascending."""
        if self._index is None:
            self._index = np.flatnonzero(self.mask)
        return self._index

    @property
    def first(self) -> int:
        """The lowest executing lane."""
        return (self.bits & -self.bits).bit_length() - 1

    def put(self, destination: npt.NDArray[Any], value: npt.ArrayLike) -> None:
        """Write a register: only the executing lanes change."""
        if self.full:
            destination[...] = value
        else:
            mask = self.pairs if destination.shape == (2 * LANES,) else self.mask
            np.copyto(destination, value, casting="unsafe", where=mask)

    def uniform(self, value: npt.NDArray[Any], what: str) -> int:
        """The value that all executing lanes share; `Fault` if they differ."""
        mine = value[self.mask]
        if (mine != mine[0]).any():
            raise Fault(
                "convergence", f"{what} differs between the lanes of the warp", lane=int(self.index[mine != mine[0]][0])
            )
        return int(mine[0])


_lanes: dict[int, Lanes] = {}


def lanes_of(bits: int) -> Lanes:
    """The shared `Lanes` object of a mask."""
    found = _lanes.get(bits)
    if found is None:
        found = _lanes[bits] = Lanes(bits)
    return found


@dataclasses.dataclass(slots=True, eq=False)
class Join:
    """Where the two sides of a divergent branch meet again: at `pc`, once all of `expected` have arrived or exited."""

    pc: int
    expected: int
    arrived: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Fragment:
    """Lanes of a warp that execute together. A converged warp has one."""

    pc: int
    lanes: Lanes
    joins: tuple[Join, ...] = ()
    wait: Wait | None = None
    waiting_at: Step | None = None
    polling: bool = False

    @property
    def join_pc(self) -> int:
        """Where this fragment must stop and wait for the others; -1 if nowhere."""
        return self.joins[-1].pc if self.joins else -1


@dataclasses.dataclass(slots=True, eq=False)
class Hold:
    """Registers with an operation in flight on them (bit i = register i). Touching one calls `on_touch`.

    `on_touch` raises (wgmma: accumulators may not be touched) or completes the operation and calls `Warp.unhold`
    (tcgen05.ld: a use of the result waits for it).
    """

    registers: int
    on_touch: Callable[[Hold], None]


class Warp:
    """32 threads: registers, what they know of the others (`clock`), and operations that they have in flight."""

    def __init__(self, cta: Cta, index: int, registers: RegisterFile, clock: Clock):
        self.cta = cta
        self.index = index
        self.registers = registers
        self.v = registers.v
        self.clock = clock
        self.local: LocalMemory
        self.writing_lanes = 0  # lanes that wrote shared memory since the lanes last synchronised or fenced
        self.fragments: list[Fragment] = []
        self.alive = ALL_BITS
        self.held = 0
        self.holds: list[Hold] = []
        self.touched = 0
        self.counts = [0] * len(cta.cluster.program.steps)
        self.step: Step = cta.cluster.program.steps[0]
        self.steps = 0
        self.scratch: dict[str, Any] = {}

    def blame(self) -> Callable[[Exception], EmulatorError]:
        """For `AsyncOp.blame`: reports faults of an operation at the instruction that is being executed now."""
        return self.machine.blame(self, self.step)

    @property
    def warpgroup(self) -> Warpgroup:
        """The four warps with this one's index // 4."""
        return self.cta.warpgroups[self.index // 4]

    @property
    def machine(self) -> Machine:
        """The launch that this warp belongs to."""
        return self.cta.cluster.machine

    def require_converged(self, lanes: Lanes, what: str) -> None:
        """`.aligned`: all lanes that have not exited execute this together."""
        if lanes.bits != self.alive:
            absent = self.alive & ~lanes.bits
            raise Fault("convergence", f"{what} is executed by lanes 0x{lanes.bits:08x} without lanes 0x{absent:08x}")

    def hold(self, registers: int, on_touch: Callable[[Hold], None]) -> Hold:
        """Guard registers until `unhold`."""
        hold = Hold(registers, on_touch)
        self.holds.append(hold)
        self.held |= registers
        return hold

    def unhold(self, hold: Hold) -> None:
        """The operation on these registers is complete."""
        self.holds.remove(hold)
        self.held = 0
        for other in self.holds:
            self.held |= other.registers

    def touch_held(self, registers: int) -> None:
        """An instruction touches `registers`, some of which are held."""
        for hold in [hold for hold in self.holds if hold.registers & registers]:
            hold.on_touch(hold)


class Warpgroup:
    """Four consecutive warps. `scratch` belongs to the wgmma handlers."""

    def __init__(self, cta: Cta, index: int):
        self.cta = cta
        self.index = index
        self.scratch: dict[str, Any] = {}

    @property
    def warps(self) -> list[Warp]:
        """Its warps, fewer than four at the end of an odd-sized CTA."""
        return self.cta.warps[4 * self.index : 4 * self.index + 4]


class BulkGroups:
    """The bulk stores and reductions of one thread, in groups that complete in commit order.

    `epoch` is that of the open group; the agent reads shared memory.
    """

    def __init__(self, warp: Warp, lane: int):
        cluster = warp.cta.cluster
        name = f"bulk stores of warp {warp.index} lane {lane} of CTA {warp.cta.rank}"
        self.agent = cluster.clocks.agent(name, is_async=True)
        self.queue = (self.agent, id(cluster))
        self.groups: list[list[AsyncOp]] = []
        self.open: list[AsyncOp] = []
        self.read_epoch = 0

    @property
    def epoch(self) -> int:
        """The number of the open group, counted from 1."""
        return len(self.groups) + 1

    def add(self, op: AsyncOp) -> None:
        """Put an operation into the open group."""
        self.open.append(op)

    def commit(self) -> None:
        """Close the open group; it may be empty."""
        self.groups.append(self.open)
        self.open = []

    def is_read(self, pending: int) -> bool:
        """Whether all groups but the newest `pending` have read their sources."""
        return all(op.done for group in self.groups[: max(len(self.groups) - pending, 0)] for op in group)

    def is_complete(self, pending: int) -> bool:
        """Whether all groups but the newest `pending` are complete."""
        return all(op.is_complete for group in self.groups[: max(len(self.groups) - pending, 0)] for op in group)


class Cta:
    """A thread block: its memories and barriers. `scratch` belongs to handlers (tcgen05 keeps tensor memory there)."""

    smem: SharedMemory
    mbarriers: Mbarriers
    named_barriers: NamedBarriers

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]):
        self.cluster = cluster
        self.rank = rank
        self.ctaid = ctaid
        self.warps: list[Warp] = []
        self.warpgroups: list[Warpgroup] = []
        self.at_exit: list[Callable[[], None]] = []
        self.scratch: dict[str, Any] = {}
        self._bulk_groups: dict[tuple[Warp, int], BulkGroups] = {}

    def has_bulk_groups(self, warp: Warp, lane: int) -> bool:
        """Whether the thread has issued or committed any."""
        return (warp, lane) in self._bulk_groups

    def check_bulk_sources(self) -> None:
        """At the end, all bulk stores must be known to have read their sources."""
        for (warp, lane), group in self._bulk_groups.items():
            if group.open:
                raise Fault(
                    "bulk group", f"warp {warp.index} lane {lane} exits with a bulk store that was never committed"
                )
            if any(group.groups[group.read_epoch :]):
                message = (
                    f"warp {warp.index} lane {lane} exits without waiting until its bulk stores have read shared memory"
                )
                raise Fault("bulk group", message)

    def bulk_groups(self, warp: Warp, lane: int) -> BulkGroups:
        """The bulk-store groups of a thread."""
        key = (warp, lane)
        if key not in self._bulk_groups:
            self._bulk_groups[key] = BulkGroups(warp, lane)
        return self._bulk_groups[key]

    @property
    def has_exited(self) -> bool:
        """Whether no thread is left."""
        return not any(warp.alive for warp in self.warps)


class Cluster:
    """CTAs that run together, and the clocks of everything in them. `scratch` belongs to handlers."""

    barrier: ClusterBarrier

    def __init__(self, machine: Machine, program: Program, clocks: Clocks):
        self.machine = machine
        self.program = program
        self.clocks = clocks
        self.ctas: list[Cta] = []
        self.scratch: dict[str, Any] = {}

    def cta_of(self, address: int) -> Cta:
        """The CTA whose shared memory a shared::cluster address lies in (bits 24 and up are the rank)."""
        rank = address >> 24
        if rank >= len(self.ctas):
            raise Fault("bounds", f"shared::cluster address names CTA {rank} of {len(self.ctas)}", address=address)
        return self.ctas[rank]
