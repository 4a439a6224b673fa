"""Happens-before: vector clocks of agents, and shadow cells that check every access against them.

An agent is whatever makes accesses in order: a warp; the wgmma queue of a warpgroup; the tcgen05 pipe of a thread; the
bulk stores of a thread; the copies that one mbarrier counts. An agent's time is its epoch, an integer that grows. A
`Clock` says, per agent, up to which epoch its accesses are known to have happened. Synchronisation passes clocks on: an
arrival releases the arriving warp's clock into the barrier, and a wait joins it into the waiting warp's clock.

A clock has two rows. Row 0 is plain happens-before. Row 1 holds what has also passed a `fence.proxy.async`: the generic
writes that the async proxy (TMA, wgmma, tcgen05) may rely on. Both rows travel together.

Strict clocks have a third: writes that may be read. An arrival at another CTA's mbarrier with the scope of its own CTA
hands that row on empty: what was read or written before it may be overwritten, but not read.

Relaxed synchronisation orders nothing by itself: a relaxed arrival hands on what a fence before it has covered, and
what a relaxed wait brings counts from the next fence on. `tcgen05.fence` is such a fence for the agents that access
tensor memory. Strict clocks need it also where synchronisation is release and acquire, as the text has it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import Check, Fault

__all__ = ["Clock", "Clocks", "Shadow"]

FREE, IN_FLIGHT, MBARRIER = 0, 1, 2  # states of a cell in `Shadow.busy`

Cells = slice | npt.NDArray[np.integer]
Times = npt.NDArray[np.int32]  # [2 or 3, agents]

FENCED, READABLE = 1, 2  # rows
PLAIN = slice(0, None, 2)  # rows that a generic access of an agent raises


class Clocks:
    """The agents of one cluster. Agent 0 is the launch itself: what it wrote happened before everything."""

    def __init__(self, capacity: int, *, is_strict: bool = False):
        self.capacity = capacity
        self.is_strict = is_strict
        self.names: list[str] = ["launch"]
        self.is_async = np.zeros(capacity, bool)
        self.is_tensor = np.zeros(capacity, bool)  # accesses tensor memory

    def agent(self, name: str, *, is_async: bool, is_tensor: bool = False) -> int:
        """Register an agent and return its number."""
        if len(self.names) == self.capacity:
            raise Fault("unsupported", f"more than {self.capacity} agents in one cluster")
        self.is_async[len(self.names)] = is_async
        self.is_tensor[len(self.names)] = is_tensor
        self.names.append(name)
        return len(self.names) - 1

    def empty(self) -> Times:
        """Times at which nothing has happened."""
        return np.zeros((3 if self.is_strict else 2, self.capacity), np.int32)


class Clock:
    """What one agent that executes instructions (a warp) knows to have happened."""

    __slots__ = ("_brought", "_fenced", "agent", "clocks", "init_agent", "own", "times")

    def __init__(self, clocks: Clocks, name: str):
        self.clocks = clocks
        self.agent = clocks.agent(name, is_async=False)
        self.init_agent = clocks.agent(f"mbarrier.init by {name}", is_async=False)
        self.own = [self.agent]  # agents whose writes are those of this one's lanes
        self.times: Times = clocks.empty()
        self.times[PLAIN, self.agent] = 1  # nothing that it writes has passed a proxy fence yet
        self._fenced: Times = clocks.empty()  # what relaxed arrivals hand on
        self._brought: Times = clocks.empty()  # by relaxed waits

    @property
    def epoch(self) -> int:
        """The epoch that an access made now belongs to."""
        return int(self.times[0, self.agent])

    def join(self, times: Times, *, is_relaxed: bool = False) -> None:
        """Acquire: whatever had happened at `times` has happened for this agent too; if relaxed, after a fence."""
        if is_relaxed or self.clocks.is_strict:
            np.maximum(self._brought, times, out=self._brought)
        if is_relaxed:
            return
        if self.clocks.is_strict:
            times = np.where(self.clocks.is_tensor, 0, times)
        np.maximum(self.times, times, out=self.times)

    def release(self, *, is_relaxed: bool = False) -> Times:
        """A copy to hand to others; accesses made from now on are not covered by it, if relaxed those since a fence."""
        if is_relaxed:
            return self._fenced.copy()
        times = self.times.copy()
        self.times[PLAIN, self.agent] += 1
        if self.clocks.is_strict:
            times = np.where(self.clocks.is_tensor, self._fenced, times)
        return times

    def beyond_scope(self, times: Times) -> Times:
        """What of `times` reaches agents that the scope of their release leaves out: reads, but nothing to read."""
        if not self.clocks.is_strict:
            return times
        times = times.copy()
        times[READABLE] = 0
        return times

    def fence(self) -> None:
        """fence.acq_rel: covers everything for relaxed synchronisation before and after it."""
        self._take(slice(None))
        self._cover(slice(None))

    def fence_inits(self) -> None:
        """fence.mbarrier_init: relaxed arrivals hand on the initialisations so far."""
        self._cover(self.init_agent)

    def fence_before(self) -> None:
        """tcgen05.fence::before_thread_sync: covers accesses to tensor memory so far."""
        self._cover(self.clocks.is_tensor)

    def fence_after(self) -> None:
        """tcgen05.fence::after_thread_sync: accesses to tensor memory that synchronisation has brought count."""
        self._take(self.clocks.is_tensor)

    def initialises(self) -> int:
        """The epoch of an mbarrier.init that happens now."""
        self.times[0, self.init_agent] += 1
        return int(self.times[0, self.init_agent])

    def _take(self, agents: slice | npt.NDArray[np.bool_]) -> None:
        self.times[:, agents] = np.maximum(self.times[:, agents], self._brought[:, agents])

    def _cover(self, agents: int | slice | npt.NDArray[np.bool_]) -> None:
        self._fenced[:, agents] = self.times[:, agents]
        self.times[PLAIN, self.agent] += 1

    def learn(self, agent: int, epoch: int) -> None:
        """The accesses up to `epoch` of an agent that works for this one are complete.

        Generic writes still need a proxy fence.
        """
        rows = slice(None) if self.clocks.is_async[agent] else PLAIN
        self.times[rows, agent] = np.maximum(self.times[rows, agent], epoch)

    def fence_proxy(self, *, covers_own: bool = True) -> None:
        """fence.proxy.async: all generic writes known here become visible to the async proxy.

        Those of this agent only if `covers_own`: a lane's fence does not cover what other lanes wrote before they met.
        """
        own = self.times[FENCED, self.own]  # a copy
        np.maximum(self.times[FENCED], self.times[0], out=self.times[FENCED])
        if not covers_own:
            self.times[FENCED, self.own] = own
        self.times[PLAIN, self.agent] += 1


class Shadow:
    """Per cell of a memory: was it written, by whom and when; who read it and when; is a copy on its way into it.

    Atomics of the generic proxy, which nothing need order among each other, are neither reads nor writes here.

    `cells` are a slice or an array of cell numbers. Every check raises `Fault`; `address(cell)` gives the address to
    report.
    """

    def __init__(self, clocks: Clocks, size: int, name: str, address: Callable[[int], int]):
        self.clocks = clocks
        self.name = name
        self.address = address
        self.written = np.zeros(size, bool)
        self.write_agent = np.zeros(size, np.int16)
        self.write_epoch = np.zeros(size, np.int32)
        self.busy = np.zeros(size, np.uint8)
        self.read_epoch = np.zeros((size, 4), np.int32)
        self.atomic_epoch: npt.NDArray[np.int32] | None = None  # columns as of `read_epoch`; None before the first
        self._column_of_agent: dict[int, int] = {}
        self._agents = np.zeros(4, np.int64)

    def check_read(self, cells: Cells, times: Times, *, by_async: bool, what: str) -> None:
        """The cells are written, by writes that happened before.

        Those of the generic proxy also fenced if `by_async`.
        """
        self.check_free(cells, what)
        if not self.written[cells].all():
            raise self._fault(
                "uninitialised", f"{what} reads {self.name} that nothing wrote", cells, ~self.written[cells]
            )
        self._check_writes_happened(cells, times, by_async, what)
        self._check_writes_are_readable(cells, times, what)
        self._check_atomics_happened(cells, times, what)

    def mark_read(self, cells: Cells, agent: int, epoch: int) -> None:
        """Agent `agent` reads the cells at `epoch`."""
        column = self._column(agent)  # may replace `read_epoch`
        self.read_epoch[cells, column] = epoch

    def check_atomic(self, cells: Cells, times: Times, *, what: str) -> None:
        """The cells are written, and what was no atomic happened before."""
        self.check_free(cells, what)
        if not self.written[cells].all():
            raise self._fault(
                "uninitialised", f"{what} reads {self.name} that nothing wrote", cells, ~self.written[cells]
            )
        self._check_writes_happened(cells, times, False, what)
        self._check_writes_are_readable(cells, times, what)
        self._check_reads_happened(cells, times, what)

    def mark_atomic(self, cells: Cells, agent: int, epoch: int) -> None:
        """Agent `agent` changed the cells at `epoch` by an atomic."""
        if self.atomic_epoch is None:
            self.atomic_epoch = np.zeros_like(self.read_epoch)
        column = self._column(agent)
        self.atomic_epoch[cells, column] = epoch

    def check_write(self, cells: Cells, times: Times, *, what: str) -> None:
        """Earlier reads and writes of the cells happened before."""
        self.check_free(cells, what)
        self._check_writes_happened(cells, times, False, what)
        self._check_reads_happened(cells, times, what)
        self._check_atomics_happened(cells, times, what)

    def mark_write(self, cells: Cells, agent: int, epoch: int) -> None:
        """Agent `agent` wrote the cells at `epoch`."""
        self.written[cells] = True
        self.write_agent[cells] = agent
        self.write_epoch[cells] = epoch

    def begin_flight(self, cells: Cells) -> None:
        """A copy into the cells is under way: no access is allowed until `end_flight`."""
        self.busy[cells] = IN_FLIGHT

    def end_flight(self, cells: Cells) -> None:
        """The copy has landed."""
        self.busy[cells] = FREE

    def check_free(self, cells: Cells, what: str) -> None:
        """No copy is on its way into the cells, and no mbarrier lives there."""
        busy = self.busy[cells]
        if busy.any():
            flying = busy == IN_FLIGHT
            if flying.any():
                raise self._fault(
                    "in flight", f"{what} touches {self.name} that a copy in flight will write", cells, flying
                )
            raise self._fault("mbarrier", f"{what} touches {self.name} that holds a live mbarrier", cells, busy != FREE)

    def _check_writes_happened(self, cells: Cells, times: Times, by_async: bool, what: str) -> None:
        agents, epochs = self.write_agent[cells], self.write_epoch[cells]
        late = epochs > times[0][agents]
        if late.any():
            writer = self.clocks.names[int(agents[late].flat[0])]
            raise self._fault("race", f"{what} and the write by {writer} to {self.name} are not ordered", cells, late)
        if by_async:
            unfenced = (epochs > times[FENCED][agents]) & ~self.clocks.is_async[agents]
            if unfenced.any():
                writer = self.clocks.names[int(agents[unfenced].flat[0])]
                message = f"{what} reads {self.name} written by {writer} without fence.proxy.async after the write"
                raise self._fault("proxy fence", message, cells, unfenced)

    def _check_writes_are_readable(self, cells: Cells, times: Times, what: str) -> None:
        if self.clocks.is_strict:
            agents, epochs = self.write_agent[cells], self.write_epoch[cells]
            late = epochs > times[READABLE][agents]
            if late.any():
                writer = self.clocks.names[int(agents[late].flat[0])]
                message = f"{what} reads {self.name} written by {writer}, whose arrival had the scope of one CTA"
                raise self._fault("race", message, cells, late)

    def _check_reads_happened(self, cells: Cells, times: Times, what: str) -> None:
        used = len(self._column_of_agent)
        if used:
            late = self.read_epoch[cells, :used] > times[0, self._agents[:used]]
            if late.any():
                message = f"{what} overwrites {self.name} that {self._agent_of(late)} may still read"
                raise self._fault("race", message, cells, late.any(axis=-1))

    def _check_atomics_happened(self, cells: Cells, times: Times, what: str) -> None:
        if self.atomic_epoch is None:
            return
        used = len(self._column_of_agent)
        late = self.atomic_epoch[cells, :used] > times[0, self._agents[:used]]
        if late.any():
            message = f"{what} and the atomic by {self._agent_of(late)} on {self.name} are not ordered"
            raise self._fault("race", message, cells, late.any(axis=-1))

    def _agent_of(self, late: npt.NDArray[np.bool_]) -> str:
        return self.clocks.names[int(self._agents[int(np.argwhere(late)[0][-1])])]

    def _column(self, agent: int) -> int:
        column = self._column_of_agent.get(agent)
        return self._new_column(agent) if column is None else column

    def _new_column(self, agent: int) -> int:
        column = len(self._column_of_agent)
        if column == self.read_epoch.shape[1]:
            self.read_epoch = np.concatenate([self.read_epoch, np.zeros_like(self.read_epoch)], axis=1)
            self._agents = np.concatenate([self._agents, np.zeros_like(self._agents)])
            if self.atomic_epoch is not None:
                self.atomic_epoch = np.concatenate([self.atomic_epoch, np.zeros_like(self.atomic_epoch)], axis=1)
        self._column_of_agent[agent] = column
        self._agents[column] = agent
        return column

    def _fault(self, check: Check, message: str, cells: Cells, bad: npt.NDArray[np.bool_]) -> Fault:
        numbers = np.arange(len(self.written))[cells] if isinstance(cells, slice) else np.asarray(cells)
        return Fault(check, message, address=self.address(int(numbers[bad].flat[0])))
