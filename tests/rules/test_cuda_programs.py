"""Programs that are lowered for a GPU: what they call, what XLA makes of them, and what a user is told."""

import functools
import importlib.util
import re
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import cubins, launcher, support
from jax_fa4.rules import cuda, forward

sys.path.insert(0, str(Path(__file__).parent))
import h200

pytestmark = [
    pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks"),
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')"
    ),
]
needs_plugin = pytest.mark.skipif(h200.why_absent() is not None, reason=str(h200.why_absent()))
HALF = jnp.bfloat16


@pytest.fixture(scope="module", autouse=True)
def _shared_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def compiled(f, *shapes, mesh=None, specs=None):
    """Optimised HLO of `f` on H200s; every argument is bfloat16."""
    mesh = mesh or h200.mesh()
    specs = specs or [P()] * len(shapes)
    args = [jax.ShapeDtypeStruct(s, HALF, sharding=NamedSharding(mesh, p)) for s, p in zip(shapes, specs, strict=True)]
    return jax.jit(f).lower(*args).compile().as_text()


def lowered(f, *shapes, dtype=HALF):
    """StableHLO of `f` for cuda, where no device is at hand."""
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(hlo):
    """Results and operands of our custom calls, in HLO text."""
    return re.findall(r"= \((.*?)\) custom-call\((.*?)\), custom_call_target=\"jax_fa4_launch_v1\"", hlo)


Q, KV = (2, 200, 8, 64), (2, 333, 4, 64)
causal = functools.partial(jax_fa4.attention, causal=True, implementation="kernel")


@needs_plugin
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_the_call_reads_the_users_arrays_as_they_lie_in_memory(layout):
    q, kv = (s if layout == "BTNH" else (s[0], s[2], s[1], s[3]) for s in (Q, KV))
    hlo = compiled(functools.partial(causal, layout=layout), q, kv, kv)
    assert len(calls(hlo)) == 1
    assert not re.search(r" (copy|transpose|fusion|convert)\(", hlo), hlo


@needs_plugin
def test_a_fused_array_is_read_where_it_lies():
    hlo = compiled(functools.partial(jax_fa4.attention_qkv, causal=True, implementation="kernel"), (2, 200, 3, 8, 64))
    [(_, operands)] = calls(hlo)
    assert len(operands.split(", ")) == 3  # the array, the scale and the window
    assert not re.search(r" (copy|transpose|fusion|convert|slice)\(", hlo), hlo


@needs_plugin
def test_the_gradient_of_a_fused_array_is_written_where_it_belongs():
    def loss(qkv, dout):
        return jnp.vdot(jax_fa4.attention_qkv(qkv, implementation="kernel"), dout)

    hlo = compiled(jax.grad(loss), (2, 200, 3, 8, 64), (2, 200, 8, 64))
    assert "bf16[2,8,3,200,1,64]" in calls(hlo)[-1][0]
    whole = r"= bf16\[2,(?:8,3,200,1|200,3,8),64\]\S* (?:fusion|broadcast|pad|convert|add|select)\("
    assert not re.search(rf" (copy|transpose|concatenate|slice|dynamic-update-slice|pad|convert)\(|{whole}", hlo), hlo


@needs_plugin
@pytest.mark.parametrize(
    ("spec", "local"),
    [
        (P("d"), "bf16[2,4,200,2,64]"),
        (P(None, None, "m"), "bf16[4,2,200,2,64]"),
        (P("d", None, "m"), "bf16[2,2,200,2,64]"),
    ],
    ids=str,
)
def test_sharded_batch_and_heads_need_no_communication(spec, local):
    mesh = h200.mesh((2, 2), ("d", "m"))
    hlo = compiled(causal, (4, *Q[1:]), (4, *KV[1:]), (4, *KV[1:]), mesh=mesh, specs=[spec] * 3)
    ((results, _),) = calls(hlo)
    assert results.startswith(local), results
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", hlo)


