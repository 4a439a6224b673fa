"""`attention_fn` called by itself: which arguments it takes, what it makes of masks, and what it refuses."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_fa4.flax
from jax_fa4 import testing
from jax_fa4.flax import attention_fn
from jax_fa4.testing import Cell

CELL = Cell(q=6, k=6, kv_heads=2, group=2)


def qkv(cell: Cell = CELL) -> tuple[Any, Any, Any]:
    x = testing.random(cell)
    return x["q"], x["k"], x["v"]


def parameters_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_docstring_gives_what_it_says():
    results = doctest.testmod(jax_fa4.flax)
    assert results.attempted > 0
    assert results.failed == 0


def test_it_names_every_argument_that_linen_can_pass():
    # Linen drops what it does not find by name, so a missing one would be lost without a word.
    own_of_the_function = {"einsum_dot_general"}  # no module passes it
    assert parameters_of(nn.dot_product_attention) - parameters_of(attention_fn) <= own_of_the_function


def test_it_names_every_argument_that_nnx_can_pass():
    own_of_the_function = {"promote_dtype"}  # no module passes it
    assert parameters_of(nnx.dot_product_attention) - parameters_of(attention_fn) <= own_of_the_function


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (4, 6, 6), (2, 1, 6, 6), (2, 1, 1, 6), (1, 4, 1, 6)], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "float32", "int32"])
def test_a_mask_broadcasts_and_keeps_what_is_not_zero(shape, dtype):
    q, k, v = qkv()
    mask = np.random.default_rng(1).random(shape) < 0.7
    exact = testing.attention({"q": q, "k": k, "v": v, "mask": mask})
    rough = testing.attention({"q": q, "k": k, "v": v, "mask": mask}, np.float32)
    out = attention_fn(q, k, v, mask=3 * mask.astype(dtype) if dtype != "bool" else mask)
    assert np.abs(out - exact.out).max() <= testing.error_bound(exact.out, rough.out, "float32")


def test_a_bias_is_added_to_the_scores():
    q, k, v = qkv()
    bias = np.random.default_rng(1).standard_normal((2, 4, 6, 6)).astype(np.float32)
    exact = testing.attention({"q": q, "k": k, "v": v, "bias": bias})
    rough = testing.attention({"q": q, "k": k, "v": v, "bias": bias}, np.float32)
    error = np.abs(attention_fn(q, k, v, bias) - exact.out).max()
    assert error <= testing.error_bound(exact.out, rough.out, "float32")


def test_rows_that_see_no_key_are_zero():
    q, k, v = qkv()
    mask = np.ones((6, 6), np.float32)
    mask[2] = 0
    out = np.asarray(attention_fn(q, k, v, mask=mask))
    assert (out[:, 2] == 0).all()
    assert (out[:, [0, 1, 3, 4, 5]] != 0).any(axis=-1).all()


def test_a_single_query_with_a_mask_is_a_step_of_decoding():
    q, k, v = qkv(Cell(q=1, k=6))
    filled = np.arange(6) < 4
    np.testing.assert_array_equal(
        attention_fn(q, k, v, mask=filled, is_causal=True), attention_fn(q, k, v, mask=filled)
    )


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_is_what_it_computes_in(dtype):
    q, k, v = qkv()
    out = attention_fn(q.astype(np.float16), k, v, dtype=dtype)
    assert out.dtype == (jnp.float32 if dtype is None else dtype)


@pytest.mark.parametrize("precision", [None, "highest", "default", ("high", "high")])
def test_any_precision_is_met(precision):
    q, k, v = qkv()
    np.testing.assert_array_equal(attention_fn(q, k, v, precision=precision), attention_fn(q, k, v))


def test_any_head_dim_works():
    x = testing.random(Cell(q=6, k=6, kv_heads=2, group=2, head_dim=16))
    q, k, v = (x[name][..., :12] for name in "qkv")
    exact, rounded = (f({"q": q, "k": k, "v": v}).out for f in (testing.attention, testing.rounded))
    out = attention_fn(q, k, v)
    assert out.shape == exact.shape
    assert np.abs(out - exact).max() <= testing.error_bound(exact, rounded, "float32")


REFUSED = [
    ({"dropout_rate": 0.5}, NotImplementedError, "jax_fa4 has no dropout on attention weights"),
    ({"dropout_rate": float("nan")}, NotImplementedError, "got nan and False"),
    ({"dropout_rate": None}, NotImplementedError, "got None and False"),
    ({"query": [[1.0]]}, TypeError, "^query must be an array, got list"),
    ({"key": np.ones((2, 6, 2, 8), np.float32)}, ValueError, "^key must have query's head_dim 16, got 8"),
    ({"dtype": "int32"}, TypeError, "^query must be float16, bfloat16, float32 or float64, got int32"),
    ({"dtype": "nope"}, TypeError, "^dtype must be None or a dtype, got 'nope'"),
    ({"mask": "causal"}, TypeError, "^mask must be an array, got 'causal'"),
    ({"is_causal": None}, TypeError, "^is_causal must be a Python bool, got None"),
    ({"module": object()}, NotImplementedError, "jax_fa4 never forms them"),
    (
        {"input_positions": np.arange(6)},
        ValueError,
        "input_positions must be None: jax_fa4 applies no rotary embedding",
    ),
    ({"qk_attn_weights_einsum": jnp.einsum}, ValueError, "qk_attn_weights_einsum must be None"),
    ({"attn_weights_value_einsum": jnp.einsum}, ValueError, "attn_weights_value_einsum must be None"),
    ({"mask": np.ones((1, 2, 4, 6, 6))}, ValueError, "mask must broadcast to"),
    ({"bias": np.ones((7, 6), np.float32)}, ValueError, "bias must broadcast to"),
]


@pytest.mark.parametrize(
    ("argument", "error", "message"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_what_it_cannot_do_raises(argument, error, message):
    with pytest.raises(error, match=message):
        attention_fn(**{**dict(zip(("query", "key", "value"), qkv(), strict=True)), **argument})


def test_an_argument_that_it_does_not_know_raises():
    with pytest.raises(TypeError, match="unexpected keyword argument 'logits_soft_cap'"):
        attention_fn(*qkv(), logits_soft_cap=30.0)
