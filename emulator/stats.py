"""What a launch executed.

Instructions by opcode and warp, bytes moved and floating-point operations of the matrix units.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_fa4.emulator.program import Program
    from jax_fa4.emulator.state import Warp

__all__ = ["Stats"]

MUFU = ("ex2", "rcp", "rsqrt", "sqrt", "lg2", "tanh", "sin", "cos")


class Stats:
    """Counts, by warp index (the same warp of all CTAs together). An instruction counts once a warp.

    Attributes:
      opcodes: warp index -> opcode -> executions.
      amounts: warp index -> name -> amount, see `add`.
      lines: line of the PTX text -> executions by all warps.
    """

    def __init__(self) -> None:
        self.opcodes: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.amounts: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.lines: collections.Counter[int] = collections.Counter()

    def add(self, warp: Warp, name: str, amount: int) -> None:
        """Count `amount` more of `name` for a warp."""
        self.amounts[warp.index][name] += amount

    def add_counts(self, program: Program, warp: Warp) -> None:
        """Take over the step counts of a warp that has ended."""
        opcodes = self.opcodes[warp.index]
        for step, count in zip(program.steps, warp.counts, strict=True):
            if count:
                for instruction in step.instructions:
                    opcodes[instruction.opcode] += count
                    self.lines[instruction.line] += count

    @property
    def instructions(self) -> int:
        """All warp instructions."""
        return sum(counter.total() for counter in self.opcodes.values())

    def total(self, name: str) -> int:
        """An amount over all warps, e.g. "tma_load_bytes"."""
        return sum(counter[name] for counter in self.amounts.values())

    def by_warp(self, base: str) -> dict[int, int]:
        """How often each warp executed opcodes that start with `base` (up to a dot)."""
        return {
            warp: sum(count for opcode, count in counter.items() if opcode.partition(".")[0] == base)
            for warp, counter in sorted(self.opcodes.items())
        }

    def table(self) -> str:
        """One line a warp: instructions, MUFU, FMA, conversions, bytes and flops."""
        names = ("instr", "MUFU", "FMA", "cvt", "TMA ld B", "TMA st B", "MMA flop")
        rows = ["warp" + "".join(f"{name:>13}" for name in names)]
        for warp, counter in sorted(self.opcodes.items()):
            bases: collections.Counter[str] = collections.Counter()
            for opcode, count in counter.items():
                bases[opcode.partition(".")[0]] += count
            amounts = self.amounts[warp]
            values = (
                counter.total(),
                sum(bases[name] for name in MUFU),
                bases["fma"],
                bases["cvt"],
                amounts["tma_load_bytes"],
                amounts["tma_store_bytes"],
                amounts["wgmma_flops"] + amounts["tcgen05_flops"],
            )
            rows.append(f"{warp:>4}" + "".join(f"{value:>13}" for value in values))
        return "\n".join(rows)
