"""What the compiler makes of Blackwell's forward: instructions, registers, parameters, barriers. None has run on one.

`resources_sm100.txt` beside this file is the committed report. After a wanted change, delete it: the next run writes it
anew.
"""

import collections
import dataclasses
import functools
import importlib.metadata
import re
import types
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4 import cubins
from jax_fa4.configs import forward_config
from jax_fa4.cubins import ptx_params, report
from jax_fa4.spec import AttentionSpec, MaskSpec

REPORT = Path(__file__).with_name("resources_sm100.txt")
SPECS = {
    "full": {},
    "causal": {"mask": MaskSpec(has_right=True)},
    "window": {"mask": MaskSpec(has_left=True, has_right=True), "dtype": "float16"},
    "segments": {"mask": MaskSpec(has_right=True, has_segments=True)},
    "scores": {"has_softcap": True, "has_sinks": True, "bias_dtype": "bfloat16"},
    "mask": {"mask": MaskSpec(has_dense=True)},
    "dynamic": {"mask": MaskSpec(has_right=True), "takes_over": True},
    "packed": {"mask": MaskSpec(has_right=True, has_cu_seqlens=True)},
    "grouped": {"mask": MaskSpec(has_right=True), "has_sinks": True, "group": 5, "q_len": 57},
}
FULL = ("sm_100a", 128, 128, "full")
CELLS = [
    ("sm_100a", 64, 64, "full"),
    ("sm_100a", 64, 64, "mask"),
    ("sm_100a", 64, 64, "dynamic"),
    ("sm_100a", 64, 64, "packed"),
    ("sm_100a", 64, 64, "grouped"),
    FULL,
    ("sm_100a", 128, 128, "window"),
    ("sm_100a", 128, 128, "segments"),
    ("sm_100a", 128, 128, "scores"),
    ("sm_100a", 192, 128, "full"),
    ("sm_100a", 192, 128, "causal"),
    ("sm_100a", 256, 256, "causal"),
    ("sm_103a", 128, 128, "full"),
]
cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))


@functools.cache
def config_of(cell):
    arch, head_dim, head_dim_v, name = cell
    fields = {"dtype": "bfloat16", "group": 1, **SPECS[name]}
    how = {option: fields.pop(option) for option in ("q_len", "takes_over") if option in fields}
    return forward_config(AttentionSpec(head_dim=head_dim, head_dim_v=head_dim_v, **fields), arch, **how)


@functools.cache
def compiled(cell):
    """Once for all tests, those of the emulator too."""
    return cubins.get(config_of(cell))


def cubin(cell):
    return as_cubin(config_of(cell), compiled(cell))


def as_cubin(config, binary):
    """What a report reads of a cubin."""
    return types.SimpleNamespace(
        arch=config.arch,
        config=config.name,
        entry=binary.entry,
        image=binary.image,
        smem_bytes=binary.smem_bytes,
    )


@functools.cache
def resources(cell):
    try:
        return report.resources_of(cubin(cell))
    except RuntimeError as error:
        pytest.skip(str(error))


@cells
def test_nothing_spills(cell):
    found = resources(cell)
    assert (found.spill_loads, found.spill_stores, found.stack_bytes, found.local_bytes) == (0, 0, 0, 0)


@cells
def test_every_product_is_issued_once_by_the_tensor_core(cell):
    """S of the first block, S and O in the loop, O of the last: for each tile, in steps of 16."""
    config = config_of(cell)
    assert resources(cell).count("UTCHMMA") == config.q_tiles * 2 * (config.columns + config.tile_n) // 16


@cells
def test_the_parameters_are_those_announced(cell):
    config, binary = config_of(cell), compiled(cell)
    ptx_params.check_config(ptx_params.params_of(binary.ptx, binary.entry), config.params, binary.entry)
    assert ptx_params.threads_of(binary.ptx, binary.entry) == config.threads


@cells
def test_registers_are_those_of_the_roles(cell):
    config, ptx = config_of(cell), compiled(cell).ptx
    found = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+);", ptx)
    roles = [config.softmax_registers, config.second_softmax_registers]
    roles += [config.correction_registers, config.other_registers]
    assert sorted((kind, int(n)) for kind, n in found) == sorted(("inc" if n > 128 else "dec", n) for n in roles)
    assert resources(cell).registers == 64 * 1024 // config.threads


@cells
def test_barriers_expect_the_arrivals_of_the_table(cell):
    config, ptx = config_of(cell), compiled(cell).ptx
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    counts = [int(constants[r]) for r in re.findall(r"mbarrier\.init\.shared\.b64\s+\[[^]]*\], (%r\d+);", ptx)]
    assert counts == [barrier.arrivals for barrier in config.barriers for _ in range(barrier.number)]


@cells
def test_shared_memory_is_used_to_its_last_byte(cell):
    """The last barrier, alone of its kind, is initialised through a pointer of its own."""
    binary = compiled(cell)
    last = re.findall(r"mbarrier\.init\.shared\.b64\s+\[(%r\d+)\]", binary.ptx)[-1]
    offset = re.search(rf"add\.s32\s+{last}, %r\d+, (\d+);", binary.ptx)
    assert int(offset[1]) + 8 == binary.smem_bytes == config_of(cell).smem_bytes


def test_three_sixteenths_of_the_exponentials_are_emulated():
    hardware, mixed = (
        collections.Counter(re.findall(r"^\s+([a-z0-9]+)\S* ", cubins.get(config).ptx, re.MULTILINE))["ex2"]
        for config in (dataclasses.replace(config_of(FULL), exp2_period=0), config_of(FULL))
    )
    blocks = 2 * 2  # the first one and the loop, for both tiles
    assert hardware - mixed == blocks * 128 * 3 // 16


def test_the_committed_report_is_up_to_date():
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    resources(CELLS[0])  # skips where the disassembler is missing
    shown = [cell for cell in CELLS if cell[3] not in ("window", "segments", "scores")]
    plans = report.anatomy([config_of(cell) for cell in shown], [resources(cell) for cell in shown])
    text = (
        f"nvidia-cutlass-dsl {version}\n"
        + report.full_table([cubin(cell) for cell in CELLS], [resources(cell) for cell in CELLS])
        + plans
    )
    if not REPORT.exists():
        REPORT.write_text(text)
        pytest.fail(f"{REPORT.name} was missing; it has been written, for you to look at")
    committed = REPORT.read_text()
    if committed.splitlines()[0] != text.splitlines()[0]:
        pytest.skip(f"the report is of {committed.splitlines()[0]}, installed is {version}")
    assert text == committed
