"""implementation="emulate": the kernel in the emulator, from inside a JAX program."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention, attention_qkv, attention_varlen, emulate, target_arch, testing
from jax_fa4.emulator.launch import Options
from jax_fa4.plan import evaluate

from ..emptied import REASONS, without_keys

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')"
)


def operands(q_len=40, kv_len=130, heads=2, kv_heads=1, batch=(1,), seed=0, **dims):
    sizes = {"q": q_len, "k": kv_len, "kv_heads": kv_heads, "group": heads // kv_heads}
    cell = testing.Cell(batch=batch, dtype="bfloat16", **{"head_dim": 64, **sizes, **dims})
    return [testing.random(cell, seed)[name] for name in "qkv"]


CELL = testing.Cell(batch=(2,), q=70, k=150, kv_heads=2, group=2, head_dim=64, dtype="bfloat16", causal=True)
EVERYTHING = dataclasses.replace(
    CELL,
    window=(100, None),
    q_offset=60,
    q_lengths=(70, 33),
    kv_lengths=(140, 90),
    segments=2,
    mask="full",
    bias="keys",
    softcap=3.0,
    sinks=True,
    layout="BNTH",
)
CAUSAL = [
    dataclasses.replace(CELL, q=200, k=77),  # the first queries see nothing
    dataclasses.replace(CELL, batch=(2, 1), kv_heads=1, group=3, layout="BNTH"),
    dataclasses.replace(CELL, batch=(), softmax_scale=0.3),
    dataclasses.replace(CELL, q=3, k=0),
    dataclasses.replace(CELL, q=0),
]


def assert_exact(cell):
    x = testing.random(cell)
    assert_results_exact(x, *attention(**x, implementation="emulate", return_lse=True), cell.dtype)


def assert_results_exact(x, out, lse, dtype):
    out, lse = np.asarray(out), np.asarray(lse)
    exact, rough = testing.attention(x), testing.rounded(x)
    error = np.abs(out.astype(np.float64) - exact.out).max(initial=0)
    assert error <= testing.error_bound(exact.out, rough.out, dtype, 3 if "softcap" in x else 2)
    seen = np.isfinite(exact.lse)
    assert np.array_equal(np.isfinite(lse), seen)
    np.testing.assert_allclose(lse[seen], exact.lse[seen], rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("cell", CAUSAL, ids=str)
def test_the_results_are_attention(cell):
    assert_exact(cell)


@needs_compiler
def test_jit_vmap_and_grad():
    q, k, v = operands(batch=(2, 1), q_len=30, kv_len=50)

    def loss(implementation, q, k, v, dtype):
        out = jax.vmap(
            lambda q, k, v: attention(q, k, v, causal=True, implementation=implementation), in_axes=(0, None, 0)
        )(*(a.astype(dtype) for a in (q, k[0], v)))
        return (out.astype(jnp.float32) ** 2).sum()

    grad = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=(0, 4))
    value, emulated = grad("emulate", q, k, v, jnp.bfloat16)
    expected_value, expected = grad("xla", q, k, v, jnp.float32)
    np.testing.assert_allclose(value, expected_value, rtol=1e-2)
    for got, want in zip(emulated, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.1)


@needs_compiler
@pytest.mark.parametrize(
    ("cell", "by"),
    [
        (dataclasses.replace(CELL, kv_heads=1), ()),
        (dataclasses.replace(CELL, q=200, k=100, batch=(1,), kv_heads=1, group=5, head_dim=72, layout="BNTH"), ()),
        (EVERYTHING, ("softmax_scale", "sinks", "softcap", "bias")),
        (dataclasses.replace(CELL, q=40, k=30, batch=(1,), kv_heads=1, head_dim=192), ("softmax_scale",)),
    ],
    ids=["BTNH", "BNTH-shared-heads-d72", "every-operand", "d192"],
)
def test_results_and_gradients_come_from_the_kernels(cell, by):
    x = testing.random(cell)
    x |= {"softmax_scale": np.float32(0.2)} if "softmax_scale" in by else {}
    x |= {"softcap": np.float32(x["softcap"])} if "softcap" in by else {}
    wanted = ("q", "k", "v", *by)
    rest = {name: value for name, value in x.items() if name not in wanted}
    attend = functools.partial(attention, **rest, implementation="emulate", return_lse=True)
    with emulate.recording() as launches:
        (out, lse), pull_back = jax.vjp(lambda *a: attend(**dict(zip(wanted, a, strict=True))), *(x[n] for n in wanted))
        rng = np.random.default_rng(1)
        dout, dlse = (jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in (out, lse))
        gradients = jax.block_until_ready(pull_back((dout, dlse)))
    steps = ["forward", "preprocess", "backward", "postprocess"]
    steps += ["postprocess"] * 2 * (cell.group == 5)  # of dk and dv: two CTAs share the query heads of a tile of keys
    steps += ["backward"] * len({"bias", "softcap"}.intersection(by))
    assert [launch.entry.split("_")[2] for launch in launches] == steps
    assert_results_exact(x, out, lse, "bfloat16")
    exact, rough = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
    for name, gradient in zip(wanted, gradients, strict=True):
        error = np.abs(np.asarray(gradient, np.float64) - exact[name]).max()
        assert error <= testing.error_bound(exact[name], rough[name], "bfloat16", factor=3 if by else 2), name


@needs_compiler
def test_rows_that_see_no_key_get_zero_and_give_nothing():
    x = testing.random(dataclasses.replace(CELL, kv_heads=1, group=1, causal=False, bias="full"))
    rows = np.array([[3, 9], [20, 40], [64, 70]])  # of the first entry; a different reason hides all keys from each
    for reason, (start, end) in zip(REASONS, rows, strict=True):
        emptied = np.zeros((2, 70), bool)
        emptied[0, start:end] = emptied[1] = True
        x = without_keys(x, emptied, reason)
    wanted = ("q", "k", "v", "bias")
    rest = {name: value for name, value in x.items() if name not in wanted}
    attend = functools.partial(attention, **rest, implementation="emulate", return_lse=True)
    (out, lse), pull_back = jax.vjp(lambda *a: attend(**dict(zip(wanted, a, strict=True))), *(x[n] for n in wanted))
    assert_results_exact(x, out, lse, "bfloat16")
    empty = np.isneginf(lse)
    assert list(empty.sum(axis=(1, 2))) == [6 + 20 + 6, 70]
    rng = np.random.default_rng(1)
    dout, dlse = (rng.standard_normal(a.shape).astype(a.dtype) for a in (out, lse))
    dlse[empty] = np.inf
    gradients = dict(zip(wanted, jax.block_until_ready(pull_back((jnp.asarray(dout), jnp.asarray(dlse)))), strict=True))
    exact, rough = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
    for name, gradient in gradients.items():
        error = np.abs(np.asarray(gradient, np.float64) - exact[name]).max()
        assert error <= testing.error_bound(exact[name], rough[name], "bfloat16"), name
        assert not np.asarray(gradient, np.float32)[1].any()
    assert not np.asarray(gradients["q"], np.float32)[empty.swapaxes(1, 2)].any()
    assert not np.asarray(gradients["bias"])[empty].any()


@needs_compiler
def test_each_mapped_entry_has_a_gradient_of_its_own_by_scalars_that_all_share():
    q, k, v = operands(q_len=5, kv_len=9, heads=1, batch=(2,))
    scalars = np.float32(0.3), np.float32(2)

    def gradients(q, k, v, implementation):
        def loss(scale, cap):
            return attention(q, k, v, softmax_scale=scale, softcap=cap, implementation=implementation).sum()

        return jax.grad(loss, (0, 1))(*scalars)

    with emulate.recording() as launches:
        got = jax.jit(jax.vmap(lambda *x: gradients(*x, "emulate"), (0, None, 0)))(q, k[0], v)
    exact = [gradients(*(np.float32(a) for a in (q[i], k[0], v[i])), "xla") for i in range(2)]
    np.testing.assert_allclose(np.transpose(got), exact, rtol=0.05)
    assert "jax_fa4_backward_scores_total" in launches[-1].entry


@needs_compiler
def test_a_fault_of_the_kernel_reaches_the_caller():
    with emulate.recording(Options(order="random", max_steps=10)), pytest.raises(Exception, match="does not end"):
        jax.block_until_ready(attention(*operands(q_len=3), causal=True, implementation="emulate"))


def test_what_has_no_kernel_is_refused():
    q, k, v = operands()
    with pytest.raises(NotImplementedError, match="has no sm_90a kernel for head_dim 64 in float32"):
        attention(*(a.astype(jnp.float32) for a in (q, k, v)), implementation="emulate")
    x = packed(q_len=3, kv_len=3, cu_seqlens_q=[0, 3])
    with (
        target_arch("sm_100a"),
        pytest.raises(NotImplementedError, match="has no sm_100a kernel for head_dim 64 in float32"),
    ):
        attention_varlen(**x | {name: x[name].astype(np.float32) for name in "qkv"}, implementation="emulate")


def packed(q_len, kv_len, dims=None, **offsets):
    """Keyword arguments of `attention_varlen`; rows of no sequence are NaN."""
    q, k, v = (np.array(a[0]) for a in operands(q_len, kv_len, **dims or {}))
    x = {"q": q, "k": k, "v": v, **{name: np.array(value, np.int32) for name, value in offsets.items()}}
    for name, side in (("q", "q"), ("k", "kv"), ("v", "kv")):
        starts = offsets.get(f"cu_seqlens_{side}", offsets["cu_seqlens_q"])
        lengths = offsets.get(f"{side}_lengths", np.diff(starts))
        for start, length, end in zip([0, *starts], [0, *lengths, 0], [*starts, len(x[name])], strict=True):
            x[name][start + min(length, end - start) : end] = np.nan
    return x


OFFSETS = {"cu_seqlens_q": [3, 3, 70, 150], "cu_seqlens_kv": [0, 9, 140, 150], "q_lengths": [5, 60, 80]}
OFFSETS |= {"kv_lengths": [9, 131, 4]}
FEW = {"cu_seqlens_q": [1, 1, 20, 86], "cu_seqlens_kv": [0, 5, 81, 90], "q_lengths": [5, 18, 65]}
FEW |= {"kv_lengths": [4, 70, 9]}


@needs_compiler
def test_packed_sequences_are_exact_whatever_lies_beside_them():
    sinks = np.array([0.5, -2.0], np.float32)  # with a cap a CTA has one tile, or none
    x = packed(q_len=165, kv_len=170, **OFFSETS) | {"softcap": 3.0, "sinks": sinks}
    out, lse = attention_varlen(**x, return_lse=True, implementation="emulate")
    assert_packed_exact(x, out, lse)


@needs_compiler
@pytest.mark.parametrize(
    ("deterministic", "dims", "by"),
    [
        (False, {}, {"softmax_scale": np.float32(0.2)}),
        (True, {}, {"softmax_scale": np.float32(0.2)}),
        (True, {"head_dim": 192, "head_dim_v": 128}, {"softcap": np.float32(3)}),
        pytest.param(False, {"head_dim": 256, "head_dim_v": 136}, {}, marks=pytest.mark.matrix),
    ],
    ids=["d64", "d64-deterministic", "d192-v128-deterministic", "d256-v136"],
)
def test_gradients_of_packed_sequences_are_exact_whatever_lies_beside_them(deterministic, dims, by):
    x = packed(q_len=90, kv_len=91, dims=dims, **FEW) if dims else packed(q_len=165, kv_len=170, **OFFSETS)
    x |= {"causal": True} | by
    wanted = ("q", "k", "v", *by)
    dout = np.random.default_rng(3).standard_normal((*x["q"].shape[:2], x["v"].shape[-1])).astype(x["q"].dtype)
    dlse = np.random.default_rng(4).standard_normal((2, len(dout))).astype(np.float32)
    others = {name: value for name, value in x.items() if name not in wanted}

    def call(wrt):
        options = {"return_lse": True, "deterministic": deterministic, "implementation": "emulate"}
        return attention_varlen(**wrt, **others, **options)

    with emulate.recording() as launches:
        results, pullback = jax.vjp(call, {name: x[name] for name in wanted})
        (got,) = jax.block_until_ready(pullback((jnp.asarray(dout), jnp.asarray(dlse))))
    assert_packed_exact(x, *results)
    assert_packed_gradients_exact(x, dout, dlse, got)
    for name in "qkv":
        assert not np.asarray(got[name], np.float32)[np.isnan(x[name].astype(np.float32)).any(axis=(1, 2))].any()
    kernels = [launch.entry.split("_sm_90a")[0].removeprefix("jax_fa4_") for launch in launches]
    main = "backward_wide" if dims else "backward"
    backward = ["schedule", "schedule", "preprocess", main, "postprocess"]
    backward += ["backward_scores_total"] * ("softcap" in by)
    assert kernels == ["schedule", "forward", *backward]


@needs_compiler
def test_entries_of_packed_sequences_count_together_who_has_added_to_dq():
    """Above head dim 64 the last kernel starts early and goes by that count."""
    dims = {"heads": 4, "kv_heads": 2, "head_dim": 72}
    entries = [
        packed(q_len=40, kv_len=40, dims=dims, cu_seqlens_q=[0, 3, 40], kv_lengths=[2, 30]),
        packed(q_len=40, kv_len=40, dims=dims | {"seed": 1}, cu_seqlens_q=[1, 20, 39], kv_lengths=[19, 19]),
    ]
    together = {name: np.stack([x[name] for x in entries]) for name in entries[0]}
    others = {name: together.pop(name) for name in list(together) if name not in "qkv"}
    rng = np.random.default_rng(3)
    dout = rng.standard_normal(together["q"].shape).astype(together["q"].dtype)
    dlse = rng.standard_normal((2, 4, 40)).astype(np.float32)

    def call(wrt):
        attend = functools.partial(attention_varlen, return_lse=True, implementation="emulate")
        return jax.vmap(lambda wrt, others: attend(**wrt, **others))(wrt, others)

    with emulate.recording() as launches:
        results, pullback = jax.vjp(call, together)
        (got,) = jax.block_until_ready(pullback((jnp.asarray(dout), jnp.asarray(dlse))))
    assert "_postprocess_" in launches[-1].entry
    for i, x in enumerate(entries):
        assert_packed_exact(x, *(array[i] for array in results))
        assert_packed_gradients_exact(x, dout[i], dlse[i], {name: array[i] for name, array in got.items()})


@needs_compiler
@pytest.mark.parametrize(("kv_len", "ctas", "tickets"), [(170, 2, 8), (170, 3, 8), (1100, 2, 8), (1100, 3, 0)])
def test_ctas_share_the_tiles_of_packed_sequences(monkeypatch, kv_len, ctas, tickets):
    """By a ticket for each of the eight where sequences are short or tiles are many, else in equal shares."""
    taken, run_plan = [], emulate.run_plan

    def run(plan, ptx, buffers):
        run_plan(plan, ptx, buffers)
        names = [spec.name for spec in plan.buffers]
        taken.append(buffers[names.index("q_schedule")].memory.flat[2])

    monkeypatch.setattr(emulate, "run_plan", run)
    monkeypatch.setattr(emulate, "evaluate", functools.partial(evaluate, multiprocessors=ctas))
    offsets = {"cu_seqlens_q": [0, 64, 165], "cu_seqlens_kv": [0, 20, kv_len], "q_lengths": [60, 101]}
    x = packed(q_len=165, kv_len=kv_len, dims={"heads": 4}, **offsets, kv_lengths=[9, kv_len])
    with emulate.recording(Options(order="random", resident_clusters=ctas, seed=1)) as launches:
        out, lse = jax.block_until_ready(attention_varlen(**x, return_lse=True, implementation="emulate"))
    assert_packed_exact(x, out, lse)
    assert launches[-1].result.stats.opcodes[0]["griddepcontrol.wait"] == ctas
    assert taken == [tickets]


def assert_packed_gradients_exact(x, dout, dlse, gradients):
    exact = testing.gradients_varlen(x, dout, dlse)
    rough = testing.gradients_varlen(x, dout, dlse, testing.rounded_gradients)
    for name, gradient in gradients.items():
        error = np.abs(np.asarray(gradient, np.float64) - exact[name]).max()
        assert error <= testing.error_bound(exact[name], rough[name], "bfloat16", 3), name


def assert_packed_exact(x, out, lse):
    exact, rough = testing.attention_varlen(x), testing.attention_varlen(x, testing.rounded)
    assert np.abs(np.asarray(out, np.float64) - exact.out).max() <= testing.error_bound(
        exact.out, rough.out, "bfloat16", 3
    )
    seen = np.isfinite(exact.lse)
    np.testing.assert_array_equal(np.isfinite(lse), seen)
    np.testing.assert_allclose(np.asarray(lse)[seen], exact.lse[seen], atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_the_architecture_is_the_one_asked_for(arch):
    with target_arch(arch), emulate.recording() as launches:
        assert_exact(dataclasses.replace(CELL, q=260, batch=(1,), kv_heads=1, head_dim=128, causal=False))
    assert [launch.entry for launch in launches] == [f"jax_fa4_forward_{arch}_bfloat16_d128_0"]


@needs_compiler
def test_a_fused_array_is_read_and_its_gradient_written_in_place():
    rng = np.random.default_rng(0)
    qkv, dout = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((70, 3, 2, 64), (70, 2, 64)))

    def run(call):
        out, pullback = jax.vjp(lambda a: call(a, causal=True, implementation="emulate"), qkv)
        return out, *pullback(dout)

    for got, parted in zip(
        run(attention_qkv), run(lambda a, **options: attention(*(a[:, i] for i in range(3)), **options)), strict=True
    ):
        np.testing.assert_array_equal(got, parted)
