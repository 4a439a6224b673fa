"""Gradients by a bias and by the softcap on a GPU, against those of exact attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

from ..emptied import REASONS, rows_to_empty, without_keys

pytestmark = pytest.mark.gpu

BASE = Cell(q=333, k=500, kv_heads=2, group=2, head_dim=128, dtype="bfloat16")
CAUSAL = dataclasses.replace(BASE, causal=True, head_dim=64)
BATCH, HEADS = 2, 4
SHAPES = [
    (BATCH, HEADS, 333, 500),
    (1, HEADS, 333, 500),
    (BATCH, 1, 333, 500),
    (333, 500),
    (BATCH, HEADS, 1, 500),
    (1, HEADS, 1, 500),
    (BATCH, 1, 1, 500),
    (1, 1, 1, 500),
]
LENGTHS = ((1, 1025), (7, 129), (129, 7), (128, 1), (300, 1), (64, 128), (65, 127), (2049, 513))
FEATURES = [
    {"bias": "full", "window": (150, 60)},
    {"bias": "shared", "softcap": 20.0, "q_lengths": (20, 333), "kv_lengths": (500, 127)},
    {"bias": "keys", "softcap": 5.0, "segments": 4, "head_dim": 64},
    {"bias": "full", "mask": "keys", "sinks": True, "softmax_scale": 4.0, "layout": "BNTH"},
    {"bias": "shared", "softcap": 3.0, "mask": "full", "segments": 2, "sinks": True, "window": (200, 100)}
    | {"q_lengths": (333, 128), "kv_lengths": (400, 500), "q_offset": 10},
]
HEAD_DIMS = [(8, 8), (72, 104), (192, 128), (256, 256)]
CELLS = [
    *(dataclasses.replace(BASE, **feature) for feature in FEATURES),
    *(dataclasses.replace(BASE, head_dim=d, head_dim_v=e, bias="shared", softcap=9.0) for d, e in HEAD_DIMS),
    dataclasses.replace(BASE, dtype="float16", group=1, softcap=30.0),
    dataclasses.replace(BASE, dtype="float16", batch=(1, 3), bias="full", causal=True),
]


def gradients(x, dout, dlse, **more):
    """By bias and softcap, those present, and by q."""
    wanted = [name for name in ("bias", "softcap", "q") if name in x]
    others = {name: value for name, value in x.items() if name not in wanted}

    @jax.jit
    def pull(*values):
        def attend(*values):
            given = dict(zip(wanted, values, strict=True))
            return jax_fa4.attention(**others, **given, **more, return_lse=True, implementation="kernel")

        return jax.vjp(attend, *values)[1]((dout, dlse))

    return dict(zip(wanted, pull(*(jnp.asarray(x[name]) for name in wanted)), strict=True))


def cotangents(x):
    """dout and dlse of a call."""
    rng, bthd = np.random.default_rng(1), x.get("layout", "BTNH") == "BTNH"
    *batch, a, b, _ = x["q"].shape
    dout = rng.standard_normal((*batch, a, b, x["v"].shape[-1])).astype(x["q"].dtype)
    dlse = rng.standard_normal((*batch, *((b, a) if bthd else (a, b))))
    return jnp.asarray(dout), jnp.asarray(dlse, jnp.float32)


def assert_close(got, x, dout, dlse):
    exact, rough = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
    for name, gradient in got.items():
        assert gradient.shape == np.shape(x[name])
        assert testing.error_ratio(gradient, exact[name], rough[name], x["q"].dtype, 3) <= 1, name


def assert_exact(x):
    dout, dlse = cotangents(x)
    assert_close(gradients(x, dout, dlse), x, dout, dlse)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_as_exact_as_their_precision_allows(cell):
    assert_exact(testing.random(cell, seed=CELLS.index(cell)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_of_any_shape_has_a_gradient(shape, dtype):
    bias = np.random.default_rng(2).standard_normal(shape).astype(testing.np_dtype(dtype))
    assert_exact(testing.random(CAUSAL) | {"bias": bias})


@pytest.mark.parametrize(("q", "k"), LENGTHS)
@pytest.mark.parametrize("bias", ["full", "keys"])
def test_any_lengths(q, k, bias):
    assert_exact(testing.random(dataclasses.replace(CAUSAL, q=q, k=k, bias=bias)))


@pytest.mark.parametrize(("q", "k"), [(0, 9), (9, 0), (300, 130)])
@pytest.mark.parametrize("rows", [False, True])
def test_what_no_query_sees_gets_exactly_zero(q, k, rows):
    x = testing.random(dataclasses.replace(CAUSAL, q=q, k=k))
    x["bias"] = np.zeros((q if rows else 1, k), np.float32)
    dout, dlse = cotangents(x)
    gradient = np.asarray(gradients(x, dout, dlse)["bias"])
    assert np.isfinite(gradient).all()
    seen = testing.visible(x).any(axis=(0, 1))
    assert not gradient[~(seen if rows else seen.any(axis=0, keepdims=True))].any()


@pytest.mark.parametrize(("head_dim", "reasons"), [(64, REASONS), (128, ["bias"]), (256, REASONS)], ids=str)
def test_rows_that_see_no_key_give_a_bias_exactly_zero(head_dim, reasons):
    x = testing.random(dataclasses.replace(BASE, head_dim=head_dim, bias="full"))
    rows = rows_to_empty(BATCH, BASE.q)
    for reason in reasons:
        x = without_keys(x, rows, reason)
    dout, dlse = cotangents(x)
    dlse = jnp.where(rows[:, None], jnp.inf, dlse)
    got = gradients(x, dout, dlse)
    assert_close(got, x, dout, dlse)
    assert not np.asarray(got["bias"]).swapaxes(1, 2)[rows].any()
    assert not np.asarray(got["q"])[rows].any()


@pytest.mark.parametrize("bias", ["shared", "keys"])
def test_what_lies_beyond_a_length_changes_nothing_even_as_nan(bias):
    lengths = {"q_lengths": (20, 333), "kv_lengths": (500, 127)}
    x = testing.random(dataclasses.replace(BASE, bias=bias, softcap=20.0, **lengths))
    dout, dlse = cotangents(x)
    expected = gradients(x, dout, dlse)
    poisoned = {**x, "dout": np.array(dout)}
    for name in ("q", "k", "v", "dout"):
        poisoned[name] = poisoned[name].copy()
        for entry, length in enumerate(x["q_lengths" if name in ("q", "dout") else "kv_lengths"]):
            poisoned[name][entry, length:] = np.nan
    got = gradients(poisoned, jnp.asarray(poisoned.pop("dout")), dlse)
    for name in ("bias", "softcap"):
        np.testing.assert_array_equal(got[name], expected[name])


def test_gradients_have_the_same_bits_in_every_run():
    x = testing.random(dataclasses.replace(BASE, q=1000, k=900, bias="shared", softcap=9.0, head_dim=256))
    dout, dlse = cotangents(x)
    first = gradients(x, dout, dlse)
    assert_close(first, x, dout, dlse)
    for _ in range(20):
        again = gradients(x, dout, dlse)
        for name in ("bias", "softcap"):
            np.testing.assert_array_equal(again[name], first[name])


@pytest.mark.parametrize("rows", [False, True])
def test_batches_beyond_65535_are_right(rows):
    x = testing.random(Cell(batch=(70000,), q=2, k=3, kv_heads=1, head_dim=64, causal=True, dtype="bfloat16"))
    x["bias"] = np.random.default_rng(3).standard_normal((70000, 1, 2 if rows else 1, 3)).astype(np.float32)
    assert_exact(x)


def test_vmap_gives_what_a_loop_gives():
    x = testing.random(dataclasses.replace(CAUSAL, bias="shared"))
    dout, dlse = cotangents(x)

    def pull(q, bias):
        attend = functools.partial(jax_fa4.attention, k=x["k"], v=x["v"], causal=True, return_lse=True)
        return jax.vjp(lambda b: attend(q, bias=b, implementation="kernel"), bias)[1]((dout, dlse))[0]

    queries = jnp.stack([x["q"], -x["q"]])
    for q, got in zip(queries, jax.jit(jax.vmap(pull, (0, None)))(queries, x["bias"]), strict=True):
        assert_close({"bias": got}, {**x, "q": np.asarray(q)}, dout, dlse)


def test_each_mapped_entry_has_a_gradient_of_its_own_by_a_cap_that_all_share():
    x = testing.random(dataclasses.replace(BASE, dtype="float16", group=1, softcap=30.0))
    dout, dlse = cotangents(x)

    def pull(q, cap):
        attend = functools.partial(jax_fa4.attention, k=x["k"], v=x["v"], return_lse=True, implementation="kernel")
        return jax.vjp(lambda cap: attend(q, softcap=cap), cap)[1]((dout, dlse))[0]

    queries = jnp.stack([x["q"], -x["q"]])
    for q, got in zip(queries, jax.jit(jax.vmap(pull, (0, None)))(queries, jnp.float32(30)), strict=True):
        assert_close({"softcap": got}, {**x, "q": np.asarray(q)}, dout, dlse)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_cap_of_packed_sequences_has_a_gradient(head_dim):
    rng, offsets = np.random.default_rng(0), np.array([3, 3, 130, 194, 1000], np.int32)
    heads = {"q": 4, "k": 2, "v": 2}
    dtype = testing.np_dtype("bfloat16")
    x = {name: rng.standard_normal((1020, n, head_dim)).astype(dtype) for name, n in heads.items()}
    arrays = {name: jnp.asarray(a) for name, a in x.items()}
    options = {"causal": True, "cu_seqlens_q": jnp.asarray(offsets), "return_lse": True, "implementation": "kernel"}
    results, pullback = jax.vjp(lambda cap: jax_fa4.attention_varlen(**arrays, **options, softcap=cap), jnp.float32(3))
    cotangents = [jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in results]
    x |= {"cu_seqlens_q": offsets, "causal": True, "softcap": np.float32(3)}
    exact = testing.gradients_varlen(x, *cotangents)["softcap"]
    rough = testing.gradients_varlen(x, *cotangents, testing.rounded_gradients)["softcap"]
    (got,) = pullback(tuple(cotangents))
    assert abs(float(got) - exact) <= testing.error_bound(exact, rough, "bfloat16", 3)
