"""Our Blackwell forward kernel, run in the emulator, against exact attention in float64. No such GPU was at hand.

`pytest -m matrix tests/emulator` runs the whole matrix: minutes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import cubins, launcher, testing
from jax_fa4.configs import forward_config
from jax_fa4.emulate import recording
from jax_fa4.emulator.errors import ExecutionError
from jax_fa4.emulator.launch import Options
from jax_fa4.testing import Cell

from .forward import forward
from .test_forward_sm90 import MODES, assert_exact, call_of, compiled, spec_of

EXP2_ERROR = 8.6e-5  # of the polynomial: a row that sees two keys may have it in its sum
BASE = Cell(batch=(1,), kv_heads=1, head_dim=64, dtype="bfloat16")


def cell(**changes) -> Cell:
    return dataclasses.replace(BASE, **changes)


def emulate(cell: Cell, options: Options, seed: int = 0, arch: str = "sm_100a", **changes):
    x = testing.random(cell, seed) | changes
    config = forward_config(spec_of(cell, x), arch)
    assert config is not None
    out, lse, result = forward(compiled(config), config, call_of(cell, x, config), options)
    return x, out.view(testing.np_dtype(cell.dtype)), lse, result


def emulate_persistent(cell: Cell, ctas: int, options: Options, seed: int = 0):
    x = testing.random(cell, seed)
    config = forward_config(spec_of(cell, x), "sm_100a")
    assert config is not None
    assert config.walks
    call = dataclasses.replace(call_of(cell, x, config), multiprocessors=ctas)
    out, lse, _ = forward(compiled(config), config, call, options)
    return x, out.view(testing.np_dtype(cell.dtype)), lse


def exponentials(result) -> int:
    return sum(result.stats.by_warp("ex2").values())


QUICK = [
    cell(q=1, k=1, head_dim=128),
    cell(q=257, k=129, head_dim=128),  # the second CTA has one query, and its second tile none
    cell(q=130, k=300, kv_heads=2, group=2, batch=(2,)),
    cell(q=150, k=400, head_dim=128, softmax_scale=2.0),  # maxima grow by more than the threshold
    cell(q=60, k=130, head_dim=128, softmax_scale=-0.3),
    cell(q=300, k=270, causal=True, group=2, dtype="float16"),
    cell(q=200, k=77, causal=True, dtype="float16"),  # the first tile sees no key
    cell(q=20, k=0, causal=True, dtype="float16"),
    cell(q=150, k=300, window=(40, 10), head_dim=128, dtype="float16"),
    cell(q=70, k=90, head_dim=72, head_dim_v=96, causal=True),
    cell(q=100, k=130, segments=40, kv_heads=2),  # rows that see few keys: the polynomial's error shows in lse
    cell(q=20, k=130, batch=(3,), q_lengths=(0, 7, 20), kv_lengths=(130, 0, 70), causal=True, q_offset=9),
    cell(q=70, k=150, softcap=3.0, sinks=True, mask="keys", group=2),
    cell(q=270, k=150, segments=3, bias="shared", kv_heads=2),
    cell(q=140, k=270, head_dim=256, causal=True),  # a pair, a query tile each
]


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_forward_is_attention(cell):
    x, out, lse, _ = emulate(cell, MODES["late"])
    assert_exact(x, out, lse, cell.dtype, EXP2_ERROR)


def test_sm_103a_computes_all_exponentials_in_hardware():
    small = cell(q=100, k=200)
    x, out, lse, result = emulate(small, MODES["early"], arch="sm_103a")
    assert_exact(x, out, lse, small.dtype)
    _, _, _, emulating = emulate(small, MODES["early"])
    assert exponentials(emulating) < 0.9 * exponentials(result)


def test_keys_beyond_a_length_may_be_nan():
    padded = cell(q=20, k=130, batch=(3,), q_lengths=(20, 9, 1), kv_lengths=(70, 129, 128), causal=True, q_offset=9)
    x, expected, _, _ = emulate(padded, MODES["late"])
    for name in "kv":
        for entry, length in enumerate(x["kv_lengths"]):
            x[name][entry, length:] = np.nan
    _, out, _, _ = emulate(padded, MODES["random"], k=x["k"], v=x["v"])
    assert np.array_equal(out, expected)


def test_nan_in_a_key_reaches_every_query_that_sees_it():
    seen = cell(q=100, k=200, head_dim=128)
    k = testing.random(seen)["k"]
    k[0, 150] = np.nan
    _, out, lse, _ = emulate(seen, MODES["late"], k=k)
    assert np.isnan(out.astype(np.float32)).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("mode", ["early", "random", "strict"])
def test_results_do_not_depend_on_when_copies_complete_or_who_runs_first(mode):
    ragged = cell(q=260, k=270, head_dim=128, softmax_scale=1.0)
    _, expected, _, _ = emulate(ragged, MODES["late"])
    _, out, _, _ = emulate(ragged, MODES[mode])
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("fence", ["before", "after"])
def test_strict_mode_tells_a_missing_fence(fence):
    small = cell(q=20, k=77, causal=True, dtype="float16")
    x = testing.random(small)
    config = forward_config(spec_of(small, x), "sm_100a")
    broken = compiled(config).replace(f"tcgen05.fence::{fence}_thread_sync;", "", 1)
    forward(broken, config, call_of(small, x, config))
    with pytest.raises(ExecutionError, match="not ordered"):
        forward(broken, config, call_of(small, x, config), MODES["strict"])


def test_strict_mode_tells_weights_that_a_pairs_first_cta_multiplies_without_their_being_handed_over():
    pair = cell(q=140, k=140, head_dim=256, causal=True)
    x = testing.random(pair)
    config = forward_config(spec_of(pair, x), "sm_100a")
    broken = compiled(config).replace("mbarrier.arrive.release.cluster", "mbarrier.arrive.release.cta")
    with pytest.raises(ExecutionError, match="whose arrival had the scope of one CTA"):
        forward(broken, config, call_of(pair, x, config), MODES["strict"])


def test_each_tile_loads_its_keys_once_and_multiplies_them_twice():
    _, _, _, result = emulate(cell(q=512, k=256, head_dim=128), MODES["early"])
    tile = 128 * 128
    assert result.stats.total("tma_load_bytes") == 2 * tile * 8  # four tiles of Q, two blocks of K and of V
    assert result.stats.total("tcgen05_flops") == 2 * 2 * tile * 128 * 8


@pytest.mark.parametrize(("head_dim", "k", "ctas", "mode"), [(64, 100, 1, "early"), (128, 270, 2, "random")])
def test_a_cta_may_compute_tile_after_tile(head_dim, k, ctas, mode):
    x, out, lse = emulate_persistent(cell(q=300, k=k, head_dim=head_dim, group=3), ctas, MODES[mode])
    assert_exact(x, out, lse, BASE.dtype, EXP2_ERROR)


def emulate_asking(cell: Cell, options: Options, seed: int = 0):
    """`attention` where cluster launch control is asked for: results, and what the kernel did."""
    x = testing.random(cell, seed)
    asked = jax_fa4.target_arch("sm_100a"), jax_fa4.cluster_launch_control()
    with asked[0], asked[1], recording(options) as launches:
        out, lse = map(np.asarray, jax_fa4.attention(**x, implementation="emulate", return_lse=True))
    return x, out, lse, launches[0].result


def test_a_cta_takes_over_what_has_not_started_where_asked():
    problem = cell(q=700, k=100, causal=True, kv_heads=2)  # 6 tiles, of which some see no key
    x, out, lse, result = emulate_asking(problem, dataclasses.replace(MODES["random"], resident_clusters=2))
    assert_exact(x, out, lse, problem.dtype, EXP2_ERROR)
    executed = sum(result.stats.opcodes.values(), collections.Counter())
    assert sum(n for opcode, n in executed.items() if opcode.startswith("tcgen05.alloc")) == 2  # CTAs that have started


@pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks")
def test_programs_for_blackwell_launch_it_and_ask_for_tiles_where_asked():
    x = testing.random(cell(q=700, k=100, causal=True, kv_heads=2))

    def exported():
        checks = jax_fa4.export_disabled_checks()
        program = jax.jit(lambda q, k, v: jax_fa4.attention(q, k, v, causal=True, implementation="kernel"))
        return jax.export.export(program, platforms=["cuda"], disabled_checks=checks)(*(x[n] for n in "qkv"))

    with jax_fa4.target_arch("sm_100a"):
        plain = exported().mlir_module()
        with jax_fa4.cluster_launch_control():
            asking = exported().mlir_module()
    for text in (plain, asking):
        assert "jax_fa4_forward_sm_100a_bfloat16_d64_right_0" in text
    found = [forward_config(spec_of(cell(causal=True), x), "sm_100a", takes_over=t) for t in (False, True)]
    for text, config, other in ((plain, *found), (asking, *reversed(found))):
        assert in_mlir(cubins.get(config).key) in text
        assert in_mlir(cubins.get(other).key) not in text


def in_mlir(key: str) -> str:
    """The bytes of a hexadecimal key as MLIR writes them in a string."""
    text = bytes.fromhex(key).decode("latin-1")
    return "".join(c * 2 if c == "\\" else c if " " <= c <= "~" and c != '"' else f"\\{ord(c):02X}" for c in text)


def test_correction_warps_store_what_tma_cannot():
    padded = cell(q=160, k=130, batch=(3,), group=2, head_dim=72, head_dim_v=88, q_lengths=(0, 7, 160))
    x = testing.random(padded)
    config = dataclasses.replace(forward_config(spec_of(padded, x), "sm_100a"), out_by_tma=False)
    out, lse, result = forward(compiled(config), config, call_of(padded, x, config), MODES["random"])
    assert_exact(x, out.view(testing.np_dtype(padded.dtype)), lse, padded.dtype, EXP2_ERROR)
    assert not result.stats.total("tma_store_bytes")


LENGTHS = (1, 7, 100, 127, 128, 129, 255, 256, 257, 384, 511, 512)
FEATURES = [
    {},
    {"causal": True},
    {"window": (100, 20)},
    {"window": (130, None)},
    {"window": (None, 64)},
    {"causal": True, "q_offset": 40},
    {"kv_lengths": (200,)},
    {"q_lengths": (70,), "kv_lengths": (140,), "causal": True},
    {"segments": 3},
    {"segments": 4, "causal": True},
    {"softcap": 5.0},
    {"sinks": True},
    {"mask": "shared"},
    {"bias": "keys"},
    {"mask": "full", "bias": "shared", "segments": 2, "softcap": 5.0, "sinks": True, "window": (100, 20)},
    {"softmax_scale": 1.5},
]


def matrix() -> list[tuple[Cell, str, int]]:
    """Every feature in both dtypes and several head dims, with lengths drawn from LENGTHS."""
    rng = random.Random(0)
    cells = []

    def add(features, mode, **fields):
        q, k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        changes = dict(features)
        for name, length in (("q_lengths", q), ("kv_lengths", k)):
            if name in changes:
                changes[name] = tuple(min(n, length) for n in changes[name])
        heads = rng.choice(({"kv_heads": 2}, {"group": 2}))
        cells.append((cell(q=q, k=k, **fields, **heads, **changes), mode, rng.randrange(100)))

    for features, head_dim in itertools.product(FEATURES, (64, 128)):
        for dtype, mode in itertools.product(("bfloat16", "float16"), MODES):
            add(features, mode, head_dim=head_dim, dtype=dtype)
    modes = itertools.cycle(MODES)
    for features, (head_dim, head_dim_v) in itertools.product(FEATURES, ((192, 128), (256, 256), (136, 200))):
        add(features, next(modes), head_dim=head_dim, head_dim_v=head_dim_v)
    for head_dim, mode in zip(range(8, 129, 8), itertools.cycle(MODES)):
        dims = {"head_dim": head_dim, "head_dim_v": rng.randrange(8, 129, 8)}
        cells.append((cell(q=rng.choice(LENGTHS), k=rng.choice(LENGTHS), causal=True, **dims), mode, head_dim))
    return cells


@pytest.mark.matrix
@pytest.mark.parametrize("ctas", [1, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_tile_after_tile_with_any_number_of_ctas(ctas, mode):
    for head_dim, k in ((64, 1), (64, 300), (128, 129), (128, 512)):
        problem = cell(q=513, k=k, head_dim=head_dim, group=2)
        x, out, lse = emulate_persistent(problem, ctas, MODES[mode], seed=k)
        assert_exact(x, out, lse, problem.dtype, EXP2_ERROR)


@pytest.mark.matrix
@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_tiles_that_have_not_started_are_taken_over_by_any_number_of_clusters(clusters, mode):
    for head_dim, k, features in ((64, 300, {"causal": True}), (128, 129, {"window": (70, 5)}), (128, 200, {})):
        problem = cell(q=1100, k=k, head_dim=head_dim, group=2, **features)
        options = dataclasses.replace(MODES[mode], resident_clusters=clusters)
        x, out, lse, _ = emulate_asking(problem, options, seed=k)
        assert_exact(x, out, lse, problem.dtype, EXP2_ERROR)


@pytest.mark.matrix
@pytest.mark.parametrize(("cell", "mode", "seed"), matrix(), ids=str)
def test_every_feature_at_every_edge(cell, mode, seed):
    x, out, lse, _ = emulate(cell, dataclasses.replace(MODES[mode], seed=seed), seed)
    assert_exact(x, out, lse, cell.dtype, EXP2_ERROR)
