"""`jax.export` of programs with attention, and the architectures that an exported program is for."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_fa4
from jax_fa4 import testing
from jax_fa4.export import ENVIRONMENT_VARIABLE, asked_archs, target_archs
from jax_fa4.testing import Cell

X = testing.random(Cell(q=5, k=7, group=2))
attend = functools.partial(jax_fa4.attention, causal=True, return_lse=True, implementation="xla")


def exported(function, *args, platforms=("cpu",), vjp_order=0):
    """As another process would load it."""
    export_ = export.export(jax.jit(function), platforms=platforms, disabled_checks=jax_fa4.export_disabled_checks())
    return export.deserialize(export_(*args).serialize(vjp_order=vjp_order))


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids=str)
def test_a_loaded_program_gives_what_the_call_gives(platforms):
    loaded = exported(attend, *X.values(), platforms=platforms)
    jax.tree.map(np.testing.assert_array_equal, tuple(loaded.call(*X.values())), attend(**X))


def test_a_loaded_program_can_be_differentiated():
    def loss(attend, *xs):
        out, lse = attend(*xs)
        return (out**2).sum() + lse.sum()

    loaded = exported(attend, *X.values(), vjp_order=1)
    gradients = jax.grad(functools.partial(loss, loaded.call), argnums=(0, 1, 2))(*map(jnp.asarray, X.values()))
    direct = jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2))(*map(jnp.asarray, X.values()))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), gradients, direct)


def test_one_program_serves_every_batch_and_length():
    b, t, s = export.symbolic_shape("b, t, s")
    q = jax.ShapeDtypeStruct((b, t, 4, 16), "float32")
    kv = jax.ShapeDtypeStruct((b, s, 2, 16), "float32")
    loaded = exported(attend, q, kv, kv)
    for cell in Cell(q=5, k=7, group=2), Cell(batch=(1,), q=9, k=3, group=2):
        x = testing.random(cell)
        exact, rounded = testing.attention(x, causal=True), testing.rounded(x, causal=True)
        out, _ = loaded.call(*x.values())
        assert np.abs(out - exact.out).max() <= testing.error_bound(exact.out, rounded.out, "float32", factor=3)


def test_masks_and_lengths_of_any_size_are_exported_too():
    b, t, s = export.symbolic_shape("b, t, s")
    q = jax.ShapeDtypeStruct((b, t, 4, 16), "float32")
    kv = jax.ShapeDtypeStruct((b, s, 2, 16), "float32")
    mask, lengths = jax.ShapeDtypeStruct((b, 1, t, s), "bool"), jax.ShapeDtypeStruct((b,), "int32")
    ids = jax.ShapeDtypeStruct((b, t), "int32"), jax.ShapeDtypeStruct((b, s), "int32")

    def masked(q, k, v, mask, lengths, q_ids, kv_ids):
        return jax_fa4.attention(q, k, v, mask=mask, kv_lengths=lengths, q_segment_ids=q_ids, kv_segment_ids=kv_ids)

    loaded = exported(masked, q, kv, kv, mask, lengths, *ids)
    options = {"mask": "full", "segments": 2, "kv_lengths": (3, 6)}
    x = testing.random(Cell(q=5, k=7, group=2, **options))
    x["mask"] = x["mask"][:, :1]
    names = ("q", "k", "v", "mask", "kv_lengths", "q_segment_ids", "kv_segment_ids")
    np.testing.assert_allclose(loaded.call(*(x[name] for name in names)), testing.attention(x).out, atol=1e-6)


def test_our_custom_call_is_among_the_disabled_checks():
    assert export.DisabledSafetyCheck.custom_call("jax_fa4_launch_v1") in jax_fa4.export_disabled_checks()


def test_by_default_programs_are_for_architectures_whose_kernels_have_run_on_hardware(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert asked_archs() == ()
    assert target_archs() == ("sm_90a",)


@pytest.mark.parametrize("names", ["sm_100a", " sm_100a , sm_90a", "sm_90a,sm_100a,sm_90a"])
def test_the_environment_chooses_architectures(monkeypatch, names):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, names)
    assert target_archs() == tuple(dict.fromkeys(name.strip() for name in names.split(",")))


def test_the_context_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "sm_100a")
    with jax_fa4.target_arch("sm_90a", "sm_100a"):
        assert target_archs() == ("sm_90a", "sm_100a")
        with jax_fa4.target_arch("sm_90a"):
            assert target_archs() == ("sm_90a",)
    assert target_archs() == ("sm_100a",)


def test_another_choice_traces_and_lowers_a_program_again():
    traced = []

    @jax.jit
    def program(x):
        traced.append(target_archs())
        return x

    for arch in "sm_90a", "sm_100a", "sm_90a":
        with jax_fa4.target_arch(arch):
            program(1.0)
    assert traced == [("sm_90a",), ("sm_100a",)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "target_arch's archs must name sm_90a or sm_100a or sm_103a, got nothing"),
        (("sm_90",), "target_arch's archs must name sm_90a or sm_100a or sm_103a, got 'sm_90'"),
        (("sm_90a", 100), "target_arch's archs must name sm_90a or sm_100a or sm_103a, got 100"),
    ],
    ids=["none", "without-a", "number"],
)
def test_unknown_architectures_are_refused(names, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"), jax_fa4.target_arch(*names):
        pass


@pytest.mark.parametrize("names", ["sm_80", "sm_90a,", "90"])
def test_unknown_architectures_in_the_environment_are_refused(monkeypatch, names):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, names)
    wrong = names.split(",")[-1]
    with pytest.raises(ValueError, match=f"^JAX_FA4_ARCH must name sm_90a or sm_100a or sm_103a, got '{wrong}'$"):
        target_archs()


def test_a_gpu_program_without_a_kernel_is_blockwise_and_says_so():
    jax_fa4.support.warn_fallback.cache_clear()
    attention = functools.partial(jax_fa4.attention, causal=True)
    with pytest.warns(jax_fa4.support.FallbackWarning, match="no sm_90a kernel for head_dim 16 in float32"):
        exported(attention, *X.values(), platforms=("cuda",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported(functools.partial(attention, implementation="xla"), *X.values(), platforms=("cuda",))


def test_packed_sequences_of_any_number_are_exported_too():
    num_offsets, t = export.symbolic_shape("n, t", constraints=["n >= 1"])
    q, cuts = jax.ShapeDtypeStruct((t, 4, 16), "float32"), jax.ShapeDtypeStruct((num_offsets,), "int32")
    loaded = exported(lambda q, cuts: jax_fa4.attention_varlen(q, q, q, cuts, causal=True), q, cuts)
    rows = testing.random(Cell(batch=(), q=9, k=9, kv_heads=4))["q"]
    for cuts in ([0, 9], [1, 4, 4, 8], [3]):
        cuts = np.array(cuts, np.int32)
        np.testing.assert_allclose(
            loaded.call(rows, cuts), jax_fa4.attention_varlen(rows, rows, rows, cuts, causal=True), atol=1e-6
        )
    table, new = jax.ShapeDtypeStruct((num_offsets - 1, 2), "int32"), jax.ShapeDtypeStruct((t, 1, 16), "float32")

    def append(pool, new, table, positions, cuts):
        return jax_fa4.append_kv(pool, pool, new, new, table, positions, cu_seqlens=cuts)[0]

    args = np.zeros((5, 4, 1, 16), np.float32), new, table, jax.ShapeDtypeStruct((t,), "int32")
    loaded = exported(append, *args, jax.ShapeDtypeStruct((num_offsets,), "int32"))
    call = args[0], rows[:, :1], np.array([[4, 0], [1, 2]]), np.arange(9) % 4, np.array([1, 4, 8])
    call = tuple(x if x.dtype == np.float32 else x.astype(np.int32) for x in call)
    np.testing.assert_array_equal(loaded.call(*call), append(*call))


def test_a_symbolic_head_dim_is_refused():
    (d,) = export.symbolic_shape("8*d")
    with pytest.raises(ValueError, match=r"^q's head_dim must be a number, got 8\*d; other axes may be symbolic"):
        exported(attend, *[jax.ShapeDtypeStruct((5, 2, d), "float32")] * 3)
