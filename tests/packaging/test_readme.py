"""The README: its examples run, and what it says about kernels is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import jax_fa4
from jax_fa4 import debug, export, launcher, rules
from jax_fa4.cubins import cache
from jax_fa4.spec import AttentionSpec, MaskSpec
from jax_fa4.support import why_no_gradient, why_unsupported

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PLAIN = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, group=1)


def run(code: str) -> dict[str, Any]:
    """The names that an example leaves behind."""
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_first_example_gives_the_shapes_that_its_comment_says():
    names = run(EXAMPLES[0])
    assert "[2, 1024, 8, 64] bfloat16, [2, 8, 1024] float32" in EXAMPLES[0]
    assert (names["out"].shape, names["out"].dtype) == ((2, 1024, 8, 64), "bfloat16")
    assert (names["lse"].shape, names["lse"].dtype) == ((2, 8, 1024), "float32")


@pytest.mark.parametrize("code", EXAMPLES[1:], ids=range(2, len(EXAMPLES) + 1))
def test_an_example_runs(code, tmp_path, monkeypatch):
    if "jax.export" in code:
        pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")
        if launcher.library() is None:
            pytest.skip("needs the FFI library, which this installation lacks")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    run(code)


WITH_KERNEL = [
    {"dtype": "float16"},
    {"head_dim": 128, "head_dim_v": 128},
    {"group": 8},
    {"layout": "BNTH"},
    {"mask": MaskSpec(has_right=True)},
    {"mask": MaskSpec(has_left=True, has_right=True)},
    {"mask": MaskSpec(has_dense=True)},
    {"mask": MaskSpec(has_segments=True)},
    {"mask": MaskSpec(has_kv_lengths=True, has_q_lengths=True)},
    {"mask": MaskSpec(has_right=True, has_q_offset=True)},
    {"bias_dtype": "float32"},
    {"has_softcap": True},
    {"has_sinks": True},
    {"head_dim": 96, "head_dim_v": 96},
    {"head_dim": 8, "head_dim_v": 256},
]
WITHOUT_KERNEL = [
    {"dtype": "float32"},
]


PACKED = {"mask": MaskSpec(has_right=True, has_cu_seqlens=True, has_q_lengths=True, has_kv_lengths=True)}


PACKED_AND_PAGED = {"mask": MaskSpec(has_cu_seqlens=True, has_kv_lengths=True), "page_size": 16}


@pytest.mark.parametrize("change", [*WITH_KERNEL, PACKED, PACKED_AND_PAGED], ids=str)
def test_hopper_has_the_kernels_that_the_table_lists(change):
    assert why_unsupported(dataclasses.replace(PLAIN, **change), "sm_90a") is None


@pytest.mark.parametrize("change", WITHOUT_KERNEL, ids=str)
def test_what_the_table_calls_not_yet_has_none(change):
    assert why_unsupported(dataclasses.replace(PLAIN, **change), "sm_90a") is not None


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("dims", [(8, 256), (128, 128), (192, 128), (256, 256)], ids=str)
def test_blackwell_has_the_kernels_that_the_text_names(arch, dims):
    plain = dataclasses.replace(PLAIN, head_dim=dims[0], head_dim_v=dims[1])
    paged = {"page_size": 16, "mask": MaskSpec(has_right=True, has_kv_lengths=True)}
    options = [paged, PACKED, *WITH_KERNEL]
    assert [o for o in options if why_unsupported(dataclasses.replace(plain, **o), arch)] == []


def test_hopper_has_kernels_for_pages_but_not_for_their_gradients():
    spec = dataclasses.replace(PLAIN, page_size=1, mask=MaskSpec(has_right=True, has_kv_lengths=True))
    assert why_unsupported(spec, "sm_90a") is None
    assert why_no_gradient(spec, "sm_90a") is not None


@pytest.mark.parametrize("change", [*WITH_KERNEL, PACKED, {"deterministic": True}], ids=str)
def test_hopper_has_the_gradients_that_the_table_lists(change):
    spec = dataclasses.replace(PLAIN, **change)
    assert why_no_gradient(spec, "sm_90a") is None


def test_it_names_what_the_code_names():
    names = (
        rules.OUT_NAME,
        rules.LSE_NAME,
        cache.DIRECTORY_VARIABLE,
        export.ENVIRONMENT_VARIABLE,
        debug.ENVIRONMENT_VARIABLE,
    )
    public = [name for name in jax_fa4.__all__ if name != "__version__"]
    assert not [name for name in (*names, *public) if name not in README]


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
