"""A peer that runs nothing, and a clock that knows how fast each is."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_fa4.bench.peers import Calls


@dataclasses.dataclass
class StandIn:
    """Refuses what it is told to; its gradients are ten times its output."""

    name: str
    out: tuple[float, ...] = (1.0, 2.0)
    gradient: tuple[float, ...] | None = None
    missing: str | None = None
    fails: str | None = None
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def why_missing(self):
        return self.missing

    def version(self):
        return "1.0"

    def calls(self, cell, x):
        if self.fails:
            raise ValueError(self.fails)
        run = {direction: lambda: None for direction in cell.directions if direction not in self.refused}
        refused = {direction: why for direction, why in self.refused.items() if direction in cell.directions}
        seen = {"forward": np.array(self.out), "backward": 10 * np.array(self.gradient or self.out)}
        return Calls(run, refused, lambda: None, "flush", lambda result: None, seen)


class KnownClock:
    """Two times a sample; a peer without one is not seen."""

    name = "known"

    def __init__(self, **microseconds):
        self.microseconds = microseconds
        self.order = []

    def seconds(self, samples):
        self.order += [(sample.peer, sample.direction) for sample in samples]
        return [
            [self.microseconds[sample.peer] * 1e-6 * noise for noise in (0.99, 1.01)]
            if sample.peer in self.microseconds
            else []
            for sample in samples
        ]
