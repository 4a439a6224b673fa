"""Our Blackwell kernels of grouped heads in the emulator, against float64: short queries, splits of keys, pages.

`pytest -m matrix tests/emulator` runs the whole matrix: minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import emulate, launcher, testing
from jax_fa4.testing import Cell

from .test_decode_sm90 import assert_same_bits, in_pages
from .test_forward_sm90 import MODES, assert_as_exact
from .test_forward_sm100 import EXP2_ERROR

pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")

BASE = Cell(batch=(1,), q=1, kv_heads=1, group=4, head_dim=64, dtype="bfloat16")


def cell(**changes) -> Cell:
    return dataclasses.replace(BASE, **changes)


def run(function, x, mode: str = "late", seed: int = 0, arch: str = "sm_100a"):
    """out and lse of a call, and its launches."""
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in x.items() if name not in arrays}
    program = jax.jit(lambda a: function(**a, **static, return_lse=True, implementation="emulate"))
    options = dataclasses.replace(MODES[mode], seed=seed)
    with jax_fa4.target_arch(arch), emulate.recording(options) as launches:
        result = testing.Forward(*map(np.asarray, program(arrays)))
    return result, launches


call = functools.partial(run, jax_fa4.attention)
call_paged = functools.partial(run, jax_fa4.attention_paged)


def kernels(launches) -> list[str]:
    return [launch.entry.split("_")[2] for launch in launches]


def assert_attention(cell: Cell, mode: str = "late", seed: int = 0):
    x = testing.random(cell, seed)
    got, launches = call(x, mode, seed)
    assert_as_exact(got, testing.attention(x), testing.rounded(x), cell.dtype, 3 if "softcap" in x else 2, EXP2_ERROR)
    return launches


def test_short_queries_of_all_heads_share_tiles():
    problem = cell(q=57, k=150, group=5, causal=True, sinks=True, layout="BNTH")  # 285 rows: two CTAs
    assert kernels(assert_attention(problem)) == ["grouped"]


def test_heads_that_share_tiles_have_masks_biases_and_segments_too():
    problem = cell(q=30, k=300, group=5, kv_heads=2, segments=3, mask="full", bias="keys")  # 150 rows
    assert kernels(assert_attention(problem, "random")) == ["grouped"]


def test_a_query_of_a_hundred_heads_has_splits():
    assert kernels(assert_attention(cell(k=257, group=100))) == ["decode", "combine"]


@pytest.mark.parametrize(
    ("page_size", "length", "mode"),
    [(3, 140, "random"), (48, 1030, "late")],  # copied by lanes, by TMA; one split, two
)
def test_keys_may_lie_in_pages_of_any_size(page_size, length, mode):
    x = in_pages((length, 0, 67), page_size)
    got, launches = call_paged(x, mode)
    assert_as_exact(
        got, testing.attention_paged(x), testing.attention_paged(x, testing.rounded), "bfloat16", 2, EXP2_ERROR
    )
    assert kernels(launches) == ["decode", "combine"]
    assert (launches[0].result.stats.total("tma_load_bytes") > 0) == (page_size == 48)


@pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks")
def test_exported_programs_launch_them():
    x = in_pages((140, 0, 67), 48)

    def program(arrays):
        return jax_fa4.attention_paged(**arrays)

    with jax_fa4.target_arch("sm_100a"):
        checks = jax_fa4.export_disabled_checks()
        exported = jax.export.export(jax.jit(program), platforms=["cuda"], disabled_checks=checks)(x)
    text = exported.mlir_module()
    for name in ("decode_sm_100a_bfloat16_d64_right_kv_lengths_page48", "combine_sm_100a_bfloat16_d64_many_splits"):
        assert f"jax_fa4_{name}_0" in text


GROUPS = (2, 3, 5, 8)
LENGTHS = (1, 7, 100, 127, 128, 129, 255, 256, 257, 384, 511, 512)
FEATURES = [
    {},
    {"causal": True},
    {"window": (100, 20)},
    {"window": (130, None)},
    {"causal": True, "q_offset": 40},
    {"kv_lengths": (200,)},
    {"q_lengths": (70,), "kv_lengths": (140,), "causal": True},
    {"softcap": 5.0},
    {"sinks": True},
    {"softmax_scale": 1.5},
    {"layout": "BNTH"},
    {"segments": 3},
    {"segments": 4, "causal": True},
    {"mask": "full"},
    {"bias": "keys"},
    {"mask": "shared", "bias": "full", "segments": 2, "softcap": 5.0, "sinks": True, "window": (100, 20)},
]


def matrix(seed: int = 0) -> list[tuple[Cell, str, int]]:
    """Every feature with every group, at lengths drawn from LENGTHS; few queries are split, more share tiles."""
    rng = random.Random(seed)
    cells = []
    for features, group, few in itertools.product(FEATURES, GROUPS, (False, True)):
        q = rng.randrange(1, 128 // group + 1) if few else rng.choice([n for n in LENGTHS if n < 256])
        k = rng.choice([n for n in LENGTHS if n >= 256] + [1024, 1025, 2100] if few else LENGTHS)
        changes = dict(features)
        for name, length in (("q_lengths", q), ("kv_lengths", k)):
            if name in changes:
                changes[name] = tuple(min(n, length) for n in changes[name])
        dims = rng.choice(((64, 64), (128, 128), (72, 96), (192, 128), (256, 256)))
        changes |= {"head_dim": dims[0], "head_dim_v": dims[1], "dtype": rng.choice(("bfloat16", "float16"))}
        mode = rng.choice(list(MODES))
        cells.append((cell(q=q, k=k, group=group, kv_heads=2, **changes), mode, rng.randrange(100)))
    return cells


@pytest.mark.matrix
@pytest.mark.parametrize(("cell", "mode", "seed"), matrix(), ids=str)
def test_every_feature_with_every_group(cell, mode, seed):
    assert_attention(cell, mode, seed)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "cell",
    [
        cell(k=1100, kv_heads=2, group=3),  # two splits
        cell(k=8300, kv_heads=3, group=1, head_dim=8),  # eight, and more if they had 1024 keys each
        cell(k=520, q=2, batch=(3,), kv_lengths=(520, 0, 513), q_lengths=(2, 1, 0), causal=True, sinks=True),
    ],
    ids=str,
)
def test_few_queries_see_all_their_keys(cell):
    assert kernels(assert_attention(cell, "random")) == ["decode", "combine"]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("page_size", "q", "head_dim"),
    [
        *((1, 1, 64), (3, 35, 64), (7, 70, 64), (16, 35, 64), (96, 5, 64), (128, 2, 64), (256, 65, 64)),
        *((1, 3, 256), (3, 35, 200), (8, 2, 256)),  # lanes copy into a ring of two slots; TMA
    ],
)
def test_pages_of_every_kind(page_size, q, head_dim, mode):
    x = in_pages((127, 0, 129, 300), page_size, q, head_dim)
    got, _ = call_paged(x, mode)
    assert_as_exact(
        got, testing.attention_paged(x), testing.attention_paged(x, testing.rounded), "bfloat16", 2, EXP2_ERROR
    )


@pytest.mark.matrix
def test_an_index_outside_the_pool_reads_the_nearest_page():
    for page_size in (2, 16):
        x = in_pages((2 * page_size,), page_size)
        last = len(x["k_pages"]) - 1
        for name in ("k_pages", "v_pages"):
            x[name][[0, last]] = x[name][x["page_table"][0]]
        wrong, right = (call_paged(x | {"page_table": np.array([t], np.int32)})[0] for t in ([-7, 99], [0, last]))
        assert_same_bits(wrong, right)


@pytest.mark.matrix
def test_a_sequence_has_the_same_result_in_any_batch():
    lengths = (30, 1050)
    x = testing.random(cell(batch=(2,), k=1100, kv_lengths=lengths))
    together, _ = call(x, "random")
    for b, length in enumerate(lengths):
        alone = {name: a[b : b + 1] for name, a in x.items()}
        got, _ = call(alone | {name: alone[name][:, : max(length, 256)] for name in "kv"})
        assert_same_bits(got, testing.Forward(together.out[b : b + 1], together.lse[b : b + 1]))


@pytest.mark.matrix
def test_keys_beyond_a_length_may_be_nan():
    lengths = (70, 600)
    x = testing.random(cell(batch=(2,), k=700, kv_lengths=lengths))
    expected, _ = call(x)
    for name in "kv":
        for entry, length in enumerate(lengths):
            x[name][entry, length:] = np.nan
    assert_same_bits(call(x, "random")[0], expected)
