"""`attention_qkv` is `attention` of the three parts, under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4 import attention, attention_qkv

pytestmark = pytest.mark.usefixtures("quick_compilation")

QKV = np.random.default_rng(0).standard_normal((4, 9, 3, 2, 8), np.float32)
DOUT = np.random.default_rng(1).standard_normal((4, 9, 2, 8), np.float32)
OPTIONS = {"causal": True, "kv_lengths": jnp.array([9, 4, 1, 0]), "softcap": 3.0, "sinks": jnp.array([0.3, -1.0])}
fused = functools.partial(attention_qkv, **OPTIONS)


def parted(qkv, **more):
    return attention(*(qkv[..., i, :, :] for i in range(3)), **{**OPTIONS, **more})


def curvature(call, qkv):
    gradient = jax.grad(lambda a: jnp.vdot(call(a), DOUT[: a.shape[0]]))
    return jax.jvp(gradient, (qkv,), (qkv[::-1],))


close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_out_lse_and_gradient_are_those_of_the_parts(dtype):
    qkv = jnp.asarray(QKV, dtype)
    for got, want in zip(fused(qkv, return_lse=True), parted(qkv, return_lse=True), strict=True):
        assert got.dtype == want.dtype
        close(np.asarray(got, np.float32), np.asarray(want, np.float32))
    got, want = (jax.grad(lambda a, f=f: jnp.vdot(f(a).astype(np.float32), DOUT))(qkv) for f in (fused, parted))
    close(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_tangents_and_second_derivatives_are_those_of_the_parts():
    for got, want in zip(curvature(fused, QKV), curvature(parted, QKV), strict=True):
        close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_of_gradients_equals_a_loop(axis):
    def gradient(qkv, dout):
        return jax.grad(lambda a: jnp.vdot(attention_qkv(a, causal=True), dout))(qkv)

    got = jax.vmap(gradient, in_axes=(axis, None))(np.moveaxis(QKV, 0, axis), DOUT[0])
    close(got, np.stack([gradient(a, DOUT[0]) for a in QKV]))


def test_heads_and_batch_may_be_sharded():
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        qkv = jax.device_put(QKV, NamedSharding(mesh, P("d", None, None, "m")))
        gradient = jax.jit(jax.grad(lambda a: attention_qkv(a, causal=True).sum()))(qkv)
        out = jax.jit(functools.partial(attention_qkv, causal=True))(qkv)
    assert jax.typeof(out).sharding.spec == P("d", None, "m", None)
    assert jax.typeof(gradient).sharding.spec == P("d", None, None, "m", None)
    close(out, attention(*(QKV[:, :, i] for i in range(3)), causal=True))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 9, 3, 8), {}, r"qkv must have axes \[\*batch, seq, 3, heads, head_dim\], got shape \(2, 9, 3, 8\)"),
        ((9, 3, 8), {}, "qkv must have axes"),
        ((9, 4, 2, 8), {}, "qkv must have axes"),
        ((9, 3, 2, 7), {}, "qkv's head_dim must be a multiple of 8"),
        ((9, 3, 2, 8), {"layout": "BNTH"}, "an option of attention_qkv must be one of bias, .*, got layout"),
        ((9, 3, 2, 8), {"scale": 1.0}, "got scale"),
        ((9, 3, 2, 8), {"softmax_scale": float("nan")}, "softmax_scale must be finite"),
        ((9, 3, 2, 8), {"kv_lengths": 10}, "kv_lengths"),
        ((9, 3, 2, 8), {"return_lse": 1}, "return_lse must be a Python bool"),
    ],
)
def test_a_wrong_call_is_told_so(shape, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attention_qkv(jnp.zeros(shape), **options)
