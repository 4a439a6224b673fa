"""The op inside `shard_map` with checked types: replicated operands get their gradients summed over the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4 import attention

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, this process was started with fewer"),
]
B, T, N, K, D = 4, 6, 8, 4, 16
HEADS = P("data", None, "model")
RESULTS = (HEADS, P("data", "model"))


def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def arguments(kv_heads=K):
    rng = np.random.default_rng(0)
    shapes = {"q": (B, T, N, D), "k": (B, T, kv_heads, D), "v": (B, T, kv_heads, D), "sinks": (N,), "bias": (T, T)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"softmax_scale": np.float32(0.3), "kv_lengths": np.asarray([6, 2, 0, 5], np.int32)}


def attend(args):
    out, lse = attention(**args, causal=True, return_lse=True)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def loss_of(attend):
    def loss(floats, lengths):
        out, lse = attend(floats | {"kv_lengths": lengths})
        return (out**2).sum() + jnp.sin(lse).sum()

    return loss


def both(attend):
    def run(args):
        floats = {name: a for name, a in args.items() if name != "kv_lengths"}
        return attend(args), jax.grad(loss_of(attend))(floats, args["kv_lengths"])

    return jax.jit(run)


REPLICATED = {"softmax_scale": P(), "bias": P(), "kv_lengths": P("data")}
SHARDINGS = {
    "heads": {"q": HEADS, "k": HEADS, "v": HEADS, "sinks": P("model")},
    "one-kv-head": {"q": HEADS, "k": P("data"), "v": P("data"), "sinks": P("model")},
}


@pytest.mark.parametrize(("name", "kv_heads"), [("heads", K), ("one-kv-head", 1)])
def test_results_and_gradients_equal_those_of_one_device(name, kv_heads, assert_close):
    args = arguments(kv_heads)
    mapped = jax.shard_map(attend, mesh=mesh(), in_specs=(SHARDINGS[name] | REPLICATED,), out_specs=RESULTS)
    assert_close(both(mapped)(args), both(attend)(args))


def test_only_queries_are_split_over_devices(assert_close):
    args = arguments()
    specs = {name: P() for name in args} | {"q": P(None, None, None, None)}

    def rows(args):  # each device takes some queries, as in context parallelism
        at = jax.lax.axis_index("data") * (T // 2)
        part = args | {"q": jax.lax.dynamic_slice_in_dim(args["q"], at, T // 2, axis=1)}
        part["bias"] = jax.lax.dynamic_slice_in_dim(args["bias"], at, T // 2, axis=0)
        out, lse = attention(**part, causal=True, q_offset=at + args["kv_lengths"] - T, return_lse=True)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    mapped = jax.shard_map(rows, mesh=mesh(), in_specs=(specs,), out_specs=(P(None, "data"), P(None, None, "data")))
    assert_close(both(mapped)(args), both(attend)(args))


def test_second_derivatives(assert_close):
    args = arguments()
    lengths = args.pop("kv_lengths")
    mapped = jax.shard_map(attend, mesh=mesh(), in_specs=(SHARDINGS["heads"] | REPLICATED,), out_specs=RESULTS)

    def curvature(attend):
        def norm(args):
            return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss_of(attend))(args, lengths)))

        return jax.jit(jax.grad(norm))(args)

    assert_close(curvature(mapped), curvature(attend), rtol=1e-3)


def test_some_axes_may_stay_automatic(assert_close):
    q, k, v = (arguments()[name] for name in "qkv")

    def gradients(attend):
        return jax.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))

    over_batch = jax.shard_map(
        attention, mesh=mesh(), in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"}
    )
    args = [jax.device_put(a, NamedSharding(mesh(), HEADS)) for a in (q, k, v)]
    assert_close(jax.jit(gradients(over_batch))(*args), jax.jit(gradients(attention))(q, k, v))
