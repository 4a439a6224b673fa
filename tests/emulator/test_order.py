"""Vector clocks and shadow cells, without a kernel around them."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.order import Clock, Clocks, Shadow

CELLS = np.array([3, 4, 5])


@pytest.fixture
def clocks():
    return Clocks(64)


@pytest.fixture
def shadow(clocks):
    return Shadow(clocks, 16, "the memory", lambda cell: 0x100 + 4 * cell)


def write(shadow: Shadow, clock: Clock, cells=CELLS) -> None:
    shadow.check_write(cells, clock.times, what="the writer")
    shadow.mark_write(cells, clock.agent, clock.epoch)


def read(shadow: Shadow, clock: Clock, cells=CELLS, *, by_async: bool = False) -> None:
    shadow.check_read(cells, clock.times, by_async=by_async, what="the reader")
    shadow.mark_read(cells, clock.agent, clock.epoch)


def test_an_agent_sees_its_own_writes(clocks, shadow):
    a = Clock(clocks, "a")
    write(shadow, a)
    read(shadow, a)


def change(shadow: Shadow, clock: Clock, cells=CELLS) -> None:
    shadow.check_atomic(cells, clock.times, what="the atomic")
    shadow.mark_atomic(cells, clock.agent, clock.epoch)


def test_atomics_need_no_order_among_each_other(clocks, shadow):
    a, b, c = (Clock(clocks, name) for name in "abc")
    write(shadow, a)
    for other in (b, c):
        other.join(a.release())
        change(shadow, other)
    a.join(b.release())
    with pytest.raises(Fault, match="the reader and the atomic by c on the memory are not ordered"):
        read(shadow, a)
    with pytest.raises(Fault, match="the writer and the atomic by c on the memory are not ordered"):
        write(shadow, a)
    a.join(c.release())
    read(shadow, a)
    write(shadow, a)


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (write, "the atomic and the write by a to the memory are not ordered"),
        (read, "the atomic overwrites the memory that a may still read"),
    ],
)
def test_an_atomic_follows_other_accesses(clocks, shadow, access, message):
    a, b = Clock(clocks, "a"), Clock(clocks, "b")
    write(shadow, a)
    b.join(a.release())
    access(shadow, a)
    with pytest.raises(Fault, match=message):
        change(shadow, b)
    b.join(a.release())
    change(shadow, b)


def test_an_atomic_finds_something(clocks, shadow):
    with pytest.raises(Fault, match="the atomic reads the memory that nothing wrote"):
        change(shadow, Clock(clocks, "a"))


def test_a_release_and_a_join_order(clocks, shadow):
    a, b = Clock(clocks, "a"), Clock(clocks, "b")
    write(shadow, a)
    b.join(a.release())
    read(shadow, b)


def test_ordering_is_transitive(clocks, shadow):
    a, b, c = (Clock(clocks, name) for name in "abc")
    write(shadow, a)
    b.join(a.release())
    c.join(b.release())
    read(shadow, c)


def test_what_follows_a_release_is_not_covered(clocks, shadow):
    a, b = Clock(clocks, "a"), Clock(clocks, "b")
    times = a.release()
    write(shadow, a)
    b.join(times)
    with pytest.raises(Fault, match="the reader and the write by a to the memory are not ordered") as caught:
        read(shadow, b)
    assert caught.value.check == "race"
    assert caught.value.address == 0x100 + 4 * 3


def test_reads_must_be_ordered_before_an_overwrite(clocks, shadow):
    a, b, c = (Clock(clocks, name) for name in "abc")
    write(shadow, a)
    times = a.release()
    b.join(times)
    c.join(times)
    read(shadow, b)
    read(shadow, c, CELLS[:1])
    a.join(c.release())
    with pytest.raises(Fault, match="b may still read"):
        write(shadow, a)
    a.join(b.release())
    write(shadow, a)


def test_many_readers_are_all_remembered(clocks, shadow):
    a = Clock(clocks, "a")
    readers = [Clock(clocks, f"reader {i}") for i in range(9)]
    write(shadow, a)
    times = a.release()
    for reader in readers:
        reader.join(times)
        read(shadow, reader)
    for reader in readers[1:]:
        a.join(reader.release())
    with pytest.raises(Fault, match="reader 0 may still read"):
        write(shadow, a)


def test_unwritten_cells_are_named(clocks, shadow):
    a = Clock(clocks, "a")
    write(shadow, a, CELLS[:2])
    with pytest.raises(Fault, match="the memory that nothing wrote") as caught:
        read(shadow, a)
    assert caught.value.check == "uninitialised"
    assert caught.value.address == 0x100 + 4 * 5


def test_cells_in_flight_may_not_be_touched(clocks, shadow):
    a = Clock(clocks, "a")
    shadow.begin_flight(slice(0, 4))
    with pytest.raises(Fault) as caught:
        write(shadow, a)
    assert caught.value.check == "in flight"
    shadow.end_flight(slice(0, 4))
    write(shadow, a)


def test_the_async_proxy_needs_a_fence_after_the_write_and_before_the_release(clocks, shadow):
    a, b = Clock(clocks, "a"), Clock(clocks, "b")
    a.fence_proxy()
    write(shadow, a)
    b.join(a.release())
    b.fence_proxy()  # the reader's fence covers what was ordered before it, too
    read(shadow, b, by_async=True)
    write(shadow, b)
    with pytest.raises(Fault) as caught:
        read(shadow, b, by_async=True)
    assert caught.value.check == "proxy fence"
    b.fence_proxy()
    read(shadow, b, by_async=True)


def test_writes_of_the_async_proxy_need_no_fence(clocks, shadow):
    a = Clock(clocks, "a")
    copies = clocks.agent("copies", is_async=True)
    shadow.mark_write(CELLS, copies, 1)
    with pytest.raises(Fault, match="the write by copies"):
        read(shadow, a, by_async=True)
    a.learn(copies, 1)
    read(shadow, a, by_async=True)


def test_agents_are_limited():
    clocks = Clocks(2)
    clocks.agent("one", is_async=False)
    with pytest.raises(Fault, match="more than 2 agents"):
        clocks.agent("two", is_async=False)
