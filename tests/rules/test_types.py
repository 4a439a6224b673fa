"""Shapes, dtypes and structure of the op, without running it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_fa4 import attention, rules
from jax_fa4.operands import Operands
from jax_fa4.rules.forward import forward_p
from jax_fa4.spec import AttentionSpec

pytestmark = pytest.mark.usefixtures("quick_compilation")


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize(("dtype", "lse_dtype"), [("bfloat16", "float32"), ("float16", "float32"), ("float32",) * 2])
def test_results_have_the_documented_shapes_and_dtypes(batch, dtype, lse_dtype):
    q, k, v = (shaped(*batch, *tail, dtype=dtype) for tail in ((5, 6, 16), (7, 2, 16), (7, 2, 24)))
    out, lse = jax.eval_shape(lambda *a: attention(*a, return_lse=True), q, k, v)
    assert (out.shape, out.dtype) == ((*batch, 5, 6, 24), dtype)
    assert (lse.shape, lse.dtype) == ((*batch, 6, 5), lse_dtype)


def test_lse_of_float64_is_float64():
    with jax.enable_x64(True):
        q = shaped(5, 2, 8, dtype="float64")
        assert jax.eval_shape(lambda a: attention(a, a, a, return_lse=True), q)[1].dtype == "float64"


def test_gradients_have_the_shapes_and_dtypes_of_their_arguments():
    args = {
        "q": shaped(2, 5, 4, 16, dtype="bfloat16"),
        "k": shaped(2, 7, 2, 16, dtype="bfloat16"),
        "v": shaped(2, 7, 2, 8, dtype="bfloat16"),
        "softmax_scale": shaped(),
        "softcap": shaped(),
        "sinks": shaped(4, dtype="bfloat16"),
        "bias": shaped(4, 1, 7, dtype="float16"),
    }
    gradients = jax.eval_shape(jax.grad(lambda args: attention(**args).astype(jnp.float32).sum()), args)
    assert {n: (g.shape, g.dtype) for n, g in gradients.items()} == {n: (a.shape, a.dtype) for n, a in args.items()}


def test_integers_and_masks_have_float0_tangents():
    q, lengths, mask = np.ones((2, 5, 2, 8), np.float32), np.asarray([3, 5]), np.ones((5, 5), bool)

    def loss(q, lengths, mask):
        return attention(q, q, q, kv_lengths=lengths, mask=mask, causal=True).sum()

    gradients = jax.grad(loss, (0, 1, 2), allow_int=True)(q, lengths, mask)
    assert [g.dtype for g in gradients] == [np.float32, jax.dtypes.float0, jax.dtypes.float0]
    _, tangent = jax.jvp(lambda q: loss(q, lengths, mask), (q,), (q,))
    assert np.isfinite(tangent)


def test_absent_operands_reach_no_primitive(equations):
    x = Operands(*(jnp.ones((5, 2, 8)),) * 3, softmax_scale=jnp.float32(1))
    [equation] = equations("jax_fa4_forward", lambda x: rules.attend(x, AttentionSpec.of(x)), x)
    assert equation.params["fields"] == ("q", "k", "v", "softmax_scale")
    assert len(equation.invars) == 4


def test_many_calls_of_one_kind_are_lowered_once():
    def model(x):
        for _ in range(8):
            x = attention(x, x, x, causal=True)
        return x.sum()

    text = jax.jit(jax.grad(model)).lower(np.ones((2, 9, 2, 8), np.float32)).as_text()
    assert text.count("stablehlo.while") == 2  # one forward, one backward


def test_operands_that_vary_over_different_manual_axes_are_no_match():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    q = jnp.ones((2, 5, 2, 8))

    def body(q, k):
        x = (q, k, k, jnp.float32(1))
        return forward_p.bind(*x, fields=Operands._fields[:4], spec=AttentionSpec.of(Operands(*x)))

    with pytest.raises(TypeError, match=r"operands must vary over the same mesh axes, got \[\[\], \['d'\]\]"):
        jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(q, q[:1])
