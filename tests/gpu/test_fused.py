"""A fused array on a GPU: exact, and the same bits as from its parts, which lie elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention, attention_qkv, testing

pytestmark = pytest.mark.gpu

CASES = [
    {"head_dim": 64, "causal": True},
    {"head_dim": 128, "causal": True},
    {"head_dim": 256, "causal": True},
    {"head_dim": 96, "dtype": "float16", "window": (100, 20), "kv_lengths": np.array([333, 100], np.int32)},
    {"head_dim": 192, "dtype": "float16", "kv_lengths": np.array([0, 300], np.int32), "deterministic": True},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"d{case['head_dim']}")
def test_out_and_gradient_are_exact_and_those_of_the_parts(case):
    options = dict(case)
    head_dim, dtype = options.pop("head_dim"), testing.np_dtype(options.pop("dtype", "bfloat16"))
    rng = np.random.default_rng(0)
    qkv, dout = (rng.standard_normal((2, 333, *more, 4, head_dim)).astype(dtype) for more in ([3], []))

    def run(call):
        def pull(qkv, dout):
            out, pullback = jax.vjp(lambda a: call(a, implementation="kernel", **options), qkv)
            return out, *pullback(dout)

        return jax.jit(pull)(jnp.asarray(qkv), jnp.asarray(dout))

    def parted(a, **options):
        return attention(*(a[:, :, i] for i in range(3)), **options)

    (out, gradient), (parted_out, parted_gradient) = run(attention_qkv), run(parted)
    x = {name: qkv[:, :, i] for i, name in enumerate("qkv")}
    x |= {name: value for name, value in options.items() if name != "deterministic"}
    exact, rounded = testing.attention(x).out, testing.rounded(x).out
    assert np.abs(np.asarray(out, np.float64) - exact).max() <= testing.error_bound(exact, rounded, dtype)
    exact, rounded = testing.gradients(x, dout), testing.rounded_gradients(x, dout)
    for i, name in enumerate("qkv"):
        error = np.abs(np.asarray(gradient[:, :, i], np.float64) - exact[name]).max()
        assert error <= testing.error_bound(exact[name], rounded[name], dtype), f"d{name}: {error}"
    np.testing.assert_array_equal(out, parted_out)
    first = 0 if options.get("deterministic") else 1  # else dq is summed in no fixed order
    np.testing.assert_array_equal(gradient[:, :, first:], parted_gradient[:, :, first:])
