"""Sharded programs on eight devices: XLA splits the op over batch and heads, with the same results and no gathering."""

import contextlib
import re

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
B, T, S, N, K, D = 4, 12, 10, 8, 4, 16  # T tells arrays of queries, S those of keys in compiled programs
HEADS = P("data", None, "model")
BATCH = P("data")
COLLECTIVE = re.compile(
    r"= \(?(\w+\[[\d,]*\]).*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
)


def collectives(compiled):
    """(shape, kind) of everything that the devices exchange."""
    return COLLECTIVE.findall(compiled.as_text())


@contextlib.contextmanager
def mesh_of(kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        yield mesh


def arrays(kv_heads=K):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, D), (B, S, kv_heads, D), (B, S, kv_heads, 2 * D)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def attend(q, k, v, **options):
    return attention(q, k, v, causal=True, return_lse=True, **options)


def loss(q, k, v, **options):
    out, lse = attend(q, k, v, **options)
    return (out**2).sum() + jnp.sin(lse).sum()


gradients = jax.grad(loss, (0, 1, 2))
kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.fixture(scope="module")
def wanted():
    """Results and gradients on one device."""
    return {kv_heads: jax.jit(lambda *a: (attend(*a), gradients(*a)))(*arrays(kv_heads)) for kv_heads in (1, 2, K)}


def place(mesh, arrays, *specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


@kinds
@pytest.mark.parametrize("kv", [HEADS, BATCH], ids=["kv-heads-sharded", "kv-heads-replicated"])
def test_forward_over_batch_and_heads_exchanges_nothing(kind, kv, wanted, assert_close):
    with mesh_of(kind) as mesh:
        args = place(mesh, arrays(), HEADS, kv, kv)
        compiled = jax.jit(attend).lower(*args).compile()
        out, lse = compiled(*args)
    assert not collectives(compiled)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), out.ndim)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), lse.ndim)
    assert_close((out, lse), wanted[K][0])


@kinds
def test_backward_over_batch_and_heads_exchanges_nothing(kind, wanted, assert_close):
    with mesh_of(kind) as mesh:
        args = place(mesh, arrays(), HEADS, HEADS, HEADS)
        compiled = jax.jit(gradients).lower(*args).compile()
        actual = compiled(*args)
    assert not collectives(compiled)
    assert all(g.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), g.ndim) for g in actual)
    assert_close(actual, wanted[K][1])


@kinds
def test_backward_of_replicated_kv_heads_exchanges_their_gradients_at_most(kind, wanted, assert_close):
    with mesh_of(kind) as mesh:
        args = place(mesh, arrays(), HEADS, BATCH, BATCH)
        compiled = jax.jit(gradients).lower(*args).compile()
        actual = compiled(*args)
    exchanged = collectives(compiled)
    assert len(exchanged) <= 2
    assert all(str(S) in re.findall(r"\d+", shape.split("[")[1]) for shape, _ in exchanged)
    assert_close(actual, wanted[K][1])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_too_few_kv_heads_are_repeated_on_an_explicit_mesh(kv_heads, wanted, assert_close):
    with mesh_of(AxisType.Explicit) as mesh:
        args = place(mesh, arrays(kv_heads), HEADS, BATCH, BATCH)
        forward, backward = (jax.jit(f).lower(*args).compile() for f in (attend, gradients))
        actual = forward(*args), backward(*args)
    assert not collectives(forward)
    assert all(str(T) not in re.findall(r"\d+", shape.split("[")[1]) for shape, _ in collectives(backward))
    assert_close(actual, wanted[kv_heads])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_too_few_kv_heads_on_an_automatic_mesh_give_the_same_results(kv_heads, wanted, assert_close):
    with mesh_of(AxisType.Auto) as mesh:
        args = place(mesh, arrays(kv_heads), HEADS, BATCH, BATCH)
        actual = jax.jit(lambda *a: (attend(*a), gradients(*a)))(*args)
    assert_close(actual, wanted[kv_heads])


