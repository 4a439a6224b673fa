"""Few queries and many keys on a GPU, contiguous and in pages: our kernels against exact attention."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.plan.expr import as_expr
from jax_fa4.testing import Cell

pytestmark = pytest.mark.gpu

BASE = {"q": 1, "k": 3000, "group": 4, "head_dim": 128, "dtype": "bfloat16"}
HEAD_DIMS = [(8, None), (64, None), (72, None), (96, None), (192, 128), (128, 64), (40, 248), (256, None)]
FEATURES = {
    "causal": {"causal": True, "q": 5},
    "window": {"window": (1500, 60), "q": 7},
    "q_offset": {"window": (None, 20), "q_offset": 1077, "q": 3},
    "lengths": {"q": 4, "q_lengths": (0, 3), "kv_lengths": (2999, 513), "causal": True},
    "softcap": {"softcap": 20.0, "kv_lengths": (0, 1)},
    "sinks": {"sinks": True, "kv_lengths": (0, 2000)},
}
CELLS = [
    *(Cell(**{**BASE, **feature}) for feature in FEATURES.values()),
    *(Cell(**{**BASE, **feature, "head_dim": 64, "dtype": "float16", "group": 3}) for feature in FEATURES.values()),
    *(Cell(**{**BASE, "head_dim": d, "head_dim_v": e, "k": 1111, "causal": True}) for d, e in HEAD_DIMS),
    *(
        Cell(**{**BASE, "k": k, "group": g, "q": q})
        for k, g, q in ((256, 64, 1), (257, 1, 64), (70000, 8, 8), (513, 7, 9))
    ),
    *(  # several tiles of a kv head
        Cell(**{**BASE, "group": 8, "q": q, "k": 4100, **mask})
        for q, mask in ((17, {"causal": True}), (32, {"window": (1500, 60)}), (25, {"causal": True, "batch": (3,)}))
    ),
    Cell(**{**BASE, "batch": (2, 3), "kv_heads": 3, "layout": "BNTH", "causal": True, "q": 2}),
]
PAGE_SIZES = [1, 3, 4, 16, 48, 64, 256, 1000]
PAGED = [
    {"q": 1},
    {"q": 70, "group": 3, "window": (700, None)},  # several tiles
    {"q": 4, "softcap": 15.0, "sinks": True, "causal": False},
    {"q": 2, "head_dim": 64, "dtype": "float16", "group": 8},
    {"q": 2, "head_dim": 256, "group": 2},
    {"q": 2, "head_dim": 72, "group": 1},
]


def run(function, x):
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in x.items() if name not in arrays}
    program = jax.jit(lambda **a: function(**a, **static, return_lse=True, implementation="kernel"))
    return testing.Forward(*program(**arrays))


call = functools.partial(run, jax_fa4.attention)
call_paged = functools.partial(run, jax_fa4.attention_paged)


def assert_close(got, exact, rounded, dtype, factor):
    for name, kind in (("out", dtype), ("lse", "float32")):
        a, b, c = (np.asarray(getattr(result, name), np.float64) for result in (got, exact, rounded))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b), err_msg=name)
        assert testing.error_ratio(a, b, c, kind, factor) <= 1, name


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_few_queries_see_all_their_keys(cell):
    x = testing.random(cell, seed=CELLS.index(cell))
    got = call(x)
    factor = 3 if "softcap" in x else 2
    assert_close(got, testing.attention(x), testing.rounded(x), cell.dtype, factor)


def in_pages(lengths, page_size, *, seed=0, q=1, group=4, head_dim=128, dtype="bfloat16", sinks=False, **options):
    """Keyword arguments of `attention_paged`: two kv heads, pages in random order, NaN in what no sequence has."""
    rng, dtype = np.random.default_rng(seed), testing.np_dtype(dtype)
    slots = -(-max(lengths) // page_size)
    used = [-(-length // page_size) for length in lengths]
    num_pages = sum(used) + 3
    order, table = iter(rng.permutation(num_pages)), np.full((len(lengths), slots), num_pages + 5, np.int32)
    pools = {name: np.full((num_pages, page_size, 2, head_dim), np.nan, dtype) for name in ("k_pages", "v_pages")}
    for b, length in enumerate(lengths):
        for slot in range(used[b]):
            table[b, slot] = next(order)
            rows = min(page_size, length - slot * page_size)
            for pool in pools.values():
                pool[table[b, slot], :rows] = rng.standard_normal((rows, 2, head_dim)).astype(dtype)
    x = {"q": rng.standard_normal((len(lengths), q, 2 * group, head_dim)).astype(dtype), **pools}
    x |= {"page_table": table, "kv_lengths": np.asarray(lengths, np.int32), **options}
    return x | ({"sinks": rng.standard_normal(2 * group).astype(np.float32)} if sinks else {})


@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        *((page_size, PAGED[0]) for page_size in PAGE_SIZES),
        *((16, options) for options in PAGED[1:]),
        *((page_size, {"q": 1, "head_dim": 256, "group": 1}) for page_size in (1, 64)),
        (128, PAGED[3]),  # as many keys as a tile has
    ],
    ids=str,
)
def test_keys_may_lie_in_pages_of_any_size(page_size, options):
    x = in_pages((1500, 0, 1, 777), page_size, **options)
    got = call_paged(x)
    exact, rounded = testing.attention_paged(x), testing.attention_paged(x, testing.rounded)
    assert_close(got, exact, rounded, str(x["q"].dtype), 3 if "softcap" in x else 2)


def with_full_pools(x):
    """The same call with numbers in every row of every page."""
    rng = np.random.default_rng(7)
    return x | {name: rng.standard_normal(x[name].shape).astype(x[name].dtype) for name in ("k_pages", "v_pages")}


def test_an_index_outside_the_pool_reads_the_nearest_page():
    x = with_full_pools(in_pages((1500, 0, 1, 777), 16))
    last = len(x["k_pages"]) - 1
    wrong = x["page_table"].copy()
    wrong[0, :4], wrong[2, 0], wrong[3, 47:49] = (-1, -(2**31), last + 1, 2**31 - 1), -7, (last + 1, 99_999)
    right = x | {"page_table": np.clip(wrong, 0, last)}
    got = call_paged(x | {"page_table": wrong})
    assert_close(got, testing.attention_paged(right), testing.attention_paged(right, testing.rounded), "bfloat16", 2)
    jax.tree.map(np.testing.assert_array_equal, got, call_paged(right))


@pytest.mark.parametrize("page_size", [16, 256])
def test_pages_left_of_a_window_are_not_read(page_size):
    lengths, left = (5000, 300, 0, 2049), 700
    x = in_pages(lengths, page_size, q=2, window=(left, None))
    poisoned = x | {name: x[name].copy() for name in ("k_pages", "v_pages")}
    for table, length in zip(x["page_table"], lengths, strict=True):
        first_tile = max(length - 2 - left, 0) // 128 * 128
        for name in ("k_pages", "v_pages"):
            poisoned[name][table[: first_tile // page_size]] = np.nan
    assert sum(np.isnan(page.astype(np.float32)).all() for page in poisoned["k_pages"]) > 3 + 4000 // page_size
    jax.tree.map(np.testing.assert_array_equal, call_paged(poisoned), call_paged(x))


@pytest.mark.parametrize(("sequences", "queries"), [(0, 1), (0, 0), (3, 0)])
def test_without_sequences_or_queries_there_is_nothing(sequences, queries):
    x = in_pages((300, 0, 77), 16, q=1)
    x |= {"q": np.zeros((sequences, queries, 8, 128), x["q"].dtype)}
    x |= {name: x[name][:sequences] for name in ("page_table", "kv_lengths")}
    out, lse = call_paged(x)
    assert (out.shape, lse.shape) == (x["q"].shape, (sequences, 8, queries))


def test_a_length_below_zero_is_none():
    x = in_pages((1500, 0, 0, 777), 16, q=2, q_lengths=np.array([2, 1, 2, 0], np.int32))
    below = {name: np.where(x[name] == 0, -1, x[name]) for name in ("kv_lengths", "q_lengths")}
    jax.tree.map(np.testing.assert_array_equal, call_paged(x | below), call_paged(x))


def test_tokens_are_appended_to_the_pool_itself():
    shape, new = (
        (500, 16, 2, 128),
        np.random.default_rng(0).standard_normal((2, 3, 1, 2, 128)).astype(testing.np_dtype("bfloat16")),
    )
    table, positions = np.array([[4, 0], [499, 7], [3, 2]], np.int32), np.array([[17], [0], [-1]], np.int32)
    pools = [jnp.full(shape, n, jnp.bfloat16) for n in (1, 2)]
    program = jax.jit(jax_fa4.append_kv, donate_argnums=(0, 1)).lower(*pools, *new, table, positions).compile()
    assert not re.findall(r"= bf16\[500,16,2,128\]\S* copy(?:-start)?\(", program.as_text())
    places = [pool.unsafe_buffer_pointer() for pool in pools]
    result = program(*pools, *map(jnp.asarray, new), jnp.asarray(table), jnp.asarray(positions))
    assert [pool.unsafe_buffer_pointer() for pool in result] == places
    for n, (pool, tokens) in enumerate(zip(result, new, strict=True), 1):
        expected = np.full(shape, n, tokens.dtype)
        expected[0, 1], expected[499, 0] = tokens[0, 0], tokens[1, 0]
        np.testing.assert_array_equal(pool, expected)


def test_parts_of_the_keys_combine_to_the_whole():
    x = testing.random(Cell(**{**BASE, "q": 3}))
    parts = [slice(0, 300), slice(300, 300), slice(300, 1411), slice(1411, 3000)]
    results = [call(x | {name: x[name][:, part] for name in "kv"}) for part in parts]
    got = testing.Forward(*jax.jit(jax_fa4.combine)(*map(jnp.stack, zip(*results, strict=True))))
    assert_close(got, testing.attention(x), testing.rounded(x), "bfloat16", 3)


def test_a_decoded_token_is_the_one_that_the_whole_sequence_gives():
    x = testing.random(Cell(**{**BASE, "q": 700, "k": 700, "causal": True}))
    whole, exact, rounded = call(x), testing.attention(x), testing.rounded(x)
    last = call({**x, "q": x["q"][:, -1:]})
    difference = np.abs(np.asarray(whole.out[:, -1:], np.float64) - np.asarray(last.out, np.float64)).max()
    assert difference <= 2 * testing.error_bound(exact.out, rounded.out, "bfloat16", 2)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_traced_scale_may_have_any_sign(scale):
    x = testing.random(Cell(**BASE))
    x["softmax_scale"] = np.full((), scale, np.float32)
    got = call(x)
    assert_close(got, testing.attention(x), testing.rounded(x), "bfloat16", 2)


def test_a_sequence_has_the_same_bits_in_any_batch():
    lengths = (5000, 1, 130, 20000, 4096, 0, 777)
    x = testing.random(Cell(**{**BASE, "batch": (7,), "k": 20000, "kv_lengths": lengths}))
    together = call(x)
    for b, length in enumerate(lengths):
        one = {name: a[b : b + 1] for name, a in x.items()}
        capacity = max(length, 256)
        alone = call({**one, "k": one["k"][:, :capacity], "v": one["v"][:, :capacity]})
        np.testing.assert_array_equal(alone.out[0], together.out[b])
        np.testing.assert_array_equal(alone.lse[0], together.lse[b])


def test_a_sequence_has_the_same_bits_padded_to_any_length():
    queries = (1, 40, 3)
    x = in_pages((5000, 20000, 2100), 16, q=40)
    padded = call_paged(x | {"q_lengths": np.array(queries, np.int32)})
    for b, count in enumerate(queries):
        one = {name: x[name][b : b + 1] for name in ("page_table", "kv_lengths")}
        alone = call_paged(x | one | {"q": x["q"][b : b + 1, :count]})
        np.testing.assert_array_equal(padded.out[b, :count], alone.out[0])
        np.testing.assert_array_equal(padded.lse[b, :, :count], alone.lse[0])
        assert (padded.out[b, count:] == 0).all()


@pytest.mark.parametrize("multiprocessors", [1, 7, 1000])
def test_splits_have_the_same_bits_on_a_device_of_any_size(monkeypatch, multiprocessors):
    x = testing.random(Cell(**{**BASE, "batch": (30,), "kv_heads": 8, "k": 4000, "causal": True}))
    expected = call(x)  # 960 splits of 240 tiles
    monkeypatch.setattr("jax_fa4.plan.decode.multiprocessors", lambda: as_expr(multiprocessors))
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, call(x), expected)


def test_pages_and_contiguous_keys_give_the_same_bits():
    x = in_pages((1500, 0, 1, 777), 16, q=3)
    keys = {n: np.zeros((4, 1504, 2, 128), x["q"].dtype) for n in "kv"}
    for name, a in keys.items():
        for b, length in enumerate(x["kv_lengths"]):
            pages = x[f"{name}_pages"][np.minimum(x["page_table"][b], len(x["k_pages"]) - 1)]
            a[b, :length] = pages.reshape(-1, 2, 128)[:length]
    contiguous = {"q": x["q"], **keys, "kv_lengths": x["kv_lengths"], "causal": True}
    jax.tree.map(np.testing.assert_array_equal, call(contiguous), call_paged(x))


PACKED_LENGTHS = (1500, 0, 1, 777, 5000, 64)
OFFSETS = (2, 3, 7, 8, 8, 100, 117)  # a chunk of a prompt, one that isn't served, one token, rows of no sequence
PACKED = {
    "one-page-a-key": {"page_size": 1},
    "three-keys-a-page": {"page_size": 3},
    "small-pages": {"page_size": 16, "sinks": True},
    "large-pages": {"page_size": 64, "window": (700, None)},
    "splits-in-a-window": {"page_size": 64, "window": (4000, None)},
    "all-keys": {"page_size": 48, "causal": False, "softcap": 15.0},
    "gaps": {"page_size": 16, "q_lengths": (1, 3, 0, 9, 61, 17), "sinks": True, "window": (0, 0)},
    "head-dim-64": {"page_size": 16, "head_dim": 64, "dtype": "float16", "group": 8},
    "head-dim-256": {"page_size": 16, "head_dim": 256, "group": 2},
    "head-dim-72": {"page_size": 16, "head_dim": 72, "group": 1},
}


def packed_in_pages(lengths, offsets, page_size, *, rows=0, q_lengths=None, **options):
    """Keyword arguments of `attention_paged`: packed queries, of which `rows` lie behind the last sequence."""
    x = in_pages(lengths, page_size, **options)
    *_, heads, dim = x["q"].shape
    q = np.random.default_rng(1).standard_normal((offsets[-1] + rows, heads, dim)).astype(x["q"].dtype)
    more = {} if q_lengths is None else {"q_lengths": np.asarray(q_lengths, np.int32)}
    return x | more | {"q": q, "cu_seqlens_q": np.asarray(offsets, np.int32)}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_packed_queries_see_the_keys_of_their_own_pages(options):
    x = packed_in_pages(PACKED_LENGTHS, OFFSETS, rows=3, **options)
    got = call_paged(x)
    exact, rounded = testing.attention_paged(x), testing.attention_paged(x, testing.rounded)
    assert_close(got, exact, rounded, str(x["q"].dtype), 3 if "softcap" in x else 2)


def test_packed_queries_have_the_bits_of_padded_ones_and_of_those_of_a_sequence_alone():
    lengths = (5000, 1, 130, 20000, 4096, 0, 777)
    x = in_pages(lengths, 16, q=3)
    packed = {**x, "q": x["q"].reshape(21, 8, 128), "cu_seqlens_q": np.arange(0, 24, 3, dtype=np.int32)}
    padded, got = call_paged(x), call_paged(packed)
    np.testing.assert_array_equal(got.out, padded.out.reshape(21, 8, 128))
    np.testing.assert_array_equal(got.lse, np.moveaxis(np.asarray(padded.lse), 1, 0).reshape(8, 21))
    for b in range(len(lengths)):
        one = {name: packed[name][b : b + 1] for name in ("page_table", "kv_lengths")}
        one |= {"q": packed["q"][3 * b : 3 * b + 3], "cu_seqlens_q": np.array([0, 3], np.int32)}
        alone = call_paged(packed | one)
        np.testing.assert_array_equal(alone.out, got.out[3 * b : 3 * b + 3])


def test_sequences_in_pages_may_be_very_many():
    rng, count = np.random.default_rng(0), 65_536
    lengths, pages = rng.integers(0, 2, count), rng.permutation(count).reshape(count, 1).astype(np.int32)
    k, v = (rng.standard_normal((count, 1, 1, 64)).astype(testing.np_dtype("bfloat16")) for _ in range(2))
    q = rng.standard_normal((count, 2, 64)).astype(k.dtype)
    x = {"q": q, "k_pages": k, "v_pages": v, "page_table": pages, "kv_lengths": lengths.astype(np.int32)}
    out, lse = call_paged(x | {"cu_seqlens_q": np.arange(count + 1, dtype=np.int32)})
    seen = np.where(lengths[:, None] > 0, v[pages[:, 0], 0, 0], 0)  # of the one key
    np.testing.assert_array_equal(out, np.repeat(seen[:, None], 2, axis=1).astype(k.dtype))
    np.testing.assert_array_equal(np.isfinite(lse), np.broadcast_to(lengths > 0, (2, count)))


@pytest.mark.parametrize("lengths", [(0, 1, 127), (512, 1029, 2950)])
def test_keys_beyond_a_length_change_nothing_even_as_nan(lengths):
    x = testing.random(Cell(**{**BASE, "batch": (3,), "kv_lengths": lengths}))
    poisoned = dict(x)
    for name in ("k", "v"):
        poisoned[name] = x[name].copy()
        for entry, length in enumerate(lengths):
            poisoned[name][entry, length:] = np.nan
    jax.tree.map(np.testing.assert_array_equal, call(poisoned), call(x))


def test_gradients_of_pages_are_those_of_blockwise_jax():
    x = in_pages((300, 0, 77), 16, q=2)
    finite = {name: np.nan_to_num(x[name], nan=0) for name in ("q", "k_pages", "v_pages")}
    others = {name: jnp.asarray(x[name]) for name in ("page_table", "kv_lengths")}

    def gradients(implementation):
        def loss(wrt):
            out = jax_fa4.attention_paged(**wrt, **others, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss))({name: jnp.asarray(a) for name, a in finite.items()})

    for name, gradient in gradients(None).items():
        expected = np.asarray(gradients("xla")[name], np.float32)
        np.testing.assert_allclose(np.asarray(gradient, np.float32), expected, rtol=0, atol=0.02 * abs(expected).max())
    with pytest.raises(NotImplementedError, match="gradient kernel for pages of keys"):
        gradients("kernel")
