"""What the compiler makes of the configs in the table: instructions, registers, parameters, barriers.

`resources.txt` beside this file is the committed report. After a wanted change, delete it: the next run writes it anew.
"""

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
from jax_fa4.kernels.build import compile_kernel
from jax_fa4.kernels.core.bounds import SegmentBlocks
from jax_fa4.kernels.sm90.forward import ForwardSm90
from jax_fa4.spec import AttentionSpec, MaskSpec

REPORT = Path(__file__).with_name("resources.txt")
MASKS = {
    "full": {"dtype": "bfloat16"},
    "causal": {"dtype": "bfloat16", "mask": MaskSpec(has_right=True)},
    "left": {"dtype": "float16", "mask": MaskSpec(has_left=True)},
    "window": {"dtype": "float16", "mask": MaskSpec(has_left=True, has_right=True)},
}
FEATURES = {
    "lengths": {
        "dtype": "bfloat16",
        "mask": MaskSpec(has_right=True, has_q_offset=True, has_q_lengths=True, has_kv_lengths=True),
    },
    "segments": {"dtype": "bfloat16", "mask": MaskSpec(has_right=True, has_segments=True)},
    "scores": {"dtype": "bfloat16", "has_softcap": True, "has_sinks": True, "bias_dtype": "bfloat16"},
}
SPECS = MASKS | FEATURES
CELLS = [
    *((head_dim, mask) for head_dim in (64, 128) for mask in MASKS),
    *((128, feature) for feature in FEATURES),
    (72, "full"),
    (256, "window"),
]
cells = pytest.mark.parametrize(("head_dim", "mask"), CELLS, ids=lambda value: str(value))


@functools.cache
def config_of(head_dim, mask):
    spec = AttentionSpec(head_dim=head_dim, head_dim_v=head_dim, group=1, **SPECS[mask])
    return forward_config(spec, "sm_90a")


@functools.cache
def compiled(head_dim, mask):
    """Once for all tests, those of the emulator too."""
    return cubins.get(config_of(head_dim, mask))


def cubin(head_dim, mask):
    """What a report reads of a cubin."""
    config, binary = config_of(head_dim, mask), compiled(head_dim, mask)
    return types.SimpleNamespace(
        arch=config.arch,
        config=config.name,
        entry=binary.entry,
        image=binary.image,
        smem_bytes=binary.smem_bytes,
    )


@functools.cache
def resources(head_dim, mask):
    try:
        return report.resources_of(cubin(head_dim, mask))
    except RuntimeError as error:
        pytest.skip(str(error))


@cells
def test_nothing_spills(head_dim, mask):
    found = resources(head_dim, mask)
    assert (found.spill_loads, found.spill_stores, found.stack_bytes, found.local_bytes) == (0, 0, 0, 0)


@cells
def test_every_product_is_a_wgmma_and_none_is_issued_twice(head_dim, mask):
    config = config_of(head_dim, mask)
    scores, values = config.columns // 16, config.tile_n // 16
    visit = ForwardSm90(config).bounds.visit(0, _some_sequence(config), SegmentBlocks(0, 0, 0, 0))
    steps = 1 + len(visit.spans)  # a loop a span, and the ends
    turn_over = int(config.persistent)  # the end of a tile and the start of the next at once
    assert resources(head_dim, mask).count("HGMMA") == (steps + turn_over) * (scores + values)


@cells
def test_products_overlap_with_softmax(head_dim, mask):
    """A wait for each batch of products; more would mean that the compiler serialised them."""
    ptx = compiled(head_dim, mask).ptx
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d);", ptx)
    pairs = waits.count("1")  # loops and, where a CTA computes several tiles, the step from one to the next
    assert waits.count("0") == pairs + 2
    assert resources(head_dim, mask).opcodes["WARPGROUP"] == 2 * len(waits)  # an arrive and a wait each


@cells
def test_registers_at_launch_are_an_equal_share_of_the_file(head_dim, mask):
    config = config_of(head_dim, mask)
    assert resources(head_dim, mask).registers == 64 * 1024 // config.threads // 8 * 8


@cells
def test_the_parameters_are_those_announced(head_dim, mask):
    config, binary = config_of(head_dim, mask), compiled(head_dim, mask)
    ptx_params.check_config(ptx_params.params_of(binary.ptx, binary.entry), config.params, binary.entry)


@cells
def test_barriers_expect_the_arrivals_of_the_edge_table(head_dim, mask):
    config, ptx = config_of(head_dim, mask), compiled(head_dim, mask).ptx
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    counts = [int(constants[r]) for r in re.findall(r"mbarrier\.init\.shared\.b64\s+\[[^]]*\], (%r\d+);", ptx)]
    expected = [
        arrivals
        for edge in ForwardSm90(config).edges
        for arrivals in [1] * edge.stages + [edge.consumer_warps] * edge.stages
    ]
    assert counts == expected


@cells
def test_shared_memory_is_used_to_its_last_byte(head_dim, mask):
    """The highest address that the PTX names is the last barrier."""
    binary = compiled(head_dim, mask)
    offsets = [int(offset) for offset in re.findall(r"mbarrier\.init\.shared\.b64\s+\[%r\d+\+(\d+)\]", binary.ptx)]
    assert max(offsets) + 8 == binary.smem_bytes == config_of(head_dim, mask).smem_bytes


def test_the_name_says_what_was_compiled():
    assert compiled(128, "causal").entry == "jax_fa4_forward_sm_90a_bfloat16_d128_right_0"


def test_compiling_again_gives_the_same_bytes_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again = compile_kernel(config_of(64, "full"))
    first = compiled(64, "full")
    assert (again.ptx, again.cubin) == (first.ptx, first.image)
    assert list(tmp_path.iterdir()) == []


def test_the_committed_report_is_up_to_date():
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    resources(*CELLS[0])  # skips where the disassembler is missing
    text = f"nvidia-cutlass-dsl {version}\n" + report.table([cubin(*cell) for cell in CELLS])
    if not REPORT.exists():
        REPORT.write_text(text)
        pytest.fail(f"{REPORT.name} was missing; it has been written, for you to look at")
    committed = REPORT.read_text()
    if committed.splitlines()[0] != text.splitlines()[0]:
        pytest.skip(f"the report is of {committed.splitlines()[0]}, installed is {version}")
    assert text == committed


def _some_sequence(config):
    from jax_fa4.kernels.core.seqlen import Sequence

    return Sequence.bottom_right(1, 1, 0 if config.has_left else None, 0 if config.has_right else None)