@kinds
@pytest.mark.parametrize("spec", [P(None, "model"), P("model", None, "data"), P()], ids=["queries", "swapped", "none"])
def test_any_sharding_gives_the_same_results(kind, spec, wanted, assert_close):
    with mesh_of(kind) as mesh:
        kv = P() if "model" in spec[1:] else spec
        args = place(mesh, arrays(), spec, kv, kv)
        actual = jax.jit(lambda *a: (attend(*a), gradients(*a)))(*args)
    assert_close(actual, wanted[K])


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "data", None, "model")], ids=str)
def test_results_may_be_sharded_unlike_the_queries(spec, wanted, assert_close):
    def constrained(q, k, v):
        out, lse = attend(q, k, v)
        return (jax.lax.with_sharding_constraint(out, spec) ** 2).sum() + jnp.sin(lse).sum()

    with mesh_of(AxisType.Auto) as mesh:
        actual = jax.jit(jax.grad(constrained, (0, 1, 2)))(*place(mesh, arrays(), HEADS, HEADS, HEADS))
    assert_close(actual, wanted[K][1])


@kinds
def test_every_option_follows_the_sharding_of_the_queries(kind, assert_close):
    rng = np.random.default_rng(1)
    options = {
        "sinks": (rng.standard_normal(N).astype(np.float32), P("model")),
        "bias": (rng.standard_normal((B, N, T, S)).astype(np.float32), P("data", "model")),
        "mask": (rng.random((B, 1, T, S)) < 0.8, P("data")),
        "kv_lengths": (np.asarray([10, 3, 7, 0], np.int32), P("data")),
        "q_segment_ids": (rng.integers(0, 2, (B, T)), P("data")),
        "kv_segment_ids": (rng.integers(0, 2, (B, S)), P("data")),
        "softcap": (np.float32(2), P()),
    }
    values = {name: value for name, (value, _) in options.items()}
    wanted = jax.jit(attend)(*arrays(), **values)
    with mesh_of(kind) as mesh:
        args = place(mesh, arrays(), HEADS, HEADS, HEADS)
        placed = dict(zip(options, place(mesh, values.values(), *(spec for _, spec in options.values())), strict=True))
        compiled = jax.jit(attend).lower(*args, **placed).compile()
        actual = compiled(*args, **placed)
    assert not collectives(compiled)
    assert_close(actual, wanted)


@kinds
def test_a_mapped_axis_and_a_sharded_batch_stay_apart(kind, wanted, assert_close):
    both = jax.vmap(lambda *a: (attend(*a), gradients(*a)))
    with mesh_of(kind) as mesh:
        doubled = [np.stack([a, a]) for a in arrays()]
        args = place(mesh, doubled, *[P(None, *HEADS)] * 3)
        compiled = jax.jit(both).lower(*args).compile()
        actual = compiled(*args)
    assert not collectives(compiled)
    assert_close(actual, jax.tree.map(lambda a: np.stack([a, a]), wanted[K]))


@kinds
def test_a_sharded_axis_can_be_mapped(kind, wanted, assert_close):
    both = jax.vmap(lambda *a: (attend(*a), gradients(*a)))
    with mesh_of(kind) as mesh:
        args = place(mesh, arrays(), HEADS, HEADS, HEADS)
        compiled = jax.jit(both).lower(*args).compile()
        actual = compiled(*args)
    assert not collectives(compiled)
    assert_close(actual, wanted[K])


def curvature(q, k, v):
    return jax.grad(lambda *a: sum((g**2).sum() for g in gradients(*a)), (0, 1, 2))(q, k, v)


@kinds
@pytest.mark.parametrize(
    ("q_spec", "kv_spec"),
    [(HEADS, HEADS), (HEADS, BATCH), (P(None, "model"), P())],
    ids=["heads", "query-heads", "queries"],
)
def test_second_derivatives_of_sharded_arrays(kind, q_spec, kv_spec, assert_close):
    wanted = jax.jit(curvature)(*arrays())
    with mesh_of(kind) as mesh:
        actual = jax.jit(curvature)(*place(mesh, arrays(), q_spec, kv_spec, kv_spec))
    assert_close(actual, wanted, rtol=1e-3)


def test_an_explicit_mesh_types_the_results():
    with mesh_of(AxisType.Explicit) as mesh:
        args = place(mesh, arrays(), HEADS, BATCH, BATCH)
        out, lse = jax.eval_shape(attend, *args)
        dq, dk, _ = jax.eval_shape(gradients, *args)
    specs = [tuple(a.sharding.spec) for a in (out, lse, dq, dk)]
    of_q, of_kv = ("data", None, "model", None), ("data", None, None, None)
    assert specs == [of_q, ("data", "model", None), of_q, of_kv]
