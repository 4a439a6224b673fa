"""Times every peer on a cell, in rounds that take turns, so that a card that slows down slows all of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np

from jax_fa4.bench.cells import Cell, Direction
from jax_fa4.bench.clock import Clock, Sample
from jax_fa4.bench.operands import random_operands
from jax_fa4.bench.peers import DETERMINISTIC, OURS, Calls, Peer, reason_of

__all__ = ["Figure", "Row", "time_cell"]

SAMPLE_SECONDS = 0.02  # of one peer in one round
MOST_CALLS = 40  # of a sample
AGREEMENT: dict[Direction, float] = {"forward": 0.02, "backward": 0.03}  # of bfloat16: relative root mean squares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A peer's time and speed; spread is that of all its times: the middle half's width over the median."""

    seconds: float
    speed: float  # in the cell's unit
    spread: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One direction of a cell, by name of peer."""

    cell: Cell
    direction: Direction
    figures: dict[str, Figure]
    refused: dict[str, str]  # with the reason

    @property
    def best_peer(self) -> str | None:
        """The fastest beside jax_fa4, in whatever mode."""
        others = [name for name in self.figures if name not in (OURS, DETERMINISTIC)]
        return max(others, key=lambda name: self.figures[name].speed, default=None)

    @property
    def ratio(self) -> float | None:
        """Speed of jax_fa4 over that of the best peer; None where one of them has none."""
        if self.best_peer is None or OURS not in self.figures:
            return None
        return self.figures[OURS].speed / self.figures[self.best_peer].speed


Refused = dict[Direction, dict[str, str]]  # by name of peer, with the reason


def time_cell(cell: Cell, peers: Sequence[Peer], clock: Clock, rounds: int) -> list[Row]:
    """A row for each direction. With 0 rounds everything is compiled and run once, and there are no figures."""
    ready, refused = _prepare(cell, peers)
    samples = [
        Sample(name, direction, calls, _repeats(calls, direction) if rounds else 1)
        for direction in cell.directions
        for name, calls in ready.items()
        if direction in calls.run
    ]
    order = [sample for turn in range(rounds) for sample in _rotated(samples, turn)]
    times: dict[Direction, dict[str, list[float]]] = {direction: {} for direction in cell.directions}
    for sample, seconds in zip(order, clock.seconds(order) if order else (), strict=True):
        times[sample.direction].setdefault(sample.peer, []).extend(seconds)
    for direction, of_peers in times.items():
        for name in [name for name, seconds in of_peers.items() if not seconds or not all(seconds)]:
            del of_peers[name]
            refused[direction][name] = f"the {clock.name} clock did not see it"
    return [
        Row(
            cell=cell,
            direction=direction,
            figures={name: _figure(cell, direction, seconds) for name, seconds in of_peers.items()},
            refused=refused[direction],
        )
        for direction, of_peers in times.items()
    ]


def _prepare(cell: Cell, peers: Sequence[Peer]) -> tuple[dict[str, Calls], Refused]:
    """Compiles; a peer that fails leaves the others to be timed."""
    operands = random_operands(cell)
    ready: dict[str, Calls] = {}
    refused: Refused = {direction: {} for direction in cell.directions}
    for peer in peers:
        try:
            ready[peer.name] = peer.calls(cell, operands)
        except Exception as error:  # whatever a peer raises is its reason
            for reasons in refused.values():
                reasons[peer.name] = reason_of(error)
    for name, calls in ready.items():
        for direction, reason in calls.refused.items():
            refused[direction][name] = reason
    _remove_wrong(ready, refused)
    return ready, refused


def _rotated(samples: list[Sample], turn: int) -> list[Sample]:
    """Each turn begins with another one. Every second goes backwards: a card stays hot from the one before."""
    first = turn % max(len(samples), 1)
    order = samples[::-1] if turn % 2 else samples
    return order[first:] + order[:first]


def _remove_wrong(ready: dict[str, Calls], refused: Refused) -> None:
    """A peer whose results differ from ours computes something else: its time would say nothing."""
    for direction, reasons in refused.items():
        expected = ready[OURS].seen.get(direction) if OURS in ready else None
        if expected is None:
            continue
        scale = np.sqrt(np.mean(expected**2))
        for name, calls in ready.items():
            if name == OURS or direction not in calls.run:
                continue
            difference = np.sqrt(np.mean((calls.seen[direction] - expected) ** 2)) / scale
            if not difference <= AGREEMENT[direction]:
                del calls.run[direction]
                reasons[name] = f"its results differ from those of jax_fa4 by {difference:.2g} of their size"


def _repeats(calls: Calls, direction: Direction) -> int:
    start = time.perf_counter()
    calls.wait(calls.run[direction]())
    return int(np.clip(SAMPLE_SECONDS / (time.perf_counter() - start), 1, MOST_CALLS))


def _figure(cell: Cell, direction: Direction, times: list[float]) -> Figure:
    seconds = statistics.median(times)
    low, high = np.quantile(times, (0.25, 0.75))
    speed = cell.work(direction) / seconds / 1e12
    return Figure(seconds=seconds, speed=speed, spread=float(high - low) / seconds)