def with_features(q, k, v, bias, lengths, ids, kv_ids, sinks):
    features = {"bias": bias, "kv_lengths": lengths, "q_segment_ids": ids, "kv_segment_ids": kv_ids, "sinks": sinks}
    return jax_fa4.attention(q, k, v, implementation="kernel", **features)


FEATURES = ((200, 333), (4,), (4, 200), (4, 333), (8,))
DTYPES = (HALF, HALF, HALF, HALF, jnp.int32, jnp.int32, jnp.int32, jnp.float32)


@needs_plugin
@pytest.mark.parametrize(
    ("ways", "local"),
    [
        ((1, 1), "s32[4,4], f32[4,4,2], s32[4,4,200], s32[4,4,333], s32[4,4,2,4], bf16[1,1,200,333]"),
        ((2, 2), "s32[2,2], f32[2,2,2], s32[2,2,200], s32[2,2,333], s32[2,2,2,4], bf16[2,2,2,200,333]"),
    ],
    ids=["one-device", "2x2"],
)
def test_what_a_call_has_beside_q_k_and_v_is_split_with_it(ways, local):
    mesh = h200.mesh(ways, ("d", "m"))
    shapes = ((4, *Q[1:]), (4, *KV[1:]), (4, *KV[1:]), *FEATURES)
    specs = [P("d", None, "m")] * 3 + [P(), P("d"), P("d"), P("d"), P("m")]
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, DTYPES, specs, strict=True)
    ]
    hlo = jax.jit(with_features).lower(*args).compile().as_text()
    ((_, operands),) = calls(hlo)
    shape_of = dict(re.findall(r"%?([\w.-]+) = ([a-z0-9]+\[[\d,]*\])", hlo))
    found = [shape_of[name] for name in re.findall(r"%([\w.-]+)", operands)]
    assert ", ".join(found[-6:]) == local
    assert "all-gather" not in hlo


@needs_plugin
def test_a_mapped_axis_joins_the_sharded_batch():
    mesh = h200.mesh((4,), ("d",))
    specs = [P(None, "d")] * 3
    hlo = compiled(jax.vmap(causal), (3, 4, *Q[1:]), (3, 4, *KV[1:]), (3, 4, *KV[1:]), mesh=mesh, specs=specs)
    ((results, _),) = calls(hlo)
    assert results.startswith("bf16[3,1,4,200,2,64]"), results
    assert "all-gather" not in hlo


@needs_plugin
@pytest.mark.parametrize(("queries", "local"), [((3, 1), "bf16[2,3,1,2,64]"), ((3,), "bf16[2,1,3,2,64]")], ids=str)
def test_pages_are_split_by_heads_without_communication(queries, local):
    mesh, table, lengths = h200.mesh((2,), ("m",)), np.zeros((3, 5), np.int32), np.full(3, 70, np.int32)
    packed = {"cu_seqlens_q": np.arange(4, dtype=np.int32)} if len(queries) == 1 else {}

    def decode(q, k, v):
        return jax_fa4.attention_paged(q, k, v, table, lengths, implementation="kernel", **packed)

    specs = [P(*[None] * len(queries), "m"), P(None, None, "m"), P(None, None, "m")]
    hlo = compiled(decode, (*queries, 8, 64), (9, 16, 4, 64), (9, 16, 4, 64), mesh=mesh, specs=specs)
    ((results, _),) = calls(hlo)
    assert results.startswith(local), results
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", hlo)


def pull(layout="BTNH", **options):
    """The gradients by q, k and v, for a cotangent of out."""

    def run(q, k, v, dout):
        attend = functools.partial(jax_fa4.attention, layout=layout, causal=True, implementation="kernel", **options)
        return jax.vjp(attend, q, k, v)[1](dout)

    return run


@needs_plugin
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_gradients_are_one_call_on_arrays_as_they_lie_in_memory(layout):
    q, kv = (s if layout == "BTNH" else (s[0], s[2], s[1], s[3]) for s in (Q, KV))
    hlo = compiled(pull(layout), q, kv, kv, q)
    assert len(calls(hlo)) == 2  # forward and backward
    assert not re.search(r" (copy|transpose|convert)\(", hlo), hlo


