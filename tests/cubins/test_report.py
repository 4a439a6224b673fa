"""What the disassembler says of a kernel, on a small one compiled here, and the table made of it."""

import dataclasses
import re
import shutil
from collections import Counter

import pytest

from jax_fa4.cubins import report

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function other:
  REG:99 STACK:1 SHARED:2 LOCAL:3 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {entry}:
  REG:168 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000fe20000000800 */
        /*0010*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   MUFU.EX2 R4, R4 ;
        /*0030*/               @P1 MUFU.RCP R5, R4 ;
        /*0040*/                   STL.64 [R1+0x8], R4 ;
        /*0050*/                   LDL.LU R4, [R1+0x8] ;
        /*0060*/              @UP0 UTCHMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP1 ;
        /*0070*/                   FFMA2 R4, R4.F32x2.HI_LO, R5, R6 ;
        /*0080*/                   FFMA R4, R4, R5, R6 ;
        /*10090*/                  EXIT ;
"""


LOOPS = """
        /*0000*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   MUFU.EX2 R4, R4 ;
        /*0030*/              @!P0 BRA 0x600 ;
        /*0040*/               @P1 BRA 0x10 ;
        /*0050*/                   FFMA R4, R4, R5, R6 ;
        /*0060*/               @P1 BRA 0x50 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0080*/                   BRA.U !UP2, 0x70 ;
        /*0090*/               @P3 BRA 0x0 ;
        /*0600*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0 ;
        /*0610*/                   BRA 0x20 ;
        /*0620*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
"""


@pytest.fixture
def disassembled(monkeypatch, cubin):
    """A disassembler that prints the texts above."""
    texts = {"--dump-resource-usage": USAGE.format(entry=cubin.entry), "--dump-sass": LISTING}
    monkeypatch.setattr(report, "_find_tool", lambda: "tool")
    monkeypatch.setattr(report, "_run", lambda tool, what, image: texts[what])


def test_resources_are_those_of_the_entry(disassembled, cubin):
    resources = report.resources_of(cubin)
    assert (resources.registers, resources.stack_bytes, resources.local_bytes) == (168, 16, 8)
    assert (resources.static_smem_bytes, resources.dynamic_smem_bytes) == (1024, cubin.smem_bytes)


def test_instructions_are_counted_whatever_their_predicate_and_modifiers(disassembled, cubin):
    resources = report.resources_of(cubin)
    assert resources.opcodes == Counter(LDC=1, HGMMA=1, MUFU=2, STL=1, LDL=1, UTCHMMA=1, FFMA2=1, FFMA=1, EXIT=1)
    assert (resources.spill_loads, resources.spill_stores, resources.instructions) == (1, 1, 10)


def test_loops_are_the_innermost_with_products(monkeypatch, cubin):
    texts = {"--dump-resource-usage": USAGE.format(entry=cubin.entry), "--dump-sass": LOOPS}
    monkeypatch.setattr(report, "_find_tool", lambda: "tool")
    monkeypatch.setattr(report, "_run", lambda tool, what, image: texts[what])
    resources = report.resources_of(cubin)
    first, second = resources.loops
    assert first == Counter(HGMMA=1, MUFU=1, BRA=2)
    assert second == Counter(HGMMA=1, BRA=1)
    head, row = report.full_table([dataclasses.replace(cubin, config="C(x=1)")], [resources]).splitlines()
    assert head.endswith("role regs  loop instr  loop MMA  loop MUFU  loop FFMA  config")
    assert row.split()[-6:] == ["240/24", "4/2", "1/1", "1/0", "0/0", "C(x=1)"]


def test_the_table_is_the_same_in_whatever_order_cubins_come(disassembled, cubin):
    other = dataclasses.replace(cubin, config=cubin.config.replace("128", "64"))
    assert report.table([cubin, other]) == report.table([other, cubin])


def test_the_table_has_a_row_per_cubin(disassembled, cubin):
    head, row = report.table([dataclasses.replace(cubin, config="C(x=1)")]).splitlines()
    assert re.split(" {2,}", head.strip()) == ["arch", *report.COLUMNS, "config"]
    numbers = (168, 16, 8, 1, 1, 1024, cubin.smem_bytes, 10, 1, 1, 2, 2)
    assert row.split() == ["sm_90a", *map(str, numbers), "C(x=1)"]


def test_a_kernel_that_is_not_in_the_listing_is_named(disassembled, cubin):
    with pytest.raises(RuntimeError, match="cuobjdump says nothing of REG of kernel elsewhere"):
        report.resources_of(dataclasses.replace(cubin, entry="elsewhere"))


def test_a_missing_disassembler_is_named(monkeypatch, cubin):
    monkeypatch.setattr(report, "TOOL_PACKAGES", ("jax-fa4-no-such-package", "nvidia-cuda-nvdisasm"))
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(RuntimeError, match=r"a report needs cuobjdump: pip install jax-fa4-no-such-package "):
        report.resources_of(cubin)


def test_what_the_disassembler_complains_of_is_passed_on(cubin):
    try:
        report._find_tool()
    except RuntimeError as e:
        pytest.skip(str(e))
    with pytest.raises(RuntimeError, match="cuobjdump failed: "):
        report.resources_of(cubin)  # its image is no ELF file
