"""What tells that a broken kernel is broken: a problem that it and the intact one run, under every completion order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from jax_fa4 import testing
from jax_fa4.configs import KernelConfig
from jax_fa4.emulator.errors import EmulatorError
from jax_fa4.emulator.launch import Options
from jax_fa4.emulator.run import Result
from jax_fa4.testing import Cell

from .forward import forward
from .mutations import Kind, Mutant, mutants
from .test_forward_sm90 import call_of, compiled

__all__ = ["Patient"]

MODES = [
    Options(completion="late", max_steps=300_000),
    Options(completion="early", max_steps=300_000),
    Options(completion="random", order="random", seed=1, max_steps=300_000),
]
GUARDS = ("invert a guard", "all lanes instead of one")
WORK = ("cp.", "st.", "stmatrix", "bar.", "wgmma", "mbarrier.arrive", "mbarrier.try_wait")


@dataclasses.dataclass(frozen=True)
class Patient:
    """A forward kernel and the problem on which its broken versions run."""

    config: KernelConfig
    cell: Cell

    def run(self, ptx: str, options: Options) -> tuple[np.ndarray, np.ndarray, Result]:
        """out, lse and the run's result."""
        return forward(ptx, self.config, call_of(self.cell, testing.random(self.cell), self.config), options)

    @functools.cached_property
    def intact(self) -> tuple[np.ndarray, np.ndarray, Result]:
        """The same of the kernel as it was compiled."""
        return self.run(compiled(self.config), MODES[0])

    def verdict(self, mutant: Mutant) -> str | None:
        """What tells that the mutant is broken; None if nothing does."""
        out, lse, _ = self.intact
        for options in MODES:
            try:
                broken_out, broken_lse, _ = self.run(mutant.ptx, options)
            except EmulatorError as error:
                return getattr(error, "check", type(error).__name__)
            if not (np.array_equal(out, broken_out) and np.array_equal(lse, broken_lse, equal_nan=True)):
                return "wrong result"
        return None

    def mutants(self, kinds: Sequence[Kind], number: int) -> dict[str, list[Mutant]]:
        """The first so many of each kind among the lines that the kernel executes."""
        found: dict[str, list[Mutant]] = {kind.name: [] for kind in kinds}
        for mutant in mutants(compiled(self.config), self.intact[2].stats.lines, kinds):
            if mutant.kind not in GUARDS or not _guards_only_setup(mutant):
                found[mutant.kind].append(mutant)
        return {kind: group[:number] for kind, group in found.items()}


def _guards_only_setup(mutant: Mutant) -> bool:
    """Whether the block behind a broken guard only prefetches, or initialises barriers, which all lanes may do."""
    lines = mutant.ptx.split("\n")[mutant.line :]
    block = itertools.takewhile(lambda line: not line.startswith("$L"), lines)
    return not any(line.strip().startswith(WORK) for line in block)
