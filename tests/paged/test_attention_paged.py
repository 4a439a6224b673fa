"""Attention over pages against each sequence on its own, in float64; what no sequence holds is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jax_fa4
from jax_fa4 import testing

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTHS = [5, 0, 16, 1]
PAGE_SIZES = [1, 3, 16]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("queries", [1, 3])
def test_queries_see_the_keys_of_their_own_pages(check, paged, queries, page_size):
    check(lambda seed: paged(LENGTHS, queries, page_size, seed))


OPTIONS = {
    "all-keys": {"causal": False},
    "window": {"window": (2, 0)},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.3},
    "bfloat16": {"dtype": "bfloat16"},
    "lengths": {"q_lengths": [4, 1, 0, 2]},
    "no-group": {"group": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_mean_what_they_mean_in_attention(check, paged, options):
    check(lambda seed: paged(LENGTHS, 4, 3, seed, **options))


def test_sinks_take_part(check, paged):
    def call(seed):
        return paged(LENGTHS, 2, 3, seed) | {"sinks": np.random.default_rng(seed).standard_normal(4).astype(np.float32)}

    check(call)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_packed_queries_see_the_keys_of_their_own_pages(check, paged, page_size):
    """A chunk of a prompt, a sequence that isn't served, speculative tokens, one token; and one row behind them."""
    check(lambda seed: paged([9, 3, 16, 5], 11, page_size, seed, cu_seqlens_q=[0, 6, 6, 9, 10], window=(6, None)))


def test_packed_queries_may_have_gaps(check, paged):
    out, lse = check(lambda seed: paged([9, 3, 16], 12, 3, seed, cu_seqlens_q=[1, 6, 6, 12], q_lengths=[2, 1, 3]))
    padding = np.setdiff1d(np.arange(12), [1, 2, 6, 7, 8])
    assert not out[padding].any()
    assert (lse[:, padding] == -np.inf).all()


def test_packed_and_padded_queries_have_the_same_results(paged):
    x = paged(LENGTHS, 3, 3)
    packed = {**x, "q": x["q"].reshape(12, 4, 16), "cu_seqlens_q": np.arange(0, 15, 3)}
    out = jax_fa4.attention_paged(**x)
    np.testing.assert_allclose(jax_fa4.attention_paged(**packed), out.reshape(12, 4, 8), rtol=0, atol=1e-6)


def test_sequences_may_share_pages(paged):
    x = paged([8, 8], 2, 4)
    x["page_table"][1] = x["page_table"][0]
    expected = testing.attention_paged(x).out
    np.testing.assert_allclose(jax_fa4.attention_paged(**x), expected, rtol=0, atol=1e-6)


def test_an_index_outside_the_pool_reads_the_nearest_page(paged):
    x = paged([8], 1, 4)
    x["k_pages"][:], x["v_pages"][:] = (
        np.random.default_rng(1).standard_normal(x[n].shape) for n in ("k_pages", "v_pages")
    )
    last = len(x["k_pages"]) - 1
    wrong, right = (jax_fa4.attention_paged(**{**x, "page_table": np.array([t])}) for t in ([-5, 99], [0, last]))
    np.testing.assert_array_equal(wrong, right)


def test_a_call_without_any_key_has_results(paged):
    x = paged([0, 0], 2, 4)
    for table in (x["page_table"], x["page_table"][:, :0]):
        out, lse = jax_fa4.attention_paged(**{**x, "page_table": table}, return_lse=True)
        assert not out.any()
        assert (lse == -np.inf).all()


def test_other_lengths_and_pages_compile_nothing(paged):
    program = jax.jit(jax_fa4.attention_paged)
    x = paged([8, 8, 8], 1, 4)
    for lengths in ([8, 8, 8], [1, 0, 7]):
        program(**{**x, "kv_lengths": jnp.asarray(lengths), "page_table": jnp.asarray(x["page_table"][:, ::-1])})
    assert program._cache_size() == 1


