"""Numbers that have broken attention elsewhere: large, equal, NaN in padding, few or many keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    "cell",
    [
        Cell(batch=(1,), q=1, k=1, kv_heads=1),
        Cell(batch=(1,), q=33, k=257, kv_heads=1, causal=True),  # one key more than a block of keys
        Cell(batch=(1,), q=64, k=512, kv_heads=1),
        Cell(batch=(1,), q=40, k=20, kv_heads=1, causal=True, dtype="bfloat16"),
    ],
    ids=str,
)
def test_any_lengths_are_right(check, cell):
    check(cell)


def test_a_single_key_gives_its_value_whatever_the_score():
    x = testing.random(Cell(batch=(1,), q=1, k=1, kv_heads=1, dtype="float16"), seed=352)
    q, k, v = (jnp.asarray(x[name]) * 3 for name in "qkv")
    gradients = jax.grad(lambda *qkv: jax_fa4.attention(*qkv).sum(), argnums=(0, 1, 2))(q, k, v)
    np.testing.assert_array_equal(jax_fa4.attention(q, k, v), v)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not gradients[0].any()


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
def test_large_scores_overflow_nowhere(magnitude):
    x = testing.random(Cell(q=5, k=6, dtype="bfloat16"))
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    call = lambda q, k, v: jax_fa4.attention(q * magnitude, k, v).astype(jnp.float32).sum()  # noqa: E731
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.grad(call, argnums=(0, 1, 2))(q, k, v))


def test_what_lies_beyond_kv_lengths_changes_nothing(check):
    cell = Cell(q=4, k=7, group=2, causal=True, kv_lengths=(5, 7), q_lengths=(4, 3))
    clean = check(cell)
    x = testing.random(cell)
    x["k"][0, 5:], x["v"][0, 5:], x["q"][1, 3:] = np.nan, np.inf, np.nan

    def loss(q, k, v):
        out, lse = jax_fa4.attention(**{**x, "q": q, "k": k, "v": v}, return_lse=True)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    gradients, (out, lse) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*(jnp.asarray(x[name]) for name in "qkv"))
    np.testing.assert_array_equal(out, clean["out"])
    np.testing.assert_array_equal(lse, clean["lse"])
    assert all(np.isfinite(g).all() for g in gradients)


def test_each_softcap_has_its_own_gradients(check):
    first, second, again = (check(Cell(q=4, k=6), softcap=cap) for cap in (1.5, 3.0, 1.5))
    assert np.abs(first["dq"] - second["dq"]).max() > 1e-3
    np.testing.assert_array_equal(first["dq"], again["dq"])


def test_a_sink_too_large_for_powers_of_two_counts_as_the_largest_that_is_not():
    x = testing.random(Cell(q=4, k=6, sinks=True))
    large, largest = (
        jax_fa4.attention(x["q"], x["k"], x["v"], sinks=np.full(2, sink, np.float32)) for sink in (3e38, 2.3e38)
    )
    np.testing.assert_array_equal(large, largest)
    np.testing.assert_array_equal(large, 0)


def test_sinks_get_gradients_from_out_and_from_lse(check):
    results = check(Cell(q=4, k=6, group=2, causal=True, sinks=True))
    assert (np.abs(results["dsinks"]) > 0).all()


def test_a_decoded_token_is_the_one_that_the_whole_sequence_gives():
    x = testing.random(Cell(q=9, k=9, group=2))
    whole = jax_fa4.attention(**x, causal=True)
    for length in 1, 5, 9:
        step = jax_fa4.attention(x["q"][:, length - 1 : length], x["k"], x["v"], causal=True, kv_lengths=length)
        np.testing.assert_allclose(step[:, 0], whole[:, length - 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_bias_on_half_precision_operands_has_finite_gradients(check, dtype):
    results = check(Cell(q=6, k=6, bias="full", dtype=dtype, causal=True))
    assert results["dbias"].dtype == np.float32
    assert all(np.isfinite(np.asarray(value, np.float32)).all() for value in results.values())


@pytest.mark.parametrize("bias", ["full", "shared", "keys"])
def test_a_bias_gets_its_gradient_for_every_batch_size(check, bias):
    assert np.abs(check(Cell(batch=(3,), q=4, k=4, bias=bias))["dbias"]).min() > 0
