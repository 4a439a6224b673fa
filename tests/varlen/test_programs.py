"""Packed calls in transformed and compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import testing
from jax_fa4.blockwise import blocks

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = [[0, 4, 4, 10], [0, 0, 7, 9], [3, 5, 12, 12], [0, 1, 2, 3]]


def rows_of_documents(packed):
    """Keyword arguments of four calls, stacked."""
    calls = [packed(12, seed=seed, cu_seqlens_q=row, group=2) for seed, row in enumerate(ROWS)]
    return calls, {name: jnp.stack([x[name] for x in calls]) for name in ("q", "k", "v", "cu_seqlens_q")}


def causal(q, k, v, cu_seqlens_q):
    return jax_fa4.attention_varlen(q, k, v, cu_seqlens_q, causal=True)


def squares(x):
    return (jax.vmap(lambda x: causal(**x))(x) ** 2).sum()


def test_vmap_maps_rows_of_documents(packed):
    calls, stacked = rows_of_documents(packed)
    out = jax.jit(jax.vmap(lambda x: causal(**x)))(stacked)
    for ours, x in zip(out, calls, strict=True):
        np.testing.assert_allclose(ours, testing.attention_varlen({**x, "causal": True}).out, rtol=0, atol=2e-6)


def test_vmap_maps_offsets_alone(packed):
    calls, stacked = rows_of_documents(packed)
    one = {name: calls[0][name] for name in ("q", "k", "v")}
    out = jax.vmap(lambda offsets: causal(**one, cu_seqlens_q=offsets))(stacked["cu_seqlens_q"])
    for ours, row in zip(out, ROWS, strict=True):
        np.testing.assert_allclose(ours, causal(**one, cu_seqlens_q=np.array(row)), rtol=0, atol=2e-6)


def test_gradients_of_a_mapped_call_are_those_of_the_rows(packed):
    calls, stacked = rows_of_documents(packed)
    offsets = stacked.pop("cu_seqlens_q")
    gradients = jax.jit(jax.grad(lambda x: squares(x | {"cu_seqlens_q": offsets})))(stacked)
    for i, x in enumerate(calls):
        out = testing.attention_varlen(x | {"causal": True}).out
        expected = testing.gradients_varlen(x | {"causal": True}, 2 * out, np.zeros((4, 12)))
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient[i], expected[name], rtol=0, atol=2e-5)


def test_rows_of_documents_may_lie_on_different_devices(packed):
    _, stacked = rows_of_documents(packed)
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    each = jax.shard_map(jax.vmap(lambda x: causal(**x)), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    np.testing.assert_array_equal(jax.jit(each)(stacked), jax.jit(jax.vmap(lambda x: causal(**x)))(stacked))


def test_heads_of_documents_may_lie_on_different_devices(packed):
    x = packed(12, cu_seqlens_q=ROWS[0], group=2)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P(None, "heads"))
    split = {name: jax.device_put(x[name], sharding) for name in ("q", "k", "v")}
    program = jax.jit(lambda x, offsets: causal(**x, cu_seqlens_q=offsets))
    lowered = program.lower(split, x["cu_seqlens_q"]).compile()
    assert "all-gather" not in lowered.as_text()
    np.testing.assert_allclose(lowered(split, x["cu_seqlens_q"]), causal(**x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["jit", "shard_map"])
def test_gradients_of_documents_may_lie_on_different_devices(packed, is_mapped):
    calls, stacked = rows_of_documents(packed)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = ({name: P("rows", None, "heads") for name in ("q", "k", "v")}, P("rows"))

    def gradients(arrays, offsets):
        return jax.grad(lambda arrays: squares(arrays | {"cu_seqlens_q": offsets}))(arrays)

    if is_mapped:
        gradients = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs[0])
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    offsets = stacked.pop("cu_seqlens_q")
    ours = jax.jit(gradients)(*jax.device_put((stacked, offsets), shardings))
    for i, x in enumerate(calls):
        x |= {"causal": True}
        expected = testing.gradients_varlen(x, 2 * testing.attention_varlen(x).out, np.zeros((4, 12)))
        for name, gradient in ours.items():
            np.testing.assert_allclose(gradient[i], expected[name], rtol=0, atol=2e-5, err_msg=name)


def test_other_documents_and_another_maximum_compile_nothing(packed):
    x = packed(12)
    program = jax.jit(jax_fa4.attention_varlen)
    for row in ROWS:
        offsets = jnp.asarray(row, jnp.int32)
        program(**x, cu_seqlens_q=offsets, max_seqlen_q=jnp.diff(offsets).max(), q_lengths=jnp.diff(offsets) // 2)
    assert program._cache_size() == 1


def test_a_known_maximum_changes_nothing(packed):
    x = packed(12, cu_seqlens_q=ROWS[0])
    np.testing.assert_array_equal(
        jax_fa4.attention_varlen(**x, max_seqlen_q=6, max_seqlen_kv=6), jax_fa4.attention_varlen(**x)
    )


def test_shapes_are_known_without_running(packed):
    x = packed(12, 9, cu_seqlens_q=[0, 12], cu_seqlens_kv=[0, 9], group=2, dtype="bfloat16")
    out, lse = jax.eval_shape(lambda x: jax_fa4.attention_varlen(**x, return_lse=True), x)
    assert (out.shape, out.dtype) == ((12, 4, 8), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 12), jnp.float32)


def test_saved_results_spare_a_second_forward(packed):
    x = packed(12, cu_seqlens_q=ROWS[0])
    policy = jax.checkpoint_policies.save_only_these_names("jax_fa4_out", "jax_fa4_lse")
    loss = jax.checkpoint(lambda q: jax_fa4.attention_varlen(**{**x, "q": q}).sum(), policy=policy)
    assert str(jax.make_jaxpr(jax.grad(loss))(x["q"])).count("jax_fa4_forward[") == 1


def test_an_exported_program_takes_other_documents(packed):
    x = packed(12, cu_seqlens_q=ROWS[0])
    program = jax.export.export(jax.jit(jax_fa4.attention_varlen), platforms=["cpu"])(**x)
    other = {**x, "cu_seqlens_q": np.array(ROWS[1], np.int32)}
    loaded = jax.export.deserialize(program.serialize())
    np.testing.assert_allclose(loaded.call(**other), jax_fa4.attention_varlen(**other), rtol=0, atol=1e-6)


def test_no_array_of_all_queries_by_all_keys_exists(packed):
    total = 64 * blocks.BLOCK
    x = packed(total, cu_seqlens_q=[0, total // 2, total])
    text = jax.jit(jax.grad(lambda q: causal(**{**x, "q": q}).sum())).lower(x["q"]).as_text()
    assert f"{total}x{total}" not in text


def test_sequences_whose_offsets_descend_are_cut_where_turns_matter(packed):
    """Sequences that overlap would wait for each other's turns forever."""
    x = packed(12, cu_seqlens_q=[0, 4, 10])

    def gradients(offsets):
        def total(q):
            return jax_fa4.attention_varlen(q, x["k"], x["v"], offsets, causal=True, deterministic=True).sum()

        return jax.grad(total)(x["q"])

    np.testing.assert_array_equal(gradients(jnp.array([0, 8, 2, 10])), gradients(jnp.array([0, 8, 8, 10])))
