"""Working kernels, broken in every way that `mutations` knows: an error or a wrong result must tell.

`pytest -m matrix tests/emulator` breaks Blackwell's in all of them: minutes.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.configs import KernelConfig, forward_config
from jax_fa4.testing import Cell

from .mutations import BLACKWELL_KINDS, KINDS, Mutant
from .test_decode_sm90 import in_pages
from .test_forward_sm90 import spec_of
from .test_packed_sm100 import packed
from .verdicts import Patient


def hopper() -> Patient:
    """Small tiles, so that one run is quick; three tiles a CTA, so that slots of Q are used again, and three key blocks
    a tile in a ring of two; every extent is another number."""
    config = KernelConfig(
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
    return Patient.of_config(
        config, Cell(batch=(2,), q=100, k=96, kv_heads=1, group=3, head_dim=64, dtype="bfloat16", causal=True)
    )


def blackwell(**changes) -> Patient:
    """A ring of two slots that K and V of three blocks pass."""
    cell = Cell(batch=(1,), q=140, k=300, kv_heads=1, dtype="bfloat16", **changes)
    table = forward_config(spec_of(cell, testing.random(cell)), "sm_100a")
    return Patient.of_config(dataclasses.replace(table, kv_stages=2), cell)


def grouped() -> Patient:
    """Two query tiles whose rows are those of five heads; O is stored row by row. Three blocks pass two slots."""
    sizes = {"batch": (1,), "q": 50, "k": 300, "kv_heads": 1, "group": 5, "head_dim": 64}
    cell = Cell(**sizes, dtype="bfloat16", window=(None, 120), sinks=True)
    return Patient.of_call(jax_fa4.attention, testing.random(cell) | {"softmax_scale": 2.0}, "grouped", 2)


PATIENTS = {
    "hopper": hopper,
    # maxima that grow by more than the threshold; no block is hidden
    "blackwell": lambda: blackwell(head_dim=64, window=(None, 120), softmax_scale=2.0),
    # two CTAs with a query tile each, whose S has two places
    "pair": lambda: blackwell(head_dim=256, causal=True, softmax_scale=0.5),
    "grouped": grouped,
    # two warps copy keys of pages, 16 bytes a lane; a sequence ends within a block, one has no key; maxima grow
    "pages": lambda: Patient.of_call(
        jax_fa4.attention_paged, in_pages((270, 0, 67), 3, q=8) | {"softmax_scale": 2.0}, "decode", 3
    ),
    # tiles from a schedule, keys of neighbours hidden, rows stored by the threads that have them; maxima grow
    "packed": lambda: Patient.of_call(
        jax_fa4.attention_varlen,
        packed((5, 0, 150), (9, 7, 330), q_lengths=(5, 0, 140), kv_lengths=(9, 0, 320))
        | {"window": (None, 200), "softmax_scale": 2.0},
        "forward",
        2,
    ),
}
patient = functools.cache(lambda name: PATIENTS[name]())


@functools.cache
def chosen(name: str) -> dict[str, list[Mutant]]:
    return patient(name).mutants(*((KINDS, 1) if name == "hopper" else (BLACKWELL_KINDS, 2)))


# Not told apart, because nothing is wrong with them in these kernels.
HARMLESS = {
    "hopper": {
        # the ring of turns only decides who goes first; a turn that is not waited for changes no result
        "bar.sync becomes bar.arrive",
    },
    "blackwell": {
        "wait at another mbarrier",  # softmax0 at the barrier of S1, which is complete a little later
        "drop the commit of bulk stores",  # one more commit follows
        "drop tcgen05.wait::ld",  # the first use of a register waits as well
        "drop the wait for bulk stores",  # of the first tile: the wait for the second covers it
        "never accumulate",  # where nothing is accumulated
    },
    "pages": {
        "drop fence.proxy.async",  # of Q: that of the first K follows before the product may begin
        "fence in one lane only",  # likewise
        "drop the commit of copies",  # of Q: they are complete with those of the first K, which is waited for, too
        "drop the wait for copies",  # likewise
        "take more registers",  # a lone query tile leaves some
        "give no registers away",
        "read another parameter",  # of the bound of an index that is never beyond it
    },
}


def test_nearly_all_broken_kernels_are_told():
    verdicts = {
        f"{mutant.kind}, line {mutant.line}: {mutant.text}": patient("hopper").verdict(mutant)
        for group in chosen("hopper").values()
        for mutant in group
    }
    harmless = HARMLESS["hopper"]
    missed = [text for text, found in verdicts.items() if found is None and text.partition(",")[0] not in harmless]
    assert len(verdicts) >= 45
    assert len(missed) <= 0.05 * len(verdicts), "\n".join(missed)


def test_each_way_to_break_a_kernel_applies_to_ours():
    assert [kind for kind, group in chosen("hopper").items() if not group] == []


@pytest.mark.parametrize(
    ("name", "kind", "checks"),
    [
        ("hopper", "drop fence.mbarrier_init", {"mbarrier"}),
        ("hopper", "drop fence.proxy.async", {"proxy fence"}),
        ("hopper", "drop wgmma.fence", {"wgmma"}),
        ("hopper", "drop wgmma.wait_group", {"wgmma"}),
        ("hopper", "expect 16 bytes more", {"deadlock"}),
        ("hopper", "initialise an mbarrier twice", {"mbarrier"}),
        ("hopper", "load a tile to 16 bytes further", {"alignment"}),
        ("hopper", "load a tile twice", {"in flight"}),
        ("hopper", "drop the wait for bulk stores", {"race"}),
        ("blackwell", "drop fence.proxy.async", {"proxy fence"}),
        ("blackwell", "drop a wait for an mbarrier", {"uninitialised", "race"}),
        ("blackwell", "drop an arrival", {"deadlock"}),
        ("blackwell", "drop tcgen05.wait::st", {"race"}),
        ("blackwell", "commit in another lane", {"deadlock"}),
        ("blackwell", "drop an MMA", {"uninitialised", "wrong result"}),
        ("blackwell", "B from 16 bytes further", {"wrong result"}),
        ("blackwell", "another size in the instruction descriptor", {"uninitialised"}),
        ("blackwell", "store to other columns", {"uninitialised", "race", "wrong result"}),
        ("blackwell", "load from another warp's lanes", {"tensor memory"}),
        ("blackwell", "no lane votes to rescale", {"wrong result"}),
        ("blackwell", "drop the deallocation", {"tensor memory"}),
        ("pages", "drop fence.proxy.async", {"proxy fence"}),
        ("pages", "fence in one lane only", {"proxy fence"}),
        ("pages", "copy to 16 bytes further", {"in flight"}),
        ("pages", "drop the wait for copies", {"in flight"}),
    ],
)
def test_a_broken_kernel_is_told_and_why(name, kind, checks):
    assert patient(name).verdict(chosen(name)[kind][-1]) in checks


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BLACKWELL_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", [name for name in PATIENTS if name != "hopper"])
def test_every_broken_kernel_is_told(name, kind):
    broken = chosen(name)[kind.name]
    if not broken:
        pytest.skip("nothing in this kernel to break so")
    missed = [f"line {mutant.line}: {mutant.text}" for mutant in broken if patient(name).verdict(mutant) is None]
    assert kind.name in HARMLESS["blackwell"] | HARMLESS.get(name, set()) or not missed, "\n".join(missed)
