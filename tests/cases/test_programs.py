"""What must not depend on how often, where or on whose arrays a program runs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

X = {name: jnp.asarray(x) for name, x in testing.random(Cell(q=6, k=6, group=2)).items()}


def gradients(**options):
    return jax.grad(lambda *qkv: (jax_fa4.attention(*qkv, **options) ** 2).sum(), argnums=(0, 1, 2))(*X.values())


def test_deterministic_gradients_are_the_same_bits_every_time():
    first = gradients(causal=True, deterministic=True)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, gradients(causal=True, deterministic=True), first)


def test_broadcast_operands_are_not_confused_with_full_ones():
    one = {name: jnp.broadcast_to(x[:1], x.shape) for name, x in X.items()}
    call = jax.jit(jax_fa4.attention)
    shared, own = call(**one), call(**X)
    np.testing.assert_array_equal(shared[0], shared[1])
    np.testing.assert_array_equal(shared[0], own[0])
    assert np.abs(shared[1] - own[1]).max() > 0.1


def test_a_broadcast_cotangent_is_as_good_as_any():
    _, pullback = jax.vjp(jax_fa4.attention, *X.values())
    by_broadcast = pullback(jnp.broadcast_to(jnp.float32(1), (2, 6, 4, 16)))
    jax.tree.map(np.testing.assert_array_equal, by_broadcast, pullback(jnp.ones((2, 6, 4, 16))))


def test_the_program_runs_where_its_arrays_are():
    device = jax.devices()[1]
    out = jax.jit(jax_fa4.attention)(**jax.device_put(X, device))
    assert out.devices() == {device}
    np.testing.assert_array_equal(out, jax_fa4.attention(**X))


def test_an_option_of_an_earlier_call_does_not_stay():
    plain = jax_fa4.attention(**X)
    for options in ({"softcap": 1.0}, {"softmax_scale": 0.1}, {"window": (1, 1)}, {"causal": True}):
        assert np.abs(jax_fa4.attention(**X, **options) - plain).max() > 1e-2, options
    np.testing.assert_array_equal(jax_fa4.attention(**X), plain)


def test_every_option_works_on_arrays_that_are_sharded_over_explicit_mesh_axes():
    cell = Cell(
        batch=(4,),
        q=6,
        k=8,
        kv_heads=4,
        group=2,
        causal=True,
        window=(5, None),
        softcap=3.0,
        sinks=True,
        bias="keys",
        mask="full",
        segments=2,
        q_lengths=(6, 6, 3, 2),
        kv_lengths=(8, 8, 8, 4),
    )
    x = testing.random(cell)
    specs = dict.fromkeys(("q", "k", "v"), P("batch", None, "heads"))
    specs |= dict.fromkeys(("bias", "q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths"), P("batch"))
    specs |= {"sinks": P("heads"), "mask": P("batch", "heads")}
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        arrays = {name: jax.device_put(x[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
        options = {name: value for name, value in x.items() if name not in specs}
        out = jax.jit(lambda arrays: jax_fa4.attention(**arrays, **options))(arrays)
    assert jax.typeof(out).sharding.spec == P("batch", None, "heads", None)
    exact, rounded = testing.attention(x).out, testing.rounded(x).out
    assert np.abs(np.asarray(out) - exact).max() <= testing.error_bound(exact, rounded, "float32", factor=3)
