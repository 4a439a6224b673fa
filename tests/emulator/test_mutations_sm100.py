"""Our Blackwell forward, broken in every way that `mutations` knows: an error or a wrong result must tell.

`pytest -m matrix tests/emulator` breaks it in all of them: minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.configs import KernelConfig, forward_config
from jax_fa4.emulator.errors import EmulatorError
from jax_fa4.emulator.launch import Options
from jax_fa4.testing import Cell

from .forward import forward
from .mutations import BLACKWELL_KINDS, Kind, Mutant, mutants
from .test_forward_sm90 import call_of, compiled, spec_of
from .test_mutations import guards_only_setup

# a ring of two slots that K and V of three blocks pass; maxima that grow by more than the threshold; no block is hidden
CELL = Cell(batch=(1,), q=140, k=300, kv_heads=1, head_dim=64, dtype="bfloat16", window=(None, 120), softmax_scale=2.0)
MODES = [
    Options(completion="late", max_steps=300_000),
    Options(completion="early", max_steps=300_000),
    Options(completion="random", order="random", seed=1, max_steps=300_000),
]
MUTANTS_A_KIND = 2
GUARDS = ("invert a guard", "all lanes instead of one")


@functools.cache
def config() -> KernelConfig:
    table = forward_config(spec_of(CELL, testing.random(CELL)), "sm_100a")
    return dataclasses.replace(table, kv_stages=2)


def run(ptx: str, options: Options):
    return forward(ptx, config(), call_of(CELL, testing.random(CELL), config()), options)


@functools.cache
def intact():
    return run(compiled(config()), MODES[0])


def verdict(mutant: Mutant) -> str | None:
    """What tells that the mutant is broken; None if nothing does."""
    out, lse, _ = intact()
    for options in MODES:
        try:
            broken_out, broken_lse, _ = run(mutant.ptx, options)
        except EmulatorError as error:
            return getattr(error, "check", type(error).__name__)
        if not (np.array_equal(out, broken_out) and np.array_equal(lse, broken_lse, equal_nan=True)):
            return "wrong result"
    return None


def chosen(kind: Kind) -> list[Mutant]:
    """The first mutants of a kind among the lines that the kernel executes."""
    every = mutants(compiled(config()), intact()[2].stats.lines, [kind])
    telling = (mutant for mutant in every if kind.name not in GUARDS or not guards_only_setup(mutant))
    return list(itertools.islice(telling, MUTANTS_A_KIND))


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("drop fence.proxy.async", ("proxy fence",)),
        ("drop a wait for an mbarrier", ("uninitialised", "race")),
        ("drop an arrival", ("deadlock",)),
        ("drop tcgen05.wait::st", ("race",)),
        ("commit in another lane", ("deadlock",)),
        ("drop an MMA", ("uninitialised", "wrong result")),
        ("B from 16 bytes further", ("wrong result",)),
        ("another size in the instruction descriptor", ("uninitialised",)),
        ("store to other columns", ("uninitialised", "race", "wrong result")),
        ("load from another warp's lanes", ("tensor memory",)),
        ("no lane votes to rescale", ("wrong result",)),
        ("drop the deallocation", ("tensor memory",)),
    ],
)
def test_a_broken_kernel_is_told_and_why(name, checks):
    (kind,) = (kind for kind in BLACKWELL_KINDS if kind.name == name)
    assert verdict(chosen(kind)[-1]) in checks


HARMLESS = {
    "wait at another mbarrier",  # softmax0 at the barrier of S1, which is complete a little later
    "drop the commit of bulk stores",  # one more commit follows
    "drop tcgen05.wait::ld",  # the first use of a register waits as well
    "drop the wait for bulk stores",  # of the first tile: the wait for the second covers it
    "never accumulate",  # where nothing is accumulated
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BLACKWELL_KINDS, ids=lambda kind: kind.name)
def test_every_broken_kernel_is_told(kind):
    broken = chosen(kind)
    if not broken:
        pytest.skip("nothing in this kernel to break so")
    missed = [f"line {mutant.line}: {mutant.text}" for mutant in broken if verdict(mutant) is None]
    assert kind.name in HARMLESS or not missed, "\n".join(missed)
