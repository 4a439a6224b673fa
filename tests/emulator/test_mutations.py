"""A working kernel, broken in every way that `mutations` knows: an error or a wrong result must tell."""

from __future__ import annotations

import functools

import pytest

from jax_fa4.configs import KernelConfig
from jax_fa4.testing import Cell

from .mutations import KINDS, Mutant
from .verdicts import Patient

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
    persistent=True,
    has_right=True,
)
CELL = Cell(batch=(2,), q=100, k=96, kv_heads=1, group=3, head_dim=64, dtype="bfloat16", causal=True)
MUTANTS_A_KIND = 1

# Not told apart, because nothing is wrong with them in this kernel.
HARMLESS = {
    # the ring of turns only decides who goes first; a turn that is not waited for changes no result
    "bar.sync becomes bar.arrive",
}


PATIENT = Patient(CONFIG, CELL)


@functools.cache
def chosen() -> dict[str, list[Mutant]]:
    return PATIENT.mutants(KINDS, MUTANTS_A_KIND)


def test_nearly_all_broken_kernels_are_told():
    verdicts = {
        f"{mutant.kind}, line {mutant.line}: {mutant.text}": PATIENT.verdict(mutant)
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
    assert PATIENT.verdict(chosen()[kind][0]) == check
