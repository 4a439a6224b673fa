"""`attention_fn` inside linen's `MultiHeadDotProductAttention`, beside the attention that Flax uses by default."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.flax import attention_fn

HEADS = 4
FEATURES = 32
KEY = jax.random.key(0)


def layer(attention: Any, **options: Any) -> nn.MultiHeadDotProductAttention:
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention, **options)


def inputs(*batch: int, length: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*batch, length, FEATURES)).astype(np.float32)


def functional(attention: Any, call: Any, **options: Any) -> Any:
    """`call(apply, *arrays)` as a function of (variables, arrays); `apply` is the layer with these variables."""
    module = layer(attention, **options)

    def compute(arguments: Any) -> Any:
        variables, arrays = arguments
        return call(lambda *x, **kw: module.apply(variables, *x, **kw), *arrays)

    return compute


def assert_same(assert_as_good_as: Any, call: Any, arrays: tuple[Any, ...], **options: Any) -> None:
    variables = layer(attention_fn, **options).init(KEY, *arrays)
    ours = functional(attention_fn, call, **options)
    flax = functional(nn.dot_product_attention, call, **options)
    assert_as_good_as(ours, flax, (variables, arrays))


@pytest.mark.parametrize("batch", [(2,), (2, 3), (2, 1, 2)], ids=lambda b: f"{len(b)} batch axes")
def test_the_output_is_that_of_flax(assert_as_good_as, batch):
    assert_same(assert_as_good_as, lambda apply, x: apply(x), (inputs(*batch),))


def test_the_mask_arrives(assert_as_good_as):
    x = inputs(2)
    mask = nn.make_causal_mask(x[..., 0])
    assert mask.dtype == jnp.float32
    assert_same(assert_as_good_as, lambda apply, x: apply(x, mask=mask), (x,))


def test_cross_attention_with_a_padding_mask(assert_as_good_as):
    mask = np.arange(13) < np.array([5, 13])[:, None, None, None]
    arrays = (inputs(2, length=7), inputs(2, length=13, seed=1))
    assert_same(assert_as_good_as, lambda apply, x, y: apply(x, y, mask=mask), arrays)


def test_gradients_are_those_of_flax(assert_as_good_as):
    x = inputs(2)
    mask = nn.make_causal_mask(x[..., 0])
    variables = layer(attention_fn).init(KEY, x)

    def gradients(attention: Any) -> Any:
        def loss(arguments: Any) -> Any:
            return jnp.sin(layer(attention).apply(arguments[0], arguments[1], mask=mask)).sum()

        return jax.grad(loss)

    assert_as_good_as(gradients(attention_fn), gradients(nn.dot_product_attention), (variables, x))


def test_a_decode_loop_is_causal_attention(assert_as_good_as):
    x = inputs(2, length=5)
    decoder = layer(attention_fn, decode=True)
    variables = decoder.init(KEY, x)

    def decode(arguments: Any) -> Any:
        parameters, x = arguments
        cache, steps = variables["cache"], []
        for i in range(x.shape[1]):
            step, changed = decoder.apply({**parameters, "cache": cache}, x[:, i : i + 1], mutable=["cache"])
            cache = changed["cache"]
            steps.append(step)
        return jnp.concatenate(steps, axis=1)

    mask = nn.make_causal_mask(x[..., 0])
    whole = functional(nn.dot_product_attention, lambda apply, x: apply(x, mask=mask))
    assert_as_good_as(
        decode, lambda arguments: whole((arguments[0], arguments[1:])), ({"params": variables["params"]}, x)
    )


def test_dropout_that_is_off_is_accepted():
    x = inputs(2)
    variables = layer(attention_fn).init(KEY, x)
    out = layer(attention_fn, dropout_rate=0.1).apply(variables, x, deterministic=True)
    np.testing.assert_array_equal(out, layer(attention_fn).apply(variables, x))


def test_a_softmax_in_float32_is_what_it_always_is(assert_as_good_as):
    assert_same(assert_as_good_as, lambda apply, x: apply(x), (inputs(2),), force_fp32_for_softmax=True)


def test_live_dropout_raises():
    x = inputs(2)
    variables = layer(attention_fn).init(KEY, x)
    with pytest.raises(NotImplementedError, match="dropout_rate must be 0 or deterministic True"):
        layer(attention_fn, dropout_rate=0.1).apply(variables, x, deterministic=False, rngs={"dropout": KEY})


def test_storing_the_weights_raises():
    x = inputs(2)
    variables = layer(attention_fn).init(KEY, x)
    with pytest.raises(NotImplementedError, match="sow_weights=True asks for the attention weights"):
        layer(attention_fn).apply(variables, x, sow_weights=True, mutable=["intermediates"])


def test_einsums_of_ones_own_raise():
    options = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum}
    with pytest.raises(ValueError, match="qk_attn_weights_einsum must be None"):
        layer(attention_fn, **options).init(KEY, inputs(2))