def test_keys_of_all_sequences_never_exist_at_once(paged):
    x = paged([64, 64, 64], 1, 4)
    text = jax.jit(jax_fa4.attention_paged).lower(**x).as_text()
    assert f"tensor<3x{x['page_table'].shape[1]}x4x2x" not in text


def test_gradients_reach_the_pages(paged):
    x = paged([5, 3], 2, 4)

    def loss(q, k_pages, v_pages):
        return (jax_fa4.attention_paged(**{**x, "q": q, "k_pages": k_pages, "v_pages": v_pages}) ** 2).sum()

    def dense(q, k_pages, v_pages):
        rows = (pool[x["page_table"]].reshape(2, -1, *pool.shape[2:]) for pool in (k_pages, v_pages))
        return (jax_fa4.attention(q, *rows, causal=True, kv_lengths=x["kv_lengths"]) ** 2).sum()

    arrays = tuple(jnp.asarray(x[name]) for name in ("q", "k_pages", "v_pages"))
    for ours, expected in zip(*(jax.grad(f, (0, 1, 2))(*arrays) for f in (loss, dense)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("maps_pools", [True, False])
def test_vmap_maps_calls(paged, maps_pools):
    calls = [paged([5, 3], 2, 4, seed) for seed in range(3)]
    if not maps_pools:
        calls = [x | {name: calls[0][name] for name in ("k_pages", "v_pages", "page_table")} for x in calls]
    names = ("q", "kv_lengths", *(("k_pages", "v_pages", "page_table") if maps_pools else ()))
    mapped = {name: jnp.stack([x[name] for x in calls]) for name in names}
    out = jax.vmap(lambda mapped: jax_fa4.attention_paged(**{**calls[0], **mapped}))(mapped)
    for ours, x in zip(out, calls, strict=True):
        np.testing.assert_allclose(ours, testing.attention_paged(x).out, rtol=0, atol=1e-6)


quick = settings(max_examples=40, deadline=None, derandomize=True)
program = jax.jit(lambda x: jax_fa4.attention_paged(**x, return_lse=True))


def chunks(paged, seed=0, **options):
    """9 packed queries of 3 sequences in pages whose every row is a number."""
    x = paged([12, 12, 12], 9, 3, seed, **options)
    return x | {name: np.nan_to_num(x[name], nan=1) for name in ("k_pages", "v_pages")}


@pytest.fixture(scope="module")
def bound(paged):
    """The error of calls in which each query sees all of its sequence: one that sees fewer keys sums less."""
    calls = [chunks(paged, seed, cu_seqlens_q=[0, 3, 6, 9], causal=False) for seed in range(8)]
    pairs = [zip(testing.attention_paged(x), testing.attention_paged(x, testing.rounded), strict=True) for x in calls]
    return max(testing.error_bound(*pair, "float32", 3) for each in pairs for pair in each)


@quick
@example([0, 1, 12], [0, 0, 1, 9], 3, [*range(15)])  # no query and no key, one of each, all
@example([12, 12, 12], [2, 3, 3, 7], 13, [*range(14, -1, -1)])  # rows in front of the first and behind the last
@example([1, 1, 1], [4, 4, 4, 4], 0, [-1] * 15)
@example([3, 4, 0], [0, 4, 8, 9], 0, [14] * 15)  # a full page, a key more, and queries without keys
@given(
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.lists(st.integers(0, 9), min_size=4, max_size=4).map(sorted),
    st.integers(0, 13),
    st.lists(st.integers(-1, 14), min_size=15, max_size=15),
)
def test_every_batch_is_its_sequences(paged, bound, kv_lengths, offsets, left, pages):
    table = np.array(pages, np.int32).reshape(3, 5)
    x = chunks(paged, cu_seqlens_q=offsets, window=(left, None))
    x |= {"kv_lengths": np.array(kv_lengths, np.int32), "page_table": table}
    out, lse = program(x)
    exact = testing.attention_paged(x)
    np.testing.assert_allclose(out, exact.out, rtol=0, atol=bound)
    np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=bound)
