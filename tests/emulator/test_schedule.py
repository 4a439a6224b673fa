"""When asynchronous operations complete."""

from __future__ import annotations

import random

import pytest

from jax_fa4.emulator.errors import ExecutionError, Fault, Place
from jax_fa4.emulator.schedule import AsyncOp, AsyncQueues


def operation(log: list[str], name: str, queue=None, steps: int = 1) -> AsyncOp:
    def step(index: int):
        return lambda: log.append(f"{name}{index}" if steps > 1 else name)

    return AsyncOp(steps=tuple(step(index) for index in range(steps)), what=name, queue=queue)


def queues(completion) -> AsyncQueues:
    return AsyncQueues(completion, random.Random(0))


def test_early_operations_complete_when_issued():
    log: list[str] = []
    found = queues("early")
    op = found.issue(operation(log, "a", steps=2))
    assert log == ["a0", "a1"]
    assert op.is_complete
    assert not found


def test_late_operations_wait_until_they_are_forced():
    log: list[str] = []
    found = queues("late")
    a, b = found.issue(operation(log, "a")), found.issue(operation(log, "b"))
    found.tick()
    assert log == []
    assert found.pending() == ["a", "b"]
    found.force()
    assert log == ["a"]
    assert (a.is_complete, b.is_complete) == (True, False)


def test_operations_of_a_queue_complete_in_order():
    log: list[str] = []
    found = queues("random")
    for name in "abcd":
        found.issue(operation(log, name, queue="q"))
    while found:
        found.force()
    assert log == list("abcd")


def test_draining_completes_what_comes_before():
    log: list[str] = []
    found = queues("late")
    ops = [found.issue(operation(log, name, queue="q")) for name in "abc"]
    found.issue(operation(log, "other"))
    found.drain(ops[1])
    assert log == ["a", "b"]


def test_random_completion_depends_on_the_seed_only():
    def order(seed: int) -> list[str]:
        log: list[str] = []
        found = AsyncQueues("random", random.Random(seed))
        for name in "abcdefgh":
            found.issue(operation(log, name))
        while found:
            found.tick()
        return log

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_faults_of_an_operation_are_blamed_on_its_issuer():
    def fail() -> None:
        raise Fault("bounds", "outside")

    place = Place(kernel="k", line=7, text="copy", ctaid=(0, 0, 0), warp=3)
    op = AsyncOp(steps=(fail,), what="a copy", blame=lambda error: ExecutionError(place, error))
    with pytest.raises(ExecutionError, match=r"bounds: outside \(k, line 7: `copy`, CTA \(0, 0, 0\), warp 3\)"):
        queues("early").issue(op)
