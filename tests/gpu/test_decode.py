"""Few queries and many keys on a GPU, contiguous and in pages: our kernels against exact attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
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
        error = np.abs(np.where(np.isinf(b), 0, a) - np.where(np.isinf(b), 0, b)).max(initial=0)
        assert error <= testing.error_bound(b, c, kind, factor), f"{name}: {error}"


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
    [*((page_size, PAGED[0]) for page_size in PAGE_SIZES), *((16, options) for options in PAGED[1:])],
    ids=str,
)
def test_keys_may_lie_in_pages_of_any_size(page_size, options):
    x = in_pages((1500, 0, 1, 777), page_size, **options)
    got = call_paged(x)
    exact, rounded = testing.attention_paged(x), testing.attention_paged(x, testing.rounded)
    assert_close(got, exact, rounded, str(x["q"].dtype), 3 if "softcap" in x else 2)


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


def test_splits_have_the_same_bits_when_ctas_make_several(monkeypatch):
    x = testing.random(Cell(**{**BASE, "batch": (30,), "kv_heads": 8, "k": 4000, "causal": True}))
    many = call(x)  # 1920 splits
    monkeypatch.setattr("jax_fa4.plan.decode.MIN_CTAS", 1 << 30)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, call(x), many)


def test_pages_and_contiguous_keys_give_the_same_bits():
    x = in_pages((1500, 0, 1, 777), 16, q=3)
    keys = {n: np.zeros((4, 1504, 2, 128), x["q"].dtype) for n in "kv"}
    for name, a in keys.items():
        for b, length in enumerate(x["kv_lengths"]):
            pages = x[f"{name}_pages"][np.minimum(x["page_table"][b], len(x["k_pages"]) - 1)]
            a[b, :length] = pages.reshape(-1, 2, 128)[:length]
    contiguous = {"q": x["q"], **keys, "kv_lengths": x["kv_lengths"], "causal": True}
    jax.tree.map(np.testing.assert_array_equal, call(contiguous), call_paged(x))


@pytest.mark.parametrize("lengths", [(0, 1, 127), (512, 1029, 2950)])
def test_keys_beyond_a_length_change_nothing_even_as_nan(lengths):
    x = testing.random(Cell(**{**BASE, "batch": (3,), "kv_lengths": lengths}))
    poisoned = dict(x)
    for name in ("k", "v"):
        poisoned[name] = x[name].copy()
        for entry, length in enumerate(lengths):
            poisoned[name][entry, length:] = np.nan
    jax.tree.map(np.testing.assert_array_equal, call(poisoned), call(x))
