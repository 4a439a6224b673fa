"""mbarriers, named barriers and cluster barriers.

Each keeps its own rules and hands clocks from those who arrive to those who wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.order import FREE, MBARRIER, Clock, Times

if TYPE_CHECKING:
    from jax_fa4.emulator.state import Cluster, Cta, Warp

__all__ = ["ClusterBarrier", "Mbarrier", "Mbarriers", "NamedBarriers", "Round"]

MAX_COUNT = (1 << 20) - 1  # of arrivals, and of outstanding bytes
NUM_NAMED_BARRIERS = 16


class Mbarrier:
    """One mbarrier object. `phase` counts completed phases; a wait on parity P passes when phase & 1 != P.

    What copies write on behalf of a phase belongs to the barrier's own agent, at epoch `epoch`.
    """

    def __init__(self, cta: Cta, offset: int, expected: int, clock: Clock):
        clocks = cta.cluster.clocks
        self.cta = cta
        self.offset = offset
        self.address = cta.rank << 24 | offset
        self.expected = expected
        self.pending = expected
        self.tx = 0
        self.phase = 0
        self.is_async_visible = False
        self.agent = clocks.agent(f"copies of mbarrier 0x{self.address:x}", is_async=True)
        self.init_agent, self.init_epoch = clock.init_agent, clock.initialises()
        self.gathered: Times = clocks.empty()
        self.released: Times = clocks.empty()

    @property
    def epoch(self) -> int:
        """The epoch of what lands in the current phase."""
        return self.phase + 1

    def describe(self) -> str:
        """State, for messages."""
        return (
            f"mbarrier 0x{self.address:x} (phase {self.phase}, {self.pending} of {self.expected} arrivals pending, "
            f"{self.tx} bytes pending)"
        )

    def require_visible(self, clock: Clock) -> None:
        """The init happened before this use."""
        if clock.times[0, self.init_agent] < self.init_epoch:
            raise self._fault("is used before its initialisation is visible to this warp: no barrier in between")

    def require_async_visible(self) -> None:
        """

        he init was fenced (fence.mbarrier_init or fence.proxy.async) before asynchronous operations or other
        CTAs use it.
        """
        if not self.is_async_visible:
            raise self._fault(
                "is used by an asynchronous operation or another CTA without fence.mbarrier_init after its init"
            )

    def expect_tx(self, size: int) -> None:
        """`size` more bytes belong to the current phase."""
        self.cta.cluster.machine.progress += 1
        self.tx += size
        if self.tx > MAX_COUNT:
            raise self._fault(f"expects {self.tx} bytes, more than {MAX_COUNT}")

    def arrive(self, count: int, times: Times) -> int:
        """`count` arrivals of threads that knew `times`; returns the state token from before."""
        self.cta.cluster.machine.progress += 1
        if count > self.pending:
            raise self._fault(f"gets {count} arrivals with {self.pending} pending")
        token = self.phase << 20 | self.pending
        self.pending -= count
        np.maximum(self.gathered, times, out=self.gathered)
        self._try_complete()
        return token

    def drop(self, count: int) -> None:
        """Expect `count` fewer arrivals from the next phase on."""
        self.expected -= count

    def complete_tx(self, size: int) -> None:
        """`size` bytes of a copy have landed."""
        self.cta.cluster.machine.progress += 1
        self.gathered[:, self.agent] = self.epoch
        self.tx -= size
        if self.tx < 0 and self.pending == 0:
            raise self._fault(f"gets {-self.tx} bytes more than the phase expects")
        if self.tx < -MAX_COUNT:
            raise self._fault(f"gets more than {MAX_COUNT} bytes that nobody expects")
        self._try_complete()

    def _try_complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            np.maximum(self.released, self.gathered, out=self.released)
        elif self.pending == 0 and self.tx < 0:
            raise self._fault(f"has got {-self.tx} bytes more than its phase expects")

    def _fault(self, message: str) -> Fault:
        return Fault("mbarrier", f"{self.describe()} {message}", address=self.address)


class Mbarriers:
    """The mbarrier objects in a CTA's shared memory, by offset."""

    def __init__(self, cta: Cta):
        self._cta = cta
        self._live: dict[int, Mbarrier] = {}

    def __iter__(self):
        return iter(self._live.values())

    def init(self, offset: int, count: int, clock: Clock) -> Mbarrier:
        """Make an mbarrier that completes a phase after `count` arrivals."""
        smem = self._cta.smem
        smem.check_range(offset, 8, 8, "mbarrier.init")
        if offset in self._live:
            raise Fault(
                "mbarrier",
                f"init of {self._live[offset].describe()}, which is live",
                address=self._live[offset].address,
            )
        if not 1 <= count <= MAX_COUNT:
            raise Fault("mbarrier", f"init with count {count}", address=self._cta.rank << 24 | offset)
        cells = slice(offset >> 2, (offset >> 2) + 2)
        if smem.check_races:
            smem.shadow.check_write(cells, clock.times, what="mbarrier.init")
            smem.shadow.mark_write(cells, clock.agent, clock.epoch)
            smem.shadow.busy[cells] = MBARRIER
        self._live[offset] = Mbarrier(self._cta, offset, count, clock)
        return self._live[offset]

    def at(self, offset: int) -> Mbarrier:
        """The live mbarrier at this offset."""
        if offset not in self._live:
            raise Fault("mbarrier", "there is no live mbarrier", address=self._cta.rank << 24 | offset)
        return self._live[offset]

    def inval(self, offset: int) -> None:
        """End the object's life: the bytes are data again."""
        self.at(offset)
        del self._live[offset]
        cells = slice(offset >> 2, (offset >> 2) + 2)
        self._cta.smem.shadow.busy[cells] = FREE
        self._cta.smem.shadow.written[cells] = False

    def fence_init(self, clock: Clock) -> None:
        """fence.mbarrier_init or fence.proxy.async by a warp.

        Its inits so far are visible to everyone who synchronises with it.
        """
        for barrier in self._live.values():
            if barrier.init_agent == clock.init_agent:
                barrier.is_async_visible = True


