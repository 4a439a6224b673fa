"""Packed sequences against each sequence on its own, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing

pytestmark = pytest.mark.usefixtures("quick_compilation")

OFFSETS = {
    "one-sequence": [0, 13],
    "lengths-1": [0, 1, 2, 3, 13],
    "two-empty-ones-first": [0, 0, 0, 13],
    "an-empty-one-last": [0, 6, 13, 13],
    "a-tail": [0, 3, 3, 8],
    "a-gap-in-front": [2, 6, 13],
    "all-empty": [4, 4, 4],
    "no-sequence": [0],
}


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_each_document_attends_to_itself_alone(check, packed, offsets):
    check(lambda seed: packed(13, seed=seed, cu_seqlens_q=offsets, causal=True, group=2))


OPTIONS = {
    "plain": {},
    "window": {"window": (2, 1)},
    "left-window": {"window": (3, None)},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.3},
    "bfloat16": {"dtype": "bfloat16", "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_queries_and_keys_have_offsets_of_their_own(check, packed, options):
    ragged = {"cu_seqlens_q": [0, 4, 4, 9, 11], "cu_seqlens_kv": [1, 6, 9, 9, 14]}
    check(lambda seed: packed(11, 15, seed, group=2, **ragged, **options))


def test_gaps_between_sequences_are_no_part_of_them(check, packed):
    ragged = {"cu_seqlens_q": [0, 5, 9, 12], "cu_seqlens_kv": [0, 7, 7, 14]}
    lengths = {"q_lengths": [3, 0, 9], "kv_lengths": [5, 2, 6]}  # 9 of 3 queries are 3
    results = check(lambda seed: packed(13, 15, seed, causal=True, **ragged, **lengths))
    padding = np.setdiff1d(np.arange(13), [0, 1, 2, 9, 10, 11])
    assert not results["out"][padding].any()
    assert not results["dq"][padding].any()
    assert (results["lse"][:, padding] == -np.inf).all()
    assert not results["dv"][[5, 6, 13, 14]].any()


def test_keys_are_as_many_as_queries_where_nothing_is_said_of_them(packed):
    x = packed(12, cu_seqlens_q=[0, 5, 12], q_lengths=[3, 6])
    explicit = jax_fa4.attention_varlen(**x, cu_seqlens_kv=x["cu_seqlens_q"], kv_lengths=x["q_lengths"])
    np.testing.assert_array_equal(jax_fa4.attention_varlen(**x), explicit)


def test_sinks_take_part_in_rows_of_sequences_only(check, packed):
    def call(seed):
        x = packed(11, 9, seed, group=2, cu_seqlens_q=[0, 3, 8], cu_seqlens_kv=[0, 0, 9], causal=True)
        return x | {"sinks": np.random.default_rng(seed).standard_normal(4).astype(np.float32)}

    results = check(call)
    np.testing.assert_allclose(results["lse"][:, :3], np.broadcast_to(call(0)["sinks"][:, None], (4, 3)), atol=1e-6)
    assert (results["lse"][:, 8:] == -np.inf).all()


def test_rows_of_no_sequence_may_hold_nan(packed):
    clean = packed(12, cu_seqlens_q=[1, 5, 10], q_lengths=[3, 5], causal=True)
    padding = np.array([0, 4, 10, 11])
    dirty = dict(clean)
    for name in ("q", "k", "v"):
        dirty[name] = clean[name].copy()
        dirty[name][padding] = np.nan
    dout = np.ones((12, 2, 8), np.float32)
    dirty_dout = dout.copy()
    dirty_dout[padding] = np.nan

    def results(x, dout):
        out, pullback = jax.vjp(lambda q, k, v: jax_fa4.attention_varlen(**{**x, "q": q, "k": k, "v": v}), *arrays(x))
        return out, *pullback(jnp.asarray(dout))

    def arrays(x):
        return (jnp.asarray(x[name]) for name in ("q", "k", "v"))

    for ours, expected in zip(results(dirty, dirty_dout), results(clean, dout), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_equal_documents_are_a_batch(packed):
    x = packed(24, cu_seqlens_q=[0, 8, 16, 24], causal=True, group=2)
    batch = {name: x[name].reshape(3, 8, *x[name].shape[1:]) for name in ("q", "k", "v")}
    out, lse = jax_fa4.attention_varlen(**x, return_lse=True)
    expected, expected_lse = jax_fa4.attention(**batch, causal=True, return_lse=True)
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, np.moveaxis(expected_lse, 0, 1).reshape(lse.shape), rtol=0, atol=1e-6)


@pytest.mark.parametrize("total", [0, 3])
def test_calls_without_queries_or_keys_have_results(packed, total):
    x = packed(total, 3 - total, cu_seqlens_q=[0, total], cu_seqlens_kv=[0, 3 - total])
    out, lse = jax_fa4.attention_varlen(**x, return_lse=True)
    assert out.shape == (total, 2, 8)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_second_derivatives_are_those_of_the_sequences(packed):
    x = packed(9, cu_seqlens_q=[0, 5, 5, 8], causal=True)
    parts = [slice(0, 5), slice(5, 8)]

    def together(q):
        return (jax_fa4.attention_varlen(**{**x, "q": q}) ** 2).sum()

    def apart(q):
        each = (jax_fa4.attention(q[p], x["k"][p], x["v"][p], causal=True) for p in parts)
        return sum((out**2).sum() for out in each)

    direction = random_direction(x["q"].shape)

    def second(f):
        return jax.jvp(jax.grad(f), (jnp.asarray(x["q"]),), (direction,))[1]

    np.testing.assert_allclose(second(together), second(apart), rtol=0, atol=1e-5)


def random_direction(shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def test_the_definition_used_here_is_that_of_a_single_call(packed):
    x = packed(6, cu_seqlens_q=[0, 6], causal=True)
    alone = testing.attention({name: x[name] for name in ("q", "k", "v")}, causal=True)
    np.testing.assert_array_equal(testing.attention_varlen(x).out, alone.out)
