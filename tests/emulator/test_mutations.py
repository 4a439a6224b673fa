"""A working kernel, broken in every way that `mutations` knows: an error or a wrong result must tell."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.configs import KernelConfig
from jax_fa4.emulator.errors import EmulatorError
from jax_fa4.emulator.launch import Options
from jax_fa4.testing import Cell

from .forward import forward
from .mutations import KINDS, Mutant, mutants
from .test_forward_sm90 import call_of, compiled

# small tiles, so that one run is quick; three tiles a CTA, so that slots of Q are used again, and three key blocks a
# tile in a ring of two; every extent is another number
CONFIG = KernelConfig(
    arch="sm_90a",
    kernel="forward",
    dtype="bfloat16",
    head_dim=64,
    head_dim_v=64,
    tile_m=128,
    tile_n=32,
    kv_stages=2,
    q_stages=2,
    has_right=True,
)
CELL = Cell(batch=(2,), q=100, k=96, kv_heads=1, group=3, head_dim=64, dtype="bfloat16", causal=True)
MODES = [
    Options(completion="late", max_steps=300_000),
    Options(completion="early", max_steps=300_000),
    Options(completion="random", order="random", seed=1, max_steps=300_000),
]
MUTANTS_A_KIND = 1
GUARDS = ("invert a guard", "all lanes instead of one")

# Not told apart, because nothing is wrong with them in this kernel.
HARMLESS = {
    # the ring of turns only decides who goes first; a turn that is not waited for changes no result
    "bar.sync becomes bar.arrive",
}


def run(ptx: str, options: Options):
    out, lse, result = forward(ptx, CONFIG, call_of(CELL, testing.random(CELL), CONFIG), options)
    return out, lse, result


@functools.cache
def intact():
    return run(compiled(CONFIG), MODES[0])


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


WORK = ("cp.", "st.", "stmatrix", "bar.", "wgmma", "mbarrier.arrive", "mbarrier.try_wait")


def guards_only_setup(mutant: Mutant) -> bool:
    """Whether the block behind a broken guard only prefetches, or initialises barriers, which all lanes may do."""
    lines = mutant.ptx.split("\n")[mutant.line :]
    block = itertools.takewhile(lambda line: not line.startswith("$L"), lines)
    return not any(line.strip().startswith(WORK) for line in block)


@functools.cache
def chosen() -> dict[str, list[Mutant]]:
    """The first mutants of each kind among the lines that the kernel executes."""
    executed = intact()[2].stats.lines
    found = {kind.name: [] for kind in KINDS}
    for mutant in mutants(compiled(CONFIG), executed):
        if mutant.kind not in GUARDS or not guards_only_setup(mutant):
            found[mutant.kind].append(mutant)
    return {kind: list(itertools.islice(group, MUTANTS_A_KIND)) for kind, group in found.items()}


def test_nearly_all_broken_kernels_are_told():
    verdicts = {
        f"{mutant.kind}, line {mutant.line}: {mutant.text}": verdict(mutant)
        for group in chosen().values()
        for mutant in group
    }
    missed = [text for text, found in verdicts.items() if found is None and text.partition(",")[0] not in HARMLESS]
    assert len(verdicts) >= 45
    assert len(missed) <= 0.05 * len(verdicts), "\n".join(missed)


def test_each_way_to_break_a_kernel_applies_to_ours():
    assert [kind for kind, group in chosen().items() if not group] == []


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("drop fence.mbarrier_init", "mbarrier"),
        ("drop fence.proxy.async", "proxy fence"),
        ("drop wgmma.fence", "wgmma"),
        ("drop wgmma.wait_group", "wgmma"),
        ("expect 16 bytes more", "deadlock"),
        ("initialise an mbarrier twice", "mbarrier"),
        ("load a tile to 16 bytes further", "alignment"),
        ("load a tile twice", "in flight"),
        ("drop the wait for bulk stores", "race"),
    ],
)
def test_errors_name_the_rule_that_is_broken(kind, check):
    assert verdict(chosen()[kind][0]) == check
