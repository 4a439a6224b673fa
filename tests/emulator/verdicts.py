"""What tells that a broken kernel is broken: a problem that it and the intact one run, under every completion order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

import jax_fa4
from jax_fa4 import emulate, testing
from jax_fa4.configs import KernelConfig
from jax_fa4.configs.blackwell import ForwardSm100Config
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


@dataclasses.dataclass(frozen=True, eq=False)
class Patient:
    """A kernel, and how its broken versions run on a problem: the results that can tell, and the run's result."""

    ptx: str
    run: Callable[[str, Options], tuple[list[np.ndarray], Result]]

    @classmethod
    def of_config(cls, config: KernelConfig, cell: Cell) -> Patient:
        """A forward kernel, and a cell of the test matrix."""

        def run(ptx: str, options: Options) -> tuple[list[np.ndarray], Result]:
            out, lse, result = forward(ptx, config, call_of(cell, testing.random(cell), config), options)
            return [out, lse], result

        return cls(compiled(config), run)

    @classmethod
    def of_call(cls, function: Callable[..., Any], x: Mapping[str, Any], kernel: str, kv_stages: int) -> Patient:
        """Blackwell's kernel whose name begins so, with so many slots, as a call with the arguments `x` launches it."""

        def fitted(config: ForwardSm100Config) -> ForwardSm100Config:
            return dataclasses.replace(config, kv_stages=kv_stages)

        patches = mock.patch.object(emulate, "run_plan"), mock.patch.object(ForwardSm100Config, "fitted", fitted)
        with patches[0] as seen, patches[1], jax_fa4.target_arch("sm_100a"):
            jax.block_until_ready(function(**x, implementation="emulate"))
        plan, texts, buffers = seen.call_args.args
        names = [launch.entry.startswith(f"jax_fa4_{kernel}_") for launch in plan.launches]
        place, inputs = names.index(True), len(plan.operands)
        key = plan.launches[place].cubin

        def run(ptx: str, options: Options) -> tuple[list[np.ndarray], Result]:
            results = [emulate.Array(memory.copy(), shape) for memory, shape in buffers[inputs:]]
            with emulate.recording(options) as launches:
                emulate.run_plan(plan, {**texts, key: ptx}, [*buffers[:inputs], *results])
            return [memory.view(np.uint8) for memory, _ in results[:2]], launches[place].result

        return cls(texts[key], run)

    @functools.cached_property
    def intact(self) -> tuple[list[np.ndarray], Result]:
        """What the kernel gives as it was compiled."""
        return self.run(self.ptx, MODES[0])

    def verdict(self, mutant: Mutant) -> str | None:
        """What tells that the mutant is broken; None if nothing does."""
        for options in MODES:
            try:
                broken, _ = self.run(mutant.ptx, options)
            except EmulatorError as error:
                return getattr(error, "check", type(error).__name__)
            if not all(map(_is_same, self.intact[0], broken)):
                return "wrong result"
        return None

    def mutants(self, kinds: Sequence[Kind], number: int) -> dict[str, list[Mutant]]:
        """The first so many of each kind among the lines that the kernel executes."""
        found: dict[str, list[Mutant]] = {kind.name: [] for kind in kinds}
        for mutant in mutants(self.ptx, self.intact[1].stats.lines, kinds):
            if mutant.kind not in GUARDS or not _guards_only_setup(mutant):
                found[mutant.kind].append(mutant)
        return {kind: group[:number] for kind, group in found.items()}


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _guards_only_setup(mutant: Mutant) -> bool:
    """Whether the block behind a broken guard only prefetches, or initialises barriers, which all lanes may do."""
    lines = mutant.ptx.split("\n")[mutant.line :]
    block = itertools.takewhile(lambda line: not line.startswith("$L"), lines)
    return not any(line.strip().startswith(WORK) for line in block)