@needs_plugin
def test_gradients_of_sharded_batch_and_heads_need_no_communication():
    mesh = h200.mesh((2, 2), ("d", "m"))
    hlo = compiled(pull(), *((4, *s[1:]) for s in (Q, KV, KV, Q)), mesh=mesh, specs=[P("d", None, "m")] * 4)
    assert [results.split("{")[0] for results, _ in calls(hlo)] == ["bf16[2,2,200,2,64]"] * 2
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", hlo)


@pytest.mark.matrix
@needs_plugin
@pytest.mark.parametrize(
    ("shape", "spec", "made", "reduced"),
    [
        ((4, 8, 200, 333), P("d", "m"), "bf16[2,2,2,200,333]", []),
        ((200, 333), P(), "bf16[2,2,2,200,333]", ["f32[200,333]"]),
        ((4, 1, 1, 333), P("d"), "f32[2,2,2,333]", ["f32[2,333]"]),
    ],
    ids=["of-each-head", "of-all", "of-keys"],
)
def test_devices_sum_their_gradients_of_a_bias_that_they_share(shape, spec, made, reduced):
    def run(q, k, v, bias, dout):
        return jax.vjp(lambda bias: causal(q, k, v, bias=bias), bias)[1](dout)

    heads = P("d", None, "m")
    arrays = ((4, *Q[1:]), (4, *KV[1:]), (4, *KV[1:]), shape, (4, *Q[1:]))
    mesh = h200.mesh((2, 2), ("d", "m"))
    hlo = compiled(run, *arrays, mesh=mesh, specs=[heads, heads, heads, spec, heads])
    assert made in calls(hlo)[-1][0]
    assert not re.search(r"all-gather|all-to-all|collective-permute", hlo)
    assert re.findall(r"= (\S+?)\{\S+ all-reduce(?:-start)?\(", hlo) == reduced


def test_gradients_without_a_kernel_say_why():
    support.warn_fallback.cache_clear()
    reason, pages = "gradient kernel for pages of keys", (np.zeros((2, 3), np.int32), np.array([3, 4]))

    def loss(q, k, v, **more):
        return jax_fa4.attention_paged(q, k, v, *pages, **more).astype(jnp.float32).sum()

    shapes = (2, 1, 8, 64), (9, 16, 4, 64), (9, 16, 4, 64)
    with pytest.warns(support.FallbackWarning, match=reason):
        text = lowered(jax.grad(loss), *shapes)
    assert text.count(f"@{launcher.TARGET}(") == 1  # the forward
    with pytest.raises(NotImplementedError, match=reason):
        lowered(jax.grad(functools.partial(loss, implementation="kernel")), *shapes)


def test_exported_gradients_carry_their_cubins():
    b, t = jax.export.symbolic_shape("b, t")
    x = jax.ShapeDtypeStruct((b, t, 4, 64), HALF)
    checks = jax_fa4.export_disabled_checks()
    program = jax.export.export(jax.jit(pull()), platforms=["cuda"], disabled_checks=checks)(x, x, x, x)
    assert program.mlir_module().count("images = ") == 2
    assert [str(a.shape) for a in program.out_avals] == [str(x.shape)] * 3


@needs_plugin
def test_a_plan_that_the_library_refuses_fails_the_compilation(monkeypatch):
    from jax_fa4.rules import cuda

    monkeypatch.setattr(cuda, "encode", lambda plans: b"no plan")
    with pytest.raises(Exception, match="jax_fa4"):
        compiled(lambda q, k, v: jax_fa4.attention(q, k, v, window=(3, None)), Q, KV, KV)


def test_a_program_holds_a_plan_and_no_sizes():
    plans = {re.search(r'plan = "(.*?)"', lowered(causal, q, kv, kv))[1] for q, kv in ((Q, KV), ((7, 5, 4, 64),) * 2)}
    assert len(plans) == 1