class Round:
    """One use of a named barrier, from first arrival to completion. `votes` counts the lanes whose predicate held."""

    def __init__(self, count: int, kind: str, times: Times):
        self.count = count
        self.kind = kind
        self.arrived: list[Warp] = []
        self.missing_lanes: dict[Warp, int] = {}
        self.times = times
        self.votes = 0
        self.is_complete = False


class NamedBarriers:
    """The 16 barriers of a CTA. A warp arrives as a unit, when all its lanes are there, and counts 32 threads."""

    def __init__(self, cta: Cta):
        self._cta = cta
        self._open: dict[int, Round] = {}

    def arrive(self, warp: Warp, lanes: int, number: int, count: int | None, mode: str, votes: int) -> Round:
        """Lanes arrive at barrier `number`; `count` is in threads (None: all), `mode` sync, arrive or red.

        Returns the round, complete or not.
        """
        kind, waits = "red" if mode == "red" else "sync", mode != "arrive"
        if not 0 <= number < NUM_NAMED_BARRIERS:
            raise Fault("named barrier", f"barrier {number} does not exist: there are {NUM_NAMED_BARRIERS}")
        threads = 32 * len(self._cta.warps) if count is None else count
        if threads % 32 or not 0 < threads <= 1024:
            raise Fault("named barrier", f"barrier {number} with {threads} threads: needs a multiple of 32 up to 1024")
        current = self._open.get(number)
        if current is None:
            current = self._open[number] = Round(threads, kind, warp.clock.clocks.empty())
        if current.count != threads:
            raise Fault("named barrier", f"barrier {number} with {threads} threads, others came with {current.count}")
        if current.kind != kind:
            raise Fault("named barrier", f"barrier {number} mixes reductions with sync or arrive")
        machine = self._cta.cluster.machine
        # arriving for oneself and then waiting is seen in known-good kernels: the first wait passes at once
        if warp in current.arrived and (machine.options.strict or not waits):
            raise Fault("named barrier", f"the warp arrives twice at barrier {number} before it completes")
        machine.progress += 1
        np.maximum(current.times, warp.clock.release(), out=current.times)
        current.votes += votes
        current.missing_lanes[warp] = current.missing_lanes.get(warp, warp.alive) & ~lanes
        if not current.missing_lanes[warp]:
            del current.missing_lanes[warp]
            current.arrived.append(warp)
        if 32 * len(current.arrived) == threads:
            current.is_complete = True
            del self._open[number]
        return current

    def describe(self, number: int) -> str:
        """Who has arrived, for the deadlock table."""
        current = self._open.get(number)
        if current is None:
            return f"barrier {number}, at which nobody else has arrived"
        names = ", ".join(str(warp.index) for warp in current.arrived)
        return f"barrier {number}: {32 * len(current.arrived)} of {current.count} threads (warps {names})"

    def open_rounds(self) -> list[str]:
        """Barriers with arrivals that never completed."""
        return [self.describe(number) for number in self._open]


class ClusterBarrier:
    """barrier.cluster: all threads of the cluster arrive, then all wait."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._arrived: dict[Warp, int] = {}
        self._times = cluster.clocks.empty()
        self.generation = 0
        self._released: Times = cluster.clocks.empty()
        self._owed: dict[Warp, int] = {}

    def arrive(self, warp: Warp, lanes: int, times: Times) -> None:
        """The lanes arrive, knowing `times`."""
        if self._arrived.get(warp, 0) & lanes:
            raise Fault("cluster barrier", "a thread arrives twice without waiting")
        if self._owed.get(warp, 0) & lanes:
            raise Fault("cluster barrier", "a thread arrives again before it has waited for the previous round")
        self._cluster.machine.progress += 1
        self._arrived[warp] = self._arrived.get(warp, 0) | lanes
        self._owed[warp] = self._owed.get(warp, 0) | lanes
        np.maximum(self._times, times, out=self._times)
        self.update()

    def wait(self, warp: Warp, lanes: int, *, is_relaxed: bool) -> tuple[Callable[[], bool], Callable[[], None]]:
        """`(ready, then)` of the wait."""
        if self._owed.get(warp, 0) & lanes != lanes:
            raise Fault("cluster barrier", "a thread waits without having arrived")
        awaited = self.generation + 1 if self._arrived.get(warp, 0) & lanes else self.generation

        def then() -> None:
            self._owed[warp] &= ~lanes
            warp.clock.join(self._released, is_relaxed=is_relaxed)

        return lambda: self.generation >= awaited, then

    def update(self) -> None:
        """Complete the round if all threads that have not exited have arrived."""
        warps = [warp for cta in self._cluster.ctas for warp in cta.warps]
        if self._arrived and all(self._arrived.get(warp, 0) & warp.alive == warp.alive for warp in warps):
            self.generation += 1
            self._arrived.clear()
            self._released = self._times.copy()

    def describe(self) -> str:
        """How many have arrived, for the deadlock table."""
        arrived = sum(mask.bit_count() for mask in self._arrived.values())
        threads = sum(warp.alive.bit_count() for cta in self._cluster.ctas for warp in cta.warps)
        return f"the cluster barrier: {arrived} of {threads} threads have arrived"
