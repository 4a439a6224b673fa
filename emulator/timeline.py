"""When warps ran and for what they waited: events in turns of the scheduler, and a picture of them.

There are no cycles here. A turn is as long as the most instructions that one warp executed in it, so that warps which
run in the same turn stand above each other.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_fa4.emulator.program import Step
    from jax_fa4.emulator.state import Warp

__all__ = ["Slice", "Span", "Timeline"]

WarpKey = tuple[tuple[int, int, int], int]  # ctaid, index in the CTA


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A warp executed `instructions` in turn `turn`."""

    warp: WarpKey
    turn: int
    instructions: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A warp waited for `on` at `line` of the PTX text, from turn `first` to turn `last`."""

    warp: WarpKey
    on: str
    line: int
    first: int
    last: int


class Timeline:
    """What the warps of a launch did, turn by turn."""

    def __init__(self) -> None:
        self.turn = 0
        self.slices: list[Slice] = []
        self.spans: list[Span] = []
        self._asleep: dict[int, int] = {}

    def ran(self, warp: Warp, instructions: int) -> None:
        """A warp has had its turn."""
        if instructions:
            self.slices.append(Slice((warp.cta.ctaid, warp.index), self.turn, instructions))

    def sleeps(self, wait: object) -> None:
        """A wait begins now."""
        self._asleep[id(wait)] = self.turn

    def wakes(self, warp: Warp, wait: object, on: str, step: Step) -> None:
        """A wait is over."""
        first = self._asleep.pop(id(wait), self.turn)
        line = step.instructions[0].line
        self.spans.append(Span((warp.cta.ctaid, warp.index), on, line, first, self.turn))

    def starts(self) -> list[int]:
        """Where each turn begins, in instructions; one more entry for the end."""
        lengths = [0] * (self.turn + 1)
        for item in self.slices:
            lengths[item.turn] = max(lengths[item.turn], item.instructions)
        return list(itertools.accumulate(lengths, initial=0))

    def draw(self, path: str, *, names: dict[str, str] | None = None) -> None:
        """Write a picture (matplotlib): a row a warp, grey where it ran, coloured by what it waited for.

        `names` renames what is waited for, e.g. {"mbarrier 0x400": "q.full"}.
        """
        from matplotlib.figure import Figure

        starts, names = self.starts(), names or {}
        warps = {item.warp for item in self.slices} | {span.warp for span in self.spans}
        rows = {key: row for row, key in enumerate(sorted(warps))}
        figure = Figure(figsize=(14, 1 + 0.3 * len(rows)), layout="constrained")
        axes: Any = figure.subplots()
        for item in self.slices:
            axes.broken_barh([(starts[item.turn], item.instructions)], (rows[item.warp] + 0.1, 0.8), color="0.8")
        for color, on in enumerate(sorted({span.on for span in self.spans})):
            label: str | None = names.get(on, on)
            for span in (span for span in self.spans if span.on == on):
                begin, end = starts[span.first + 1], starts[span.last]
                width = max(end - begin, 1)
                axes.broken_barh([(begin, width)], (rows[span.warp] + 0.3, 0.4), color=f"C{color}", label=label)
                label = None
        axes.set_yticks([row + 0.5 for row in rows.values()], [f"{ctaid} warp {index}" for ctaid, index in rows])
        axes.invert_yaxis()
        axes.set_xlabel("instructions of the busiest warp")
        if self.spans:
            axes.legend(title="waits for", loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        figure.savefig(path)
