"""A fused array on a GPU: the same bits as from its parts, which lie elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention, attention_qkv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128])
def test_out_and_gradient_are_those_of_the_parts(head_dim):
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((2, 333, 3, 4, head_dim)), jnp.bfloat16)
    dout = jnp.asarray(rng.standard_normal((2, 333, 4, head_dim)), jnp.bfloat16)
    options = {"causal": True, "implementation": "kernel"}

    def run(call):
        return jax.jit(lambda a: jax.vjp(call, a))(qkv)

    out, pullback = run(lambda a: attention_qkv(a, **options))
    expected, expected_pullback = run(lambda a: attention(*(a[:, :, i] for i in range(3)), **options))
    np.testing.assert_array_equal(out, expected)
    (got,), (parted,) = pullback(dout), expected_pullback(dout)
    np.testing.assert_array_equal(got[:, :, 1:], parted[:, :, 1:])  # dq is summed in no fixed order
    np.testing.assert_allclose(
        got[:, :, 0].astype(np.float32), parted[:, :, 0].astype(np.float32), rtol=0.02, atol=0.02
    )
