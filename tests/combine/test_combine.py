"""Partial results put together, against attention of all keys and against the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

pytestmark = pytest.mark.usefixtures("quick_compilation")

CUTS = {"halves": [4], "uneven": [1, 2, 7], "with-empty-ones": [0, 3, 3, 8]}


def parts_of(x, cuts, attend=jax_fa4.attention, **options):
    """out and lse of the keys between `cuts`, stacked."""
    axis = -2 if x.get("layout") == "BNTH" else -3
    split = zip(*(jnp.split(x[name], cuts, axis=axis) for name in ("k", "v")), strict=True)
    parts = [attend(**{**x, "k": k, "v": v}, **options, return_lse=True) for k, v in split]
    return tuple(map(jnp.stack, zip(*parts, strict=True)))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_parts_make_the_whole(cuts, layout):
    x = testing.random(Cell(q=5, k=8, group=2, layout=layout))
    out, lse = jax_fa4.combine(*parts_of(x, cuts), layout=layout)
    exact, rounded = testing.attention(x), testing.rounded(x)
    assert abs(out - exact.out).max() <= testing.error_bound(exact.out, rounded.out, "float32", 3)
    assert abs(lse - exact.lse).max() <= testing.error_bound(exact.lse, rounded.lse, "float32", 3)


def test_packed_results_are_combined_alike():
    x = testing.random(Cell(batch=(), q=6, k=6))
    offsets = np.array([0, 3, 6])
    first = jax_fa4.attention_varlen(**x, cu_seqlens_q=offsets, kv_lengths=np.array([2, 1]), return_lse=True)
    others = {"cu_seqlens_kv": np.array([2, 4, 6]), "kv_lengths": np.array([1, 2])}
    second = jax_fa4.attention_varlen(**x, cu_seqlens_q=offsets, **others, return_lse=True)
    out, _ = jax_fa4.combine(*map(jnp.stack, zip(first, second, strict=True)))
    np.testing.assert_allclose(out, jax_fa4.attention_varlen(**x, cu_seqlens_q=offsets), rtol=0, atol=1e-6)


def test_a_part_without_keys_may_hold_nan():
    outs, lses = parts_of(testing.random(Cell(q=3, k=4)), [4])
    dirty = outs.at[1].set(jnp.nan)

    def loss(outs, lses):
        out, lse = jax_fa4.combine(outs, lses)
        return out.sum() + lse.sum()

    assert (lses[1] == -np.inf).all()
    np.testing.assert_array_equal(jax_fa4.combine(dirty, lses)[0], outs[0])
    of_outs, of_lses = jax.grad(loss, (0, 1))(dirty, lses)
    np.testing.assert_array_equal(of_outs, np.broadcast_to([[[[[1.0]]]], [[[[0.0]]]]], outs.shape))
    assert np.isfinite(of_lses).all()
    assert not of_lses[1].any()


def test_queries_without_any_key_stay_empty():
    lses = jnp.full((3, 2, 4), -jnp.inf)
    (out, lse), pullback = jax.vjp(jax_fa4.combine, jnp.ones((3, 4, 2, 8)), lses)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not any(gradient.any() for gradient in pullback((jnp.ones_like(out), jnp.ones_like(lse))))


def test_gradients_through_parts_are_those_of_the_whole():
    x = testing.random(Cell(q=4, k=8, group=2))

    def loss(results):
        out, lse = results
        return (out**2).sum() + jnp.sin(lse).sum()

    def whole(x):
        return loss(jax_fa4.attention(**x, return_lse=True))

    def in_parts(x):
        return loss(jax_fa4.combine(*parts_of(x, [3, 3, 6])))

    ours, expected = jax.grad(in_parts)(x), jax.grad(whole)(x)
    for name, gradient in ours.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-5, err_msg=name)


def test_lse_far_apart_or_large_does_not_overflow():
    outs = jnp.array([1.0, 2.0, 3.0])[:, None, None, None] * jnp.ones((3, 1, 1, 8))
    out, lse = jax_fa4.combine(outs, jnp.array([1e4, -1e4, 1e4])[:, None, None])
    np.testing.assert_allclose(out, 2.0, rtol=1e-6)
    np.testing.assert_allclose(lse, 1e4 + np.log(2), rtol=1e-6)


def test_half_precision_is_combined_in_float32():
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((64, 5, 2, 8)).astype("float16"), rng.standard_normal((64, 2, 5)).astype("float32")
    out, lse = jax_fa4.combine(outs, lses)
    weights = np.moveaxis(np.exp(lses.astype(np.float64)), -1, -2)[..., None]
    exact = (weights * outs).sum(0) / weights.sum(0)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    assert abs(np.asarray(out, np.float64) - exact).max() <= testing.error_bound(
        exact, exact.astype("float16"), "float16", 1
    )


def test_vmap_maps_batches_of_parts():
    outs, lses = parts_of(testing.random(Cell(q=3, k=6)), [2])
    mapped, _ = jax.vmap(jax_fa4.combine, in_axes=1)(outs, lses)
    np.testing.assert_array_equal(mapped, jax_fa4.combine(outs, lses)[0])


def on_different_devices():
    """A program of q, k and v whose four devices have keys of their own; each returns the result of all of them."""
    mesh = jax.make_mesh((4,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))

    def own_keys(q, k, v):
        out, lse = jax_fa4.attention(q, k, v, return_lse=True)
        return jax_fa4.combine(*(jax.lax.all_gather(a, "keys") for a in (out, lse)))[0][None]

    keys = jax.P(None, "keys")
    return jax.shard_map(own_keys, mesh=mesh, in_specs=(jax.P(), keys, keys), out_specs=jax.P("keys"))


def test_parts_may_lie_on_different_devices():
    x = testing.random(Cell(batch=(1,), q=4, k=16))
    for device in jax.jit(on_different_devices())(x["q"], x["k"], x["v"]):
        np.testing.assert_allclose(device, testing.attention(x).out, rtol=0, atol=1e-6)


def test_gradients_of_parts_on_different_devices_are_those_of_the_whole():
    x = testing.random(Cell(batch=(1,), q=4, k=16))
    arrays = [x[name] for name in ("q", "k", "v")]
    weights = np.random.default_rng(1).standard_normal((4, 1, 4, 2, 16)).astype(np.float32)
    run = on_different_devices()
    ours = jax.jit(jax.grad(lambda *arrays: (run(*arrays) * weights).sum(), (0, 1, 2)))(*arrays)
    expected = testing.gradients(x, weights.sum(0), np.zeros((1, 2, 4)))
    for gradient, name in zip(ours, ("q", "k", "v"), strict=True):
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=2e-5, err_msg=name)
