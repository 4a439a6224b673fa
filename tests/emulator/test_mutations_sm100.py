"""Our Blackwell forward, broken in every way that `mutations` knows: an error or a wrong result must tell.

`pytest -m matrix tests/emulator` breaks it in all of them: minutes.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from jax_fa4 import testing
from jax_fa4.configs import forward_config
from jax_fa4.testing import Cell

from .mutations import BLACKWELL_KINDS, Mutant
from .test_forward_sm90 import spec_of
from .verdicts import Patient

CELLS = {
    # a ring of two slots that K and V of three blocks pass; maxima that grow by more than the threshold; no block is
    # hidden
    "alone": Cell(
        batch=(1,),
        q=140,
        k=300,
        kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
        window=(None, 120),
        softmax_scale=2.0,
    ),
    # two CTAs with a query tile each, whose S has two places
    "pair": Cell(batch=(1,), q=140, k=300, kv_heads=1, head_dim=256, dtype="bfloat16", causal=True, softmax_scale=0.5),
}
MUTANTS_A_KIND = 2


@functools.cache
def patient(name: str) -> Patient:
    cell = CELLS[name]
    table = forward_config(spec_of(cell, testing.random(cell)), "sm_100a")
    return Patient(dataclasses.replace(table, kv_stages=2), cell)


@functools.cache
def chosen(name: str) -> dict[str, list[Mutant]]:
    return patient(name).mutants(BLACKWELL_KINDS, MUTANTS_A_KIND)


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
    assert patient("alone").verdict(chosen("alone")[name][-1]) in checks


HARMLESS = {
    "wait at another mbarrier",  # softmax0 at the barrier of S1, which is complete a little later
    "drop the commit of bulk stores",  # one more commit follows
    "drop tcgen05.wait::ld",  # the first use of a register waits as well
    "drop the wait for bulk stores",  # of the first tile: the wait for the second covers it
    "never accumulate",  # where nothing is accumulated
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BLACKWELL_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CELLS)
def test_every_broken_kernel_is_told(name, kind):
    broken = chosen(name)[kind.name]
    if not broken:
        pytest.skip("nothing in this kernel to break so")
    missed = [f"line {mutant.line}: {mutant.text}" for mutant in broken if patient(name).verdict(mutant) is None]
    assert kind.name in HARMLESS or not missed, "\n".join(missed)