def test_lengths_scales_and_windows_share_a_cubin(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cubins.lookup, "_memory", {})
    for q, kv, scale, window in (
        (Q, KV, 0.5, (3, 4)),
        (KV, KV, 0.25, (9, 0)),
        ((1, 1, 3, 64), (1, 9, 1, 64), 2.0, (0, 1)),
    ):
        lowered(functools.partial(jax_fa4.attention, softmax_scale=scale, window=window), q, kv, kv)
    assert len(list(tmp_path.glob("*.cubin"))) == 1


def test_other_lengths_scales_and_windows_compile_no_kernel_of_a_gradient(monkeypatch):
    asked = []
    monkeypatch.setattr(cubins, "get", lambda config, get=cubins.get: asked.append(config) or get(config))
    few, many = ((1, 9, 6, 64), (1, 30, 3, 64)), (KV, (2, 177, 2, 64))
    for (q, kv), scale, right in (((Q, KV), 0.5, 0), (many, 2.0, 9), (few, 1.0, 3)):
        attend = functools.partial(jax_fa4.attention, softmax_scale=scale, window=(None, right))
        lowered(lambda q, k, v, dout, attend=attend: jax.vjp(attend, q, k, v)[1](dout), q, kv, kv, q)
    assert len(asked) == 3 * 4  # forward, preprocess, backward, postprocess
    assert len(set(asked)) == 4


@pytest.mark.parametrize(
    ("options", "shape", "dtype", "reason"),
    [
        ({}, Q, jnp.float32, "float32"),
        ({"softcap": 3.0}, Q, jnp.float32, "float32"),
    ],
    ids=lambda v: "-".join(v) or "plain" if isinstance(v, dict) else None,
)
def test_a_call_without_a_kernel_says_why(options, shape, dtype, reason):
    support.warn_fallback.cache_clear()
    with pytest.warns(support.FallbackWarning, match=reason):
        text = lowered(functools.partial(jax_fa4.attention, **options), shape, shape, shape, dtype=dtype)
    assert launcher.TARGET not in text
    run = functools.partial(jax_fa4.attention, implementation="kernel", **options)
    with pytest.raises(NotImplementedError, match=reason):
        lowered(run, shape, shape, shape, dtype=dtype)


def test_every_feature_at_once_is_one_call_of_a_kernel():
    options = {
        "softcap": 3.0,
        "window": (9, 2),
        "q_offset": 1,
        "q_lengths": np.array([3, 4]),
        "mask": np.ones((5, 5), bool),
    }
    q = (2, 5, 4, 72)
    assert lowered(functools.partial(jax_fa4.attention, implementation="kernel", **options), q, q, q).count(
        launcher.TARGET
    )


@pytest.mark.parametrize(
    ("q_len", "kv_len", "kernel"), [(1, 300, "decode"), (16, 300, "decode"), (17, 300, "forward"), (1, 200, "forward")]
)
def test_heads_of_a_group_share_a_tile_where_queries_are_few_and_keys_many(monkeypatch, q_len, kv_len, kernel):
    def ask(config):
        raise LookupError(config.kernel)

    monkeypatch.setattr(cubins, "get", ask)
    with pytest.raises(LookupError, match=f"^{kernel}$"):
        lowered(jax_fa4.attention, (2, q_len, 8, 64), *[(2, kv_len, 2, 64)] * 2)


@pytest.mark.parametrize(("t", "n", "kv_heads"), [(0, 2, 2), (5, 0, 0), (5, 0, 2)])
def test_without_queries_or_heads_nothing_is_launched(t, n, kv_heads):
    q, kv, pages = (1, t, n, 64), (1, 9, kv_heads, 64), (3, 16, kv_heads, 64)
    table, lengths = np.array([[1, 0]]), np.array([20])
    for function, *shapes in (
        (pull(), q, kv, kv, q),
        (functools.partial(jax_fa4.attention, window=(3, 0), implementation="kernel"), q, kv, kv),
        (lambda *x: jax_fa4.attention_paged(*x, table, lengths, implementation="kernel"), q, pages, pages),
    ):
        assert launcher.TARGET not in lowered(function, *shapes)


