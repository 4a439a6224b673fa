"""implementation="emulate": the kernel in the emulator, from inside a JAX program."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention, attention_varlen, target_arch

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')"
)


def operands(q_len=40, kv_len=130, heads=2, kv_heads=1, batch=(1,)):
    keys = jax.random.split(jax.random.key(q_len), 3)
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    return [jax.random.normal(key, (*batch, *s, 64), jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]


def both(*arrays, **arguments):
    """(out, lse) of the emulated kernel, and of blockwise JAX in float32."""
    emulated = attention(*arrays, **arguments, implementation="emulate", return_lse=True)
    wide = [a.astype(jnp.float32) for a in arrays]
    return emulated, attention(*wide, **arguments, implementation="xla", return_lse=True)


def assert_near(emulated, expected):
    (out, lse), (wide_out, wide_lse) = emulated, expected
    np.testing.assert_allclose(np.asarray(out, np.float32), wide_out, atol=2e-2)
    np.testing.assert_allclose(lse, wide_lse, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ({"q_len": 200, "kv_len": 77}, {"causal": True}),  # the first queries see nothing
        ({"heads": 4, "kv_heads": 2, "batch": ()}, {"window": (None, 5)}),
        ({"q_len": 5, "batch": (2, 1)}, {"softmax_scale": 0.3}),
        ({"kv_len": 0, "q_len": 3}, {}),
    ],
)
def test_the_results_are_attention(shape, arguments):
    emulated, expected = both(*operands(**shape), **arguments)
    assert emulated[0].dtype == jnp.bfloat16
    assert_near(emulated, expected)


@needs_compiler
def test_heads_may_come_before_the_sequence():
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in operands())
    assert_near(*both(q, k, v, layout="BNTH"))


@needs_compiler
def test_jit_vmap_and_grad():
    q, k, v = operands(batch=(2, 1), q_len=30, kv_len=50)

    def loss(implementation, q, k, v, dtype):
        out = jax.vmap(
            lambda q, k, v: attention(q, k, v, causal=True, implementation=implementation), in_axes=(0, None, 0)
        )(*(a.astype(dtype) for a in (q, k[0], v)))
        return (out.astype(jnp.float32) ** 2).sum()

    grad = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=(0, 4))
    value, emulated = grad("emulate", q, k, v, jnp.bfloat16)
    expected_value, expected = grad("xla", q, k, v, jnp.float32)
    np.testing.assert_allclose(value, expected_value, rtol=1e-2)
    for got, want in zip(emulated, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.1)


def test_what_has_no_kernel_is_refused():
    q, k, v = operands()
    with pytest.raises(NotImplementedError, match="implementation='emulate' does not take softcap yet"):
        attention(q, k, v, softcap=3.0, implementation="emulate")
    with pytest.raises(NotImplementedError, match="has no sm_90a kernel for head_dim 64 in float32"):
        attention(*(a.astype(jnp.float32) for a in (q, k, v)), implementation="emulate")
    offsets = jnp.array([0, 40])
    with pytest.raises(NotImplementedError, match="packed sequences"):
        attention_varlen(q[0], q[0], q[0], offsets, offsets, implementation="emulate")


def test_the_architecture_is_the_one_asked_for():
    with target_arch("sm_100a"), pytest.raises(NotImplementedError, match="has no sm_100a kernel"):
        attention(*operands(), implementation="emulate")
