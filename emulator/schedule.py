"""Who runs next, which asynchronous operation completes now, and the table of waiters when nothing can go on.

Waiting: an instruction handler returns a `Wait`; the fragment of the warp that executed it sleeps until `ready()`, then
`then()` runs once and execution goes on behind the instruction. `expire` marks a wait that may end unfulfilled
(`mbarrier.try_wait`).

Asynchrony: a handler issues an `AsyncOp` with `AsyncQueues.issue` and returns. Each of the operation's steps runs
later, at a moment that the completion mode picks:
  early:  at once, or as soon as the operations before it in its queue are done;
  late:   only when no warp can run otherwise, oldest first; what a kernel fails to wait for has then not happened yet;
  random: drawn from the launch's seed at each turn of the scheduler.
Operations with the same `queue` complete in issue order (wgmma of a warpgroup, tcgen05 of a CTA pair, bulk groups of a
thread); those with queue None in any order (tile loads).
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Literal

from jax_fa4.emulator.errors import Deadlock, EmulatorError

if TYPE_CHECKING:
    from jax_fa4.emulator.run import Machine
    from jax_fa4.emulator.state import Fragment, Warp

__all__ = ["POLL", "AsyncOp", "AsyncQueues", "Completion", "Scheduler", "Wait"]

Completion = Literal["early", "late", "random"]


@dataclasses.dataclass(slots=True)
class Wait:
    """Why a fragment sleeps.

    Attributes:
      what: gives the row of the deadlock table, e.g. "mbarrier 0x400 phase 1: 0 of 1 arrivals, 16384 bytes missing".
      ready: whether the fragment may go on; called often, so it should only compare.
      then: runs once when `ready()` has become true.
      on: a short name of what is waited for, for timelines; the instruction's if empty.
      expire: runs instead of `then` if the wait is given up because nothing else can run; None if it must not be given
        up.
    """

    what: Callable[[], str]
    ready: Callable[[], bool]
    then: Callable[[], None] | None = None
    expire: Callable[[], None] | None = None
    on: str = ""


POLL = Wait(what=lambda: "polls", ready=lambda: True)
"""Returned by an instruction that programs spin on: let others run before this warp goes on."""


@dataclasses.dataclass(slots=True, eq=False)
class AsyncOp:
    """An operation that the hardware does on its own, in one or more steps that may lie apart in time.

    A bulk store has two: read shared memory, then write global memory. `done` counts the steps that have run.
    """

    steps: tuple[Callable[[], None], ...]
    what: str
    queue: Hashable | None = None
    blame: Callable[[Exception], EmulatorError] | None = None
    done: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all steps have run."""
        return self.done == len(self.steps)


class AsyncQueues:
    """All operations in flight in a launch."""

    def __init__(self, completion: Completion, rng: random.Random):
        self._completion = completion
        self._rng = rng
        self._queues: dict[Hashable, deque[AsyncOp]] = {}
        self.issued = 0

    def issue(self, op: AsyncOp) -> AsyncOp:
        """Start an operation. In mode "early" it completes inside this call."""
        self.issued += 1
        key = op if op.queue is None else op.queue
        self._queues.setdefault(key, deque()).append(op)
        if self._completion == "early":
            while key in self._queues:
                self._step(key)
        return op

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def tick(self) -> None:
        """A moment of the scheduler's in which operations may complete without need: only in mode "random"."""
        if self._completion == "random":
            while self._queues and self._rng.random() < 0.5:
                self._step(self._rng.choice(list(self._queues)))

    def force(self) -> None:
        """No warp can run: one step of one operation happens."""
        self._step(self._rng.choice(list(self._queues)) if self._completion == "random" else next(iter(self._queues)))

    def drain(self, op: AsyncOp) -> None:
        """Complete `op` now, and with it what precedes it in its queue."""
        while not op.is_complete:
            self._step(op if op.queue is None else op.queue)

    def pending(self) -> list[str]:
        """Descriptions of what is in flight, for the deadlock table."""
        return [op.what for queue in self._queues.values() for op in queue]

    def _step(self, key: Hashable) -> None:
        queue = self._queues[key]
        op = queue[0]
        step = op.steps[op.done]
        op.done += 1
        if op.is_complete:
            queue.popleft()
            if not queue:
                del self._queues[key]
        try:
            step()
        except EmulatorError as error:
            raise error if op.blame is None else op.blame(error) from error


SLICE = 1 << 14  # steps a warp may take in its turn, round robin: until it waits
RANDOM_SLICE = 200
MAX_IDLE_TURNS = 200  # turns in which warps only polled and nothing changed


