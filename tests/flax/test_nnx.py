"""`attention_fn` inside nnx's `MultiHeadAttention`, beside the attention that Flax uses by default."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_fa4.flax import attention_fn

FEATURES = 32
HEADS = 4


def layer(attention: Any, **options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention, rngs=nnx.Rngs(0), **{"decode": False, **options}
    )


def inputs(*batch: int, length: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*batch, length, FEATURES)).astype(np.float32)


def functional(attention: Any, apply: Any, **options: Any) -> Any:
    """`apply(layer, *arrays)` as a function of (parameters, arrays)."""
    graph, _ = nnx.split(layer(attention, **options))
    return lambda arguments: apply(nnx.merge(graph, arguments[0]), *arguments[1])


def assert_same(assert_as_good_as: Any, apply: Any, arrays: tuple[Any, ...], **options: Any) -> None:
    parameters = nnx.state(layer(attention_fn, **options))
    ours = functional(attention_fn, apply, **options)
    flax = functional(nnx.dot_product_attention, apply, **options)
    assert_as_good_as(ours, flax, (parameters, arrays))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 2)], ids=lambda b: f"{len(b)} batch axes")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_output_is_that_of_flax(assert_as_good_as, batch, is_causal):
    assert_same(assert_as_good_as, lambda m, x: m(x, is_causal=is_causal), (inputs(*batch),))


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["mqa", "gqa"])
def test_fewer_kv_heads(assert_as_good_as, kv_heads):
    assert_same(assert_as_good_as, lambda m, x: m(x, is_causal=True), (inputs(2),), num_kv_heads=kv_heads)


def test_a_causal_mask_of_flax_is_zeros_and_ones(assert_as_good_as):
    x = inputs(2)
    mask = nnx.make_causal_mask(x[..., 0])
    assert mask.dtype == jnp.float32
    assert_same(assert_as_good_as, lambda m, x: m(x, mask=mask), (x,))


def test_a_causal_mask_and_is_causal_agree():
    x = jnp.asarray(inputs(2))
    module = layer(attention_fn)
    np.testing.assert_array_equal(module(x, mask=nnx.make_causal_mask(x[..., 0])), module(x, is_causal=True))


def test_cross_attention_with_a_padding_mask(assert_as_good_as):
    mask = np.arange(13) < np.array([5, 13])[:, None, None, None]
    arrays = (inputs(2, length=7), inputs(2, length=13, seed=1))
    assert_same(assert_as_good_as, lambda m, x, y: m(x, y, mask=mask), arrays)


@pytest.mark.parametrize("keys", [5, 13])
def test_causal_cross_attention_counts_from_the_first_key(assert_as_good_as, keys):
    arrays = (inputs(2, length=7), inputs(2, length=keys, seed=1))
    assert_same(assert_as_good_as, lambda m, x, y: m(x, y, is_causal=True), arrays)


@pytest.mark.parametrize("kv_heads", [2, 4], ids=["gqa", "mha"])
def test_gradients_are_those_of_flax(assert_as_good_as, kv_heads):
    def gradients(module: nnx.MultiHeadAttention, x: Any) -> Any:
        graph, state = nnx.split(module)
        return jax.grad(lambda s, x: jnp.sin(nnx.merge(graph, s)(x, is_causal=True)).sum(), argnums=(0, 1))(state, x)

    assert_same(assert_as_good_as, gradients, (inputs(2),), num_kv_heads=kv_heads)


def test_a_decode_loop_is_that_of_flax(assert_as_good_as):
    def decode(module: nnx.MultiHeadAttention, x: Any) -> Any:
        module.init_cache(x.shape, dtype=x.dtype)
        # is_causal reaches attention_fn as True in Flax 0.12.8, where it would hide every key but the first.
        return jnp.concatenate([module(x[:, i : i + 1], is_causal=True) for i in range(x.shape[1])], axis=1)

    parameters, x = nnx.state(layer(attention_fn, decode=True)), inputs(2, length=5)
    ours = functional(attention_fn, decode, decode=True)
    whole = functional(nnx.dot_product_attention, lambda m, x: m(x, is_causal=True))
    assert_as_good_as(ours, whole, (parameters, (x,)))


def test_jit_and_vmap_see_through_the_module():
    x = jnp.asarray(inputs(3, 2))
    module = layer(attention_fn, num_kv_heads=2)
    expected = module(x, is_causal=True)
    mapped = nnx.jit(nnx.vmap(lambda m, x: m(x, is_causal=True), in_axes=(None, 0)))(module, x)
    np.testing.assert_allclose(mapped, expected, atol=float(jnp.abs(expected).max()) * 1e-6)


def test_a_module_in_bfloat16_answers_in_bfloat16():
    x = inputs(2)
    out = layer(attention_fn, dtype=jnp.bfloat16)(x, is_causal=True)
    reference = layer(nnx.dot_product_attention, dtype=jnp.bfloat16)(x, is_causal=True)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), np.float32(reference), atol=4 * float(jnp.finfo(jnp.bfloat16).eps))


def test_dropout_that_is_off_is_accepted():
    x = inputs(2)
    module = layer(attention_fn, dropout_rate=0.1)
    np.testing.assert_array_equal(module(x, deterministic=True), layer(attention_fn)(x))


def test_live_dropout_raises():
    with pytest.raises(NotImplementedError, match="dropout_rate must be 0 or deterministic True"):
        layer(attention_fn, dropout_rate=0.1)(inputs(2), deterministic=False)


def test_storing_the_weights_raises():
    with pytest.raises(NotImplementedError, match="sow_weights=True asks for the attention weights"):
        layer(attention_fn)(inputs(2), sow_weights=True)