def test_asking_for_xla_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lowered(functools.partial(jax_fa4.attention, implementation="xla"), Q, KV, KV)
    assert launcher.TARGET not in text


def test_an_architecture_without_kernels_says_so():
    support.warn_fallback.cache_clear()
    single = jax.ShapeDtypeStruct((2, 200, 4, 64), jnp.float32)
    with jax_fa4.target_arch("sm_100a"), pytest.warns(support.FallbackWarning, match="no sm_100a kernel"):
        text = jax.jit(jax_fa4.attention).trace(single, single, single).lower(lowering_platforms=("cuda",)).as_text()
    assert launcher.TARGET not in text


def test_a_program_for_several_architectures_carries_a_kernel_for_each():
    x = jax.ShapeDtypeStruct((2, 200, 4, 64), HALF)
    archs = ("sm_90a", "sm_100a", "sm_103a")
    with jax_fa4.target_arch(*archs):
        program = jax.export.export(
            jax.jit(causal), platforms=["cuda"], disabled_checks=jax_fa4.export_disabled_checks()
        )(x, x, x)
    text = program.mlir_module()
    assert [arch for arch in archs if f"jax_fa4_forward_{arch}_bfloat16_d64_right_0" in text] == list(archs)


def test_segments_are_for_one_architecture_at_a_time():
    def packed(q, k, v):
        ids = jnp.zeros(q.shape[:2], jnp.int32)
        return jax_fa4.attention(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)

    support.warn_fallback.cache_clear()
    with jax_fa4.target_arch("sm_100a"):
        assert launcher.TARGET in lowered(packed, Q, Q, Q)
    with jax_fa4.target_arch("sm_90a", "sm_100a"), pytest.warns(support.FallbackWarning, match="one architecture"):
        assert launcher.TARGET not in lowered(packed, Q, Q, Q)


@pytest.mark.parametrize("symbolic", [False, True])
def test_an_exported_program_carries_its_cubins(symbolic):
    b, t = jax.export.symbolic_shape("b, t") if symbolic else (2, 200)
    x = jax.ShapeDtypeStruct((b, t, 4, 64), HALF)
    checks = jax_fa4.export_disabled_checks()
    program = jax.export.export(jax.jit(causal), platforms=["cuda"], disabled_checks=checks)(x, x, x)
    again = jax.export.deserialize(program.serialize())
    assert again.mlir_module().count("images = ") == 1
    assert str(again.out_avals[0].shape) == str(x.shape)


def test_an_export_for_both_platforms_runs_here():
    x = jax.ShapeDtypeStruct((2, 9, 4, 64), HALF)
    checks = jax_fa4.export_disabled_checks()
    f = jax.jit(functools.partial(jax_fa4.attention, causal=True))
    program = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=checks)(x, x, x)
    q = jax.random.normal(jax.random.key(0), x.shape, HALF)
    np.testing.assert_array_equal(jax.export.deserialize(program.serialize()).call(q, q, q), f(q, q, q))


def test_a_gpu_that_has_not_run_its_kernels_yet_is_told_once(monkeypatch):
    def blockwise(ctx, *args, target, **params):
        return forward._blockwise_lowering(ctx, *args, **params)

    monkeypatch.setattr(cuda, "_target", lambda ctx: cuda.Target(("sm_100a",)))
    monkeypatch.setattr(cuda, "_lowered", lambda call: blockwise)  # no kernel has to be compiled
    support.warn_untried.cache_clear()
    attention = functools.partial(jax_fa4.attention, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(functools.partial(attention, implementation="kernel"), Q, KV, KV)
        with jax_fa4.target_arch("sm_100a"):
            lowered(attention, Q, KV, KV)
    with pytest.warns(support.UntriedWarning, match="sm_100a kernels have been emulated and have not run on hardware"):
        lowered(attention, Q, KV, KV)
