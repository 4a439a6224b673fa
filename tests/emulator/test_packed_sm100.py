"""Our Blackwell kernel of packed sequences in the emulator, against float64; rows of no sequence are NaN.

`pytest -m matrix tests/emulator` runs the whole matrix: minutes.
"""

from __future__ import annotations

import itertools
import random

import jax
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import launcher, testing

from .test_forward_sm90 import MODES, assert_as_exact
from .test_forward_sm100 import EXP2_ERROR
from .test_grouped_sm100 import run

pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")

GAP = 3  # rows before the first sequence and behind the last


def packed(q_lens, kv_lens, *, heads=(2, 1), head_dims=(64, 64), dtype="bfloat16", seed=0, **lengths):
    """Keyword arguments of `attention_varlen`; `lengths` say how many of the rows between offsets a sequence has."""
    rng = np.random.default_rng(seed)
    x = {}
    for side, lens in (("q", q_lens), ("kv", kv_lens)):
        x[f"cu_seqlens_{side}"] = GAP + np.cumsum([0, *lens], dtype=np.int32)
    (n, k), (d, e) = heads, head_dims
    for name, side, number, dim in (("q", "q", n, d), ("k", "kv", k, d), ("v", "kv", k, e)):
        offsets = x[f"cu_seqlens_{side}"]
        used = lengths.get(f"{side}_lengths", np.diff(offsets))
        x[name] = np.full((offsets[-1] + GAP, number, dim), np.nan, testing.np_dtype(dtype))
        for start, length in zip(offsets, used, strict=False):
            x[name][start : start + length] = rng.standard_normal((length, number, dim))
    return x | {name: np.array(value, np.int32) for name, value in lengths.items()}


def assert_attention(x, mode: str, seed: int = 0):
    got, launches = run(jax_fa4.attention_varlen, x, mode, seed)
    exact, rough = testing.attention_varlen(x), testing.attention_varlen(x, testing.rounded)
    assert_as_exact(got, exact, rough, x["q"].dtype.name, 3 if "softcap" in x else 2, EXP2_ERROR)
    assert [launch.entry.split("_")[2] for launch in launches] == ["schedule", "forward"]


def test_packed_sequences_are_exact_whatever_lies_beside_them():
    x = packed((5, 0, 300, 20), (9, 7, 140, 0), q_lengths=(5, 0, 257, 20), kv_lengths=(9, 0, 131, 0))
    assert_attention(x | {"causal": True}, "random")


@pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks")
def test_exported_programs_launch_it():
    x = packed((5, 0, 300, 20), (9, 7, 140, 0), q_lengths=(5, 0, 257, 20), kv_lengths=(9, 0, 131, 0))

    def program(arrays):
        return jax_fa4.attention_varlen(**arrays, causal=True)

    with jax_fa4.target_arch("sm_100a"):
        checks = jax_fa4.export_disabled_checks()
        exported = jax.export.export(jax.jit(program), platforms=["cuda"], disabled_checks=checks)(x)
    text = exported.mlir_module()
    for name in (
        "schedule_sm_100a_q_tiles_right_q_lengths_kv_lengths",
        "forward_sm_100a_bfloat16_d64_right_cu_seqlens",
    ):
        assert f"jax_fa4_{name}_0" in text


FEATURES = [
    {},
    {"causal": True},
    {"window": (100, 20)},
    {"softcap": 3.0},
    {"sinks": True},
    {"lengths": True},
    {"lengths": True, "causal": True},
    {"softmax_scale": 1.5},
]
LENGTHS = (0, 1, 7, 100, 127, 128, 129, 255, 256, 257, 384, 512)
HEADS = ((2, 2), (2, 1), (3, 1), (5, 1), (8, 1))
HEAD_DIMS = ((64, 64), (128, 128), (72, 96), (192, 128), (256, 256))


def matrix() -> list[tuple[dict, str, int]]:
    """Every feature at every mode, with sequences, heads and head dims drawn from the lists above."""
    rng = random.Random(0)
    cells = []
    for features, mode in itertools.product(FEATURES, MODES):
        number = rng.randrange(1, 6)
        cell = {
            "q_lens": tuple(rng.choice(LENGTHS) for _ in range(number)),
            "kv_lens": tuple(rng.choice(LENGTHS) for _ in range(number)),
            "heads": rng.choice(HEADS),
            "head_dims": rng.choice(HEAD_DIMS),
            "dtype": rng.choice(("bfloat16", "float16")),
        }
        cells.append((cell | features, mode, rng.randrange(100)))
    return cells


@pytest.mark.matrix
@pytest.mark.parametrize(("cell", "mode", "seed"), matrix(), ids=str)
def test_every_feature_at_every_edge(cell, mode, seed):
    rng = np.random.default_rng(seed)
    cell = dict(cell)
    options = {name: cell.pop(name) for name in ("causal", "window", "softcap", "softmax_scale") if name in cell}
    if cell.pop("sinks", False):
        options["sinks"] = rng.standard_normal(cell["heads"][0]).astype(np.float32)
    if cell.pop("lengths", False):
        for side in ("q", "kv"):
            cell[f"{side}_lengths"] = tuple(int(rng.integers(0, n + 1)) for n in cell[f"{side}_lens"])
    assert_attention(packed(**cell, seed=seed) | options, mode, seed)
