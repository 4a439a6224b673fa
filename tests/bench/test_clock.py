"""What is made of a profile."""

import pytest

from jax_fa4.bench.clock import Busy, Event, HostClock, Sample, assign, busy_behind_flushes
from jax_fa4.bench.peers import Calls


def calls(flush="flush", run=None):
    return Calls({"forward": run or (lambda: None)}, {}, lambda: None, flush, lambda result: None, {})


def busy(*events):
    return [found.nanoseconds for found in busy_behind_flushes([Event(*event) for event in events], {"flush"})]


def test_a_call_takes_what_its_kernels_take_and_not_the_gaps():
    assert busy(("flush_0", 0, 10), ("a", 12, 20), ("b", 30, 31), ("flush_0", 40, 50), ("a", 50, 57)) == [9, 7]


def test_kernels_that_overlap_count_once():
    assert busy(("flush", 0, 10), ("a", 12, 20), ("b", 15, 25), ("c", 16, 18)) == [13]


def test_what_begins_under_the_flush_counts_from_its_end():
    assert busy(("flush", 0, 10), ("a", 8, 14)) == [4]


def test_events_come_in_any_order_and_those_before_the_first_flush_are_not_a_call():
    assert busy(("a", 50, 57), ("flush", 40, 50), ("warm_up", 0, 30)) == [7]


def test_times_go_to_the_samples_in_their_order():
    samples = [
        Sample("a", "forward", calls(), 2),
        Sample("b", "forward", calls("other"), 1),
        *[Sample("a", "forward", calls(), 1)],
    ]
    found = [Busy("flush", 1e9), Busy("flush", 2e9), Busy("other", 3e9), Busy("flush", 4e9)]
    assert assign(samples, found) == [pytest.approx([1, 2]), pytest.approx([3]), pytest.approx([4])]


def test_a_peer_with_a_missing_flush_is_not_timed_and_the_others_are():
    samples = [Sample("a", "forward", calls(), 2), Sample("b", "forward", calls("other"), 2)]
    found = [Busy("other", 1e9), Busy("flush", 1e9), Busy("flush", 2e9)]
    assert assign(samples, found) == [pytest.approx([1, 2]), []]


def test_the_host_clock_runs_every_repeat_and_waits():
    log = []
    sample = Sample(
        "a", "forward", calls(run=lambda: log.append("call"))._replace(wait=lambda r: log.append("wait")), 3
    )
    (seconds,) = HostClock().seconds([sample])
    assert log == ["call", "call", "call", "wait"]
    assert 0 < seconds[0] < 1