class Scheduler:
    """Gives warps their turns until all have exited."""

    def __init__(self, machine: Machine, advance: Callable[[Machine, Warp, Fragment, int], None]):
        self._machine = machine
        self._advance = advance
        self._idle = 0
        self._progress = -1

    def run(self, warps: list[Warp]) -> None:
        """Run to the end. Raises `Deadlock` when no warp can go on and nothing is in flight."""
        queues, timeline = self._machine.queues, self._machine.timeline
        while True:
            if timeline is not None:
                timeline.turn += 1
            warps = [warp for warp in warps if warp.fragments]
            if not warps:
                break
            has_run = False
            for warp in self._in_order(warps):
                has_run |= self._turn(warp)
            queues.tick()
            self._judge(has_run, warps)
        while queues:
            queues.force()

    def _in_order(self, warps: list[Warp]) -> list[Warp]:
        if self._machine.options.order == "random":
            warps = self._machine.rng.sample(warps, len(warps))
        return warps

    def _turn(self, warp: Warp) -> bool:
        """Let each fragment of the warp run a slice; whether one did something other than poll."""
        is_random = self._machine.options.order == "random"
        has_run = False
        for fragment in tuple(warp.fragments):
            if fragment.wait is not None:
                if not fragment.wait.ready():
                    continue
                self._wake(fragment, warp)
            if fragment not in warp.fragments:
                continue
            budget = self._machine.rng.randint(1, RANDOM_SLICE) if is_random else SLICE
            polled = fragment.polling
            fragment.polling = False
            before = self._machine.instructions_of(warp)
            self._advance(self._machine, warp, fragment, budget)
            self._machine.on_turn(warp, fragment, before)
            if fragment in warp.fragments and fragment.wait is None:
                self._charge(warp, budget)
            waits_again = fragment.polling or (fragment.wait is not None and fragment.wait.expire is not None)
            has_run |= not (polled and waits_again)
        return has_run

    def _charge(self, warp: Warp, steps: int) -> None:
        """A warp has used up a slice or polled: in the end a loop that never ends is found."""
        warp.steps += steps
        if warp.steps > self._machine.options.max_steps:
            raise Deadlock(
                f"warp {warp.index} of CTA {warp.cta.ctaid} does not end: {warp.steps} steps\n"
                + _table(self._machine, [(warp, fragment) for fragment in warp.fragments])
            )

    def _wake(self, fragment: Fragment, warp: Warp) -> None:
        wait = fragment.wait
        assert wait is not None  # only sleeping fragments are woken
        fragment.wait = None
        self._machine.on_wake(warp, fragment, wait)
        if wait.then is not None:
            self._machine.blamed(warp, fragment.waiting_at, wait.then)

    def _judge(self, has_run: bool, warps: list[Warp]) -> None:
        """If nobody could go on: let time pass, or find that it cannot help."""
        machine = self._machine
        if has_run or machine.progress != self._progress:
            self._progress = machine.progress
            if has_run:
                self._idle = 0
                return
        if machine.queues:
            machine.queues.force()
            return
        fragments = [(warp, fragment) for warp in warps for fragment in warp.fragments]
        if any(fragment.wait is not None and fragment.wait.ready() for _, fragment in fragments):
            return
        self._idle += 1
        expiring = [
            fragment for _, fragment in fragments if fragment.wait is not None and fragment.wait.expire is not None
        ]
        polling = any(fragment.wait is None for _, fragment in fragments)
        if (expiring or polling) and self._idle < MAX_IDLE_TURNS:
            for fragment in expiring:
                self._expire(fragment)
            return
        raise Deadlock(_table(machine, fragments))

    def _expire(self, fragment: Fragment) -> None:
        wait = fragment.wait
        assert wait is not None and wait.expire is not None  # noqa: PT018 (one fact: it is a wait that can be given up)
        wait.expire()
        fragment.wait = None
        fragment.polling = True  # to wait for the same again is no progress


def _table(machine: Machine, fragments: list[tuple[Warp, Fragment]]) -> str:
    rows = ["no warp can go on and nothing is in flight:"]
    for warp, fragment in fragments:
        what = "polls" if fragment.wait is None else fragment.wait.what()
        line = machine.program.steps[fragment.pc].instructions[0].line
        if fragment.waiting_at is not None and fragment.wait is not None:
            line = fragment.waiting_at.instructions[0].line
        lanes = "" if fragment.lanes.full else f" lanes 0x{fragment.lanes.bits:08x}"
        rows.append(f"  CTA {warp.cta.ctaid} warp {warp.index}{lanes}, line {line}: waits for {what}")
    for cta in {warp.cta for warp, _ in fragments}:
        rows += [f"  CTA {cta.ctaid}: {text}" for text in cta.named_barriers.open_rounds()]
    return "\n".join(rows)
