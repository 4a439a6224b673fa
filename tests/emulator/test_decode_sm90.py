"""Our Hopper kernels for few queries, run in the emulator, against exact attention in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import emulate, testing
from jax_fa4.emulator.launch import Options
from jax_fa4.plan.expr import as_expr
from jax_fa4.testing import Cell

from .test_forward_sm90 import assert_as_exact

pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")

BASE = {"batch": (1,), "q": 1, "kv_heads": 1, "group": 4, "head_dim": 64, "dtype": "bfloat16"}
CELLS = [
    Cell(**{**BASE, **changes})
    for changes in (
        {"k": 257, "group": 64},
        {"k": 1100, "kv_heads": 2, "group": 3},
        {"k": 513, "q": 5, "causal": True, "head_dim": 128, "dtype": "float16"},
        {"k": 300, "q": 7, "window": (200, 10), "layout": "BNTH"},
        {"k": 520, "q": 2, "batch": (3,), "kv_lengths": (520, 0, 513), "q_lengths": (2, 1, 0), "causal": True}
        | {"sinks": True},
        {"k": 260, "q": 3, "softcap": 3.0, "q_offset": 200, "causal": True, "head_dim": 72, "head_dim_v": 96},
        {"k": 257, "head_dim": 256},
    )
]
LATE = Options(completion="late")
RANDOM = Options(completion="random", order="random", seed=1)


def run(function, x, options=LATE):
    """out and lse of a call, and its launches."""
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in x.items() if name not in arrays}
    program = jax.jit(lambda a: function(**a, **static, return_lse=True, implementation="emulate"))
    with emulate.recording(options) as launches:
        result = testing.Forward(*map(np.asarray, program(arrays)))
    return result, launches


call = functools.partial(run, jax_fa4.attention)
call_paged = functools.partial(run, jax_fa4.attention_paged)


def assert_same_bits(got, expected) -> None:
    assert got.out.tobytes() == expected.out.tobytes()
    assert got.lse.tobytes() == expected.lse.tobytes()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_few_queries_see_all_their_keys(cell):
    x = testing.random(cell)
    got, launches = call(x)
    assert [launch.entry.split("_")[2] for launch in launches] == ["decode"]
    assert_as_exact(got, testing.attention(x), testing.rounded(x), cell.dtype, 3 if "softcap" in x else 2)


def test_a_negative_scale_turns_the_order_of_scores():
    x = testing.random(Cell(**BASE, k=257)) | {"softmax_scale": np.full((), -0.3, np.float32)}
    assert_as_exact(call(x)[0], testing.attention(x), testing.rounded(x), "bfloat16", 2)


def in_pages(lengths, page_size: int, q: int = 2, head_dim: int = 64):
    """Keyword arguments of `attention_paged`: pages in random order, NaN in what no sequence has."""
    rng, dtype = np.random.default_rng(0), testing.np_dtype("bfloat16")
    slots, used = -(-max(lengths) // page_size), [-(-length // page_size) for length in lengths]
    order = iter(rng.permutation(sum(used) + 2))
    table = np.full((len(lengths), slots), 1 << 20, np.int32)
    pools = {n: np.full((sum(used) + 2, page_size, 2, head_dim), np.nan, dtype) for n in ("k_pages", "v_pages")}
    for b, length in enumerate(lengths):
        for slot in range(used[b]):
            table[b, slot] = next(order)
            rows = min(page_size, length - slot * page_size)
            for pool in pools.values():
                pool[table[b, slot], :rows] = rng.standard_normal((rows, 2, head_dim)).astype(dtype)
    queries = rng.standard_normal((len(lengths), q, 4, head_dim)).astype(dtype)
    return {"q": queries, **pools, "page_table": table, "kv_lengths": np.array(lengths, np.int32)}


@pytest.mark.parametrize(("page_size", "q"), [(3, 2), (16, 2), (96, 2), (16, 35)])  # 35 queries make two tiles
def test_keys_may_lie_in_pages_of_any_size(page_size, q):
    x = in_pages((100, 0, 67), page_size, q)
    exact, rough = testing.attention_paged(x), testing.attention_paged(x, testing.rounded)
    assert_as_exact(call_paged(x)[0], exact, rough, "bfloat16", 2)


PACKED = {
    "a row of no sequence on both sides": {"cu_seqlens_q": [1, 8, 8, 48], "total": 52},
    "window": {"cu_seqlens_q": [0, 40, 41, 45], "window": (30, None), "total": 45},
    "gaps": {"cu_seqlens_q": [0, 20, 20, 33], "q_lengths": [18, 0, 2], "softcap": 3.0, "total": 33},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_packed_queries_see_the_pages_of_their_sequence(options):
    lists = {name: np.array(value, np.int32) for name, value in options.items() if isinstance(value, list)}
    x, rng = in_pages((100, 0, 67), 16) | options | lists, np.random.default_rng(3)
    x["q"] = rng.standard_normal((x.pop("total"), 4, 64)).astype(x["q"].dtype)
    x["sinks"] = rng.standard_normal(4).astype(np.float32)
    got, launches = call_paged(x, RANDOM)
    assert [launch.entry.split("_")[2] for launch in launches] == ["schedule", "decode"]
    assert_as_exact(got, testing.attention_paged(x), testing.attention_paged(x, testing.rounded), "bfloat16", 3)


def test_packed_queries_have_the_bits_of_padded_ones():
    x = in_pages((100, 0, 67), 16, 3)
    packed = x | {"q": x["q"].reshape(9, 4, 64), "cu_seqlens_q": np.array([0, 3, 6, 9], np.int32)}
    padded, _ = call_paged(x)
    got, _ = call_paged(packed)
    assert got.out.tobytes() == padded.out.tobytes()
    assert got.lse.tobytes() == np.ascontiguousarray(np.moveaxis(padded.lse, 1, 0)).tobytes()


def test_a_sequence_has_the_same_bits_padded_to_any_length():
    x = in_pages((2100,), 16, 20)  # 40 rows of a kv head, of which one query has 2
    padded, _ = call_paged(x | {"q_lengths": np.array([1], np.int32)}, RANDOM)
    alone, _ = call_paged(x | {"q": x["q"][:, :1]})  # three splits
    assert padded.out[:, :1].tobytes() == alone.out.tobytes()
    assert np.ascontiguousarray(padded.lse[..., :1]).tobytes() == alone.lse.tobytes()


def test_an_index_outside_the_pool_reads_the_nearest_page():
    x = in_pages((32,), 16)
    last = len(x["k_pages"]) - 1
    for name in ("k_pages", "v_pages"):
        x[name][[0, last]] = x[name][x["page_table"][0]]
    wrong, right = (call_paged(x | {"page_table": np.array([t], np.int32)})[0] for t in ([-7, 99], [0, last]))
    assert_same_bits(wrong, right)


def test_pages_left_of_a_window_are_not_loaded():
    x = in_pages((300, 0, 267), 16)
    whole, narrow = call_paged(x)[1], call_paged(x | {"window": (30, None)})
    loaded = [launches[0].result.stats.total("tma_load_bytes") for launches in (whole, narrow[1])]
    tile = 2 * 128 * 4 * 64  # bytes of both heads' keys and values
    assert loaded == [(3 + 3) * tile, (1 + 2) * tile]  # keys from 268 and from 235 on are in one tile and in two

    for name in ("k_pages", "v_pages"):
        x[name][x["page_table"][0, : 256 // 16]] = np.nan
        x[name][x["page_table"][2, : 128 // 16]] = np.nan
    assert_same_bits(call_paged(x | {"window": (30, None)})[0], narrow[0])


def test_a_sequence_has_the_same_result_in_any_batch():
    lengths = (30, 1050)
    x = testing.random(Cell(**{**BASE, "batch": (2,), "k": 1100, "kv_lengths": lengths}))
    together, _ = call(x, RANDOM)
    for b, length in enumerate(lengths):
        alone = {name: a[b : b + 1] for name, a in x.items()}
        capacity = max(length, 256)
        got, _ = call(alone | {name: alone[name][:, :capacity] for name in "kv"})
        assert_same_bits(got, testing.Forward(together.out[b : b + 1], together.lse[b : b + 1]))


def test_splits_have_the_same_bits_on_a_device_of_any_size(monkeypatch):
    x = testing.random(Cell(**{**BASE, "k": 1100, "kv_heads": 2}))
    monkeypatch.setattr("jax_fa4.configs.decode.MAX_CLUSTERED_CTAS", 0)
    with monkeypatch.context() as patch:
        patch.setattr("jax_fa4.plan.decode.CTAS_PER_PLACE", 1)
        together, before = call(x)
    monkeypatch.setattr("jax_fa4.plan.decode.multiprocessors", lambda: as_expr(132))
    apart, after = call(x, RANDOM)
    ctas = [launches[0].result.stats.by_warp("griddepcontrol")[0] for launches in (before, after)]
    assert ctas == [2, 4]
    assert_same_bits(together, apart)
    loaded = [launches[0].result.stats.total("tma_load_bytes") for launches in (before, after)]
    assert loaded == [1100 // 128 * 2 * 128 * 4 * 64 + 2 * 128 * 4 * 64] * 2  # each key once for all heads of a group


def test_clusters_merge_splits_to_the_bits_that_the_combine_kernel_gives(monkeypatch):
    cell = {"k": 2100, "q": 3, "kv_heads": 2, "kv_lengths": (2100, 0), "q_lengths": (2, 3), "sinks": True}
    x = testing.random(Cell(**{**BASE, "batch": (2,), **cell}))
    merged, launches = call(x, RANDOM)
    assert len(launches) == 1
    monkeypatch.setattr("jax_fa4.configs.decode.MAX_CLUSTERED_CTAS", 0)
    combined, launches = call(x)
    assert [launch.entry.split("_")[2] for launch in launches] == ["decode", "combine"]
    assert_same_bits(merged, combined)


def test_keys_beyond_a_length_may_be_nan():
    lengths = (70, 600)
    x = testing.random(Cell(**{**BASE, "batch": (2,), "k": 700, "kv_lengths": lengths}))
    expected, _ = call(x)
    for name in "kv":
        for entry, length in enumerate(lengths):
            x[name][entry, length:] = np.nan
    assert_same_bits(call(x, RANDOM)[0], expected)
