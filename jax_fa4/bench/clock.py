"""How long calls take: on a GPU the time that their kernels ran, elsewhere the time that passed."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax

from jax_fa4.bench.cells import Direction
from jax_fa4.bench.peers import Calls

__all__ = ["Busy", "Clock", "DeviceClock", "Event", "HostClock", "Sample", "assign", "busy_behind_flushes"]

NANOSECOND = 1e-9


class Sample(NamedTuple):
    """Some equal calls of one peer, one behind the other."""

    peer: str
    direction: Direction
    calls: Calls
    repeats: int


class Clock(Protocol):
    """Times samples in the order given."""

    name: str

    def seconds(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of each sample, times of a call, or none if it could not be timed."""


class HostClock:
    """Wall time of a sample over its calls. Includes what the host needs, if the device waits for it."""

    name = "host"

    def seconds(self, samples: Sequence[Sample]) -> list[list[float]]:
        """One time a sample."""
        return [[self._seconds_a_call(sample)] for sample in samples]

    def _seconds_a_call(self, sample: Sample) -> float:
        call = sample.calls.run[sample.direction]
        start = time.perf_counter()
        for _ in range(sample.repeats):
            result = call()
        sample.calls.wait(result)
        return (time.perf_counter() - start) / sample.repeats


class Event(NamedTuple):
    """A kernel or copy that ran on the device, in nanoseconds."""

    name: str
    start: float
    end: float


class DeviceClock:
    """Time in which at least one kernel or copy of a call ran, from NVIDIA's profiler, with a cold L2."""

    name = "device"

    def seconds(self, samples: Sequence[Sample]) -> list[list[float]]:
        """A time for each call of a sample; none for a peer of whose flushes the profiler missed some."""
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                for sample in samples:
                    call = sample.calls.run[sample.direction]
                    for _ in range(sample.repeats):
                        sample.calls.flush()
                        result = call()
                    sample.calls.wait(result)
            (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
            events = list(_events(trace))
        return assign(samples, busy_behind_flushes(events, {sample.calls.flush_kernel for sample in samples}))


def _events(trace: pathlib.Path) -> Iterator[Event]:
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if (line.name or "").startswith("Stream"):  # other lines show the same kernels in groups
                yield from (Event(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events)


class Busy(NamedTuple):
    """What ran behind a flush, until the next."""

    flush: str
    nanoseconds: float


def busy_behind_flushes(events: Iterable[Event], flushes: Collection[str]) -> list[Busy]:
    """In the order of their start; what overlaps counts once."""
    found: list[Busy] = []
    covered_until = 0.0
    for event in sorted(events, key=lambda event: event.start):
        flush = next((flush for flush in flushes if flush in event.name), None)
        if flush is not None:
            found.append(Busy(flush, 0.0))
            covered_until = event.end
        elif found:
            more = max(event.end - max(event.start, covered_until), 0.0)
            found[-1] = found[-1]._replace(nanoseconds=found[-1].nanoseconds + more)
            covered_until = max(covered_until, event.end)
    return found


def assign(samples: Sequence[Sample], found: Sequence[Busy]) -> list[list[float]]:
    """Seconds of each sample's calls. Each call had a flush before it, and samples did not overlap."""
    expected = Counter[str]()
    for sample in samples:
        expected[sample.calls.flush_kernel] += sample.repeats
    seen = Counter(busy.flush for busy in found)
    queues = {flush: iter([busy for busy in found if busy.flush == flush]) for flush in expected}
    return [
        [next(queues[flush]).nanoseconds * NANOSECOND for _ in range(sample.repeats)]
        if seen[flush := sample.calls.flush_kernel] == expected[flush]
        else []
        for sample in samples
    ]
