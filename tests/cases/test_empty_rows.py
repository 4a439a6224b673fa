"""Rows without keys, keys without rows, and nothing at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

pytestmark = pytest.mark.usefixtures("quick_compilation")


def assert_zero(*arrays):
    for array in arrays:
        assert not np.asarray(array, np.float32).any()  # also False for NaN


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_without_keys_out_is_zero_and_lse_minus_infinity(check, causal):
    results = check(Cell(q=3, k=0, causal=causal))
    assert_zero(results["out"], results["dq"])
    assert (results["lse"] == -np.inf).all()
    assert results["dk"].shape == (2, 0, 2, 16)


def test_without_keys_but_with_sinks_lse_is_the_sink(check):
    cell = Cell(q=3, k=0, sinks=True)
    results = check(cell)
    assert_zero(results["out"])
    sinks = testing.random(cell)["sinks"]
    np.testing.assert_array_equal(results["lse"], np.broadcast_to(sinks[:, None], (2, 2, 3)))


@pytest.mark.parametrize("cell", [Cell(q=0, k=4), Cell(q=0, k=0), Cell(batch=(0,)), Cell(kv_heads=0)], ids=str)
def test_without_queries_every_gradient_is_zero(check, cell):
    results = check(cell)
    assert results["out"].size == 0
    assert_zero(results["dk"], results["dv"])


def test_more_queries_than_keys_leave_the_first_causal_rows_empty(check):
    results = check(Cell(q=9, k=5, group=2, causal=True))
    assert_zero(results["out"][:, :4], results["dq"][:, :4])
    assert (results["lse"][..., :4] == -np.inf).all()
    assert np.isfinite(results["lse"][..., 4:]).all()


def test_sequences_of_no_length_are_allowed(check):
    results = check(Cell(batch=(4,), q=5, k=6, causal=True, q_lengths=(5, 0, 5, 0), kv_lengths=(6, 6, 0, 0)))
    assert_zero(results["out"][1:], results["dq"][1:], results["dk"][1:], results["dv"][1:])
    assert (results["lse"][1:] == -np.inf).all()


def test_an_unused_slot_of_length_minus_one_is_as_if_empty():
    x = testing.random(Cell(q=5, k=6))
    lengths = jnp.array([6, -1])  # a traced or device value is not checked

    def loss(q, k, v):
        out, _ = jax_fa4.attention(q, k, v, q_lengths=lengths - 1, kv_lengths=lengths, return_lse=True)
        return (out**2).sum(), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*map(jnp.asarray, x.values()))
    assert_zero(out[1], *(g[1] for g in gradients))
    assert all(np.isfinite(g).all() for g in gradients)


def test_padding_gets_zero_gradients_and_zero_output(check):
    results = check(Cell(q=6, k=7, group=2, q_lengths=(4, 6), kv_lengths=(7, 3)))
    assert_zero(results["out"][0, 4:], results["dq"][0, 4:], results["dk"][1, 3:], results["dv"][1, 3:])


def test_rows_that_a_mask_empties_are_zero(check):
    mask = np.random.default_rng(0).random((2, 4, 5, 6)) < 0.5
    mask[1, 2, 3] = False
    results = check(Cell(q=5, k=6, group=2), mask=mask)
    assert_zero(results["out"][1, 3, 2], results["dq"][1, 3, 2])


def test_a_bias_of_minus_infinity_is_a_mask(check):
    cell = Cell(q=5, k=6)
    mask = np.random.default_rng(0).random((5, 6)) < 0.5
    mask[2] = False
    by_bias = check(cell, bias=np.where(mask, 0, -np.inf).astype(np.float32))
    by_mask = check(cell, mask=mask)
    for name, value in by_mask.items():
        np.testing.assert_allclose(by_bias[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert_zero(by_bias["dbias"][~mask])
