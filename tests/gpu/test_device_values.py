"""Offsets, lengths and page tables that only the device knows: no call reads them back, and others compile nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing

from . import test_decode, test_varlen
from .test_decode import in_pages
from .test_varlen import assert_gradients_close, cotangents, packed

pytestmark = pytest.mark.gpu

WHOLE = {"q_lengths": [700] * 5, "kv_lengths": [800] * 5}
PACKINGS = {
    "first": {"cu_seqlens_q": [0, 100, 200, 400, 500, 700], "cu_seqlens_kv": [0, 90, 300, 400, 640, 800], **WHOLE},
    "other offsets": {"cu_seqlens_q": [0, 1, 350, 360, 699, 700], "cu_seqlens_kv": [0, 64, 65, 700, 710, 800], **WHOLE},
    "gaps": {"cu_seqlens_q": [9, 100, 200, 400, 500, 700], "cu_seqlens_kv": [0, 90, 300, 400, 640, 800]}
    | {"q_lengths": [40, 0, 150, 1, 190], "kv_lengths": [64, 9, 100, 200, 0]},
    "a tail": {"cu_seqlens_q": [0, 60, 130, 200, 290, 310], "cu_seqlens_kv": [0, 90, 100, 120, 400, 500], **WHOLE},
    "empty ones": {"cu_seqlens_q": [0, 0, 0, 450, 450, 450], "cu_seqlens_kv": [0, 100, 100, 640, 640, 640], **WHOLE},
}
SERVED = {
    "first": {"kv_lengths": [1500, 0, 1, 777], "cu_seqlens_q": [0, 3, 3, 4, 9]},
    "other lengths": {"kv_lengths": [33, 1504, 900, 2], "cu_seqlens_q": [2, 3, 8, 10, 11]},
    "no key": {"kv_lengths": [0, 0, 0, 0], "cu_seqlens_q": [0, 0, 6, 12, 12]},
}


def attend(x, bound):
    lengths = {"max_seqlen_q": bound, "max_seqlen_kv": bound}
    run = functools.partial(jax_fa4.attention_varlen, causal=True, return_lse=True, implementation="kernel")
    return testing.Forward(*run(**x, **lengths))


def gradients(x, bound, cotangent, *, deterministic):
    others = {name: a for name, a in x.items() if name not in "qkv"} | {"deterministic": deterministic}
    wrt = {name: x[name] for name in "qkv"}
    return jax.vjp(lambda wrt: tuple(attend({**wrt, **others}, bound)), wrt)[1](cotangent)[0]


@pytest.fixture
def on_the_device_alone(monkeypatch):
    """What a call of a compiled program does after a first one: it asks for no cubin and moves nothing."""

    def run(program, calls):
        calls = jax.block_until_ready(jax.device_put(calls))
        jax.block_until_ready(program(*calls[0]))

        def compile_nothing(config):
            raise AssertionError(f"a cubin was asked for: {config!r}")

        monkeypatch.setattr(jax_fa4.cubins, "get", compile_nothing)
        with jax.transfer_guard("disallow"):
            results = [jax.block_until_ready(program(*call)) for call in calls]
        assert program._cache_size() == 1
        return results

    return run


def calls_of_packings():
    """Keyword arguments of calls whose shapes are the same."""
    return [packed(700, 800, seed=n, **values) for n, values in enumerate(PACKINGS.values())]


def test_packed_sequences_stay_on_the_device(on_the_device_alone):
    calls = calls_of_packings()
    bounds = [np.int32(800 - n) for n in range(len(calls))]
    for got, x in zip(on_the_device_alone(jax.jit(attend), list(zip(calls, bounds, strict=True))), calls, strict=True):
        test_varlen.assert_close(got, x | {"causal": True})


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_packed_sequences_stay_on_the_device(on_the_device_alone, deterministic):
    calls = calls_of_packings()
    program = jax.jit(functools.partial(gradients, deterministic=deterministic))
    given = [(x, np.int32(800 - n), cotangents(x)) for n, x in enumerate(calls)]
    for got, x in zip(on_the_device_alone(program, given), calls, strict=True):
        assert_gradients_close(got, x | {"causal": True})


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_sequences_in_pages_stay_on_the_device(on_the_device_alone, is_packed):
    rng = np.random.default_rng(2)
    x = in_pages((1500, 0, 1, 777), 16, q=3)
    x |= {name: rng.standard_normal(x[name].shape).astype(x[name].dtype) for name in ("k_pages", "v_pages")}
    calls = []
    for values in SERVED.values():
        given = {name: np.asarray(value, np.int32) for name, value in values.items()}
        if is_packed:
            given["q"] = x["q"].reshape(12, 8, 128)
        else:
            del given["cu_seqlens_q"]
        table = rng.integers(0, len(x["k_pages"]), x["page_table"].shape, np.int32)
        calls.append({**x, **given, "page_table": table})
    run = functools.partial(jax_fa4.attention_paged, return_lse=True, implementation="kernel")
    program = jax.jit(lambda x: testing.Forward(*run(**x)))
    for got, call in zip(on_the_device_alone(program, [(call,) for call in calls]), calls, strict=True):
        exact, rounded = testing.attention_paged(call), testing.attention_paged(call, testing.rounded)
        test_decode.assert_close(got, exact, rounded, "bfloat16", 2)


def test_a_page_outside_the_pool_is_an_error_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("JAX_FA4_CHECK", "1")
    x = jax.tree.map(jnp.asarray, in_pages((1500, 0, 1, 777), 16))
    program = jax.jit(lambda x: jax_fa4.attention_paged(**x, implementation="kernel"))
    jax.block_until_ready(program(x))  # what entries behind a length say doesn't matter
    wrong = x | {"page_table": x["page_table"].at[3, 7].set(len(x["k_pages"]))}
    with pytest.raises(Exception, match=r"page_table\[3, 7\] must be from 0 to .*; 1 used entries are outside"):
        jax.block_until_ready(program(wrong))
