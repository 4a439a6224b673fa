"""Packed sequences on a GPU: our kernels against each sequence on its own, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 0, 0, 191, 193, 700)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30)},
    "left window": {"window": (70, None)},
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": True, "causal": True},
}
HEAD_DIMS = ((8, 8), (64, 64), (72, 72), (96, 96), (128, 128), (128, 64), (192, 192), (192, 128), (256, 256))
RAGGED = {  # queries and keys differ, with rows of no sequence in front, behind and in between
    "cu_seqlens_q": [7, 100, 100, 330, 331, 700],
    "cu_seqlens_kv": [0, 64, 300, 300, 500, 811],
}
MANY = 65_536
DIFFERENTIATED = ("q", "k", "v", "sinks")
WIDTHS = pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
GRADIENT_OPTIONS = {name: OPTIONS[name] for name in ("full", "causal", "window", "sinks")}


def packed(q_len, kv_len=None, *, heads=4, kv_heads=2, dims=(64, 64), dtype="bfloat16", seed=0, **options):
    """Keyword arguments of `attention_varlen`."""
    rng = np.random.default_rng(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = {"q": (q_len, heads, dims[0]), "k": (kv_len, kv_heads, dims[0]), "v": (kv_len, kv_heads, dims[1])}
    x = {name: rng.standard_normal(shape).astype(testing.np_dtype(dtype)) for name, shape in shapes.items()}
    if options.get("sinks"):
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    lists = {name: np.asarray(value, np.int32) for name, value in options.items() if isinstance(value, list)}
    return {**x, **options, **lists}


def documents(lengths=LENGTHS, tail=0, **options):
    """Packed sequences that attend to themselves, and rows behind the last."""
    return packed(sum(lengths) + tail, cu_seqlens_q=np.cumsum([0, *lengths]).tolist(), **options)


def split(x):
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in x.items() if name not in arrays}


def forward(x):
    arrays, static = split(x)
    run = jax.jit(lambda **a: jax_fa4.attention_varlen(**a, **static, return_lse=True, implementation="kernel"))
    return testing.Forward(*map(np.asarray, run(**arrays)))


def assert_close(got, x):
    exact, rounded = testing.attention_varlen(x), testing.attention_varlen(x, testing.rounded)
    factor = 3 if "softcap" in x else 2
    for name, kind in (("out", x["q"].dtype.name), ("lse", "float32")):
        a, b, c = (np.asarray(getattr(result, name), np.float64) for result in (got, exact, rounded))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b), err_msg=name)
        assert testing.error_ratio(a, b, c, kind, factor) <= 1, name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_each_document_attends_to_itself_alone(dims, options):
    x = documents(tail=70, dims=dims, **options)
    assert_close(forward(x), x)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("lengths", [(1700,), (400, 1, 399, 700, 200)], ids=["walking", "by tickets"])
def test_a_cta_has_several_tiles(lengths, dims):
    x = documents(lengths, heads=16, kv_heads=16, dims=dims, causal=True)
    assert_close(forward(x), x)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_every_head_dim_is_as_exact_as_its_precision_allows(dims):
    x = documents((129, 0, 300, 1), dims=dims, causal=True, dtype="float16")
    assert_close(forward(x), x)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_queries_and_keys_have_offsets_of_their_own(options):
    x = packed(800, 900, **RAGGED, **options)
    assert_close(forward(x), x)


@pytest.mark.parametrize("causal", [False, True])
def test_gaps_between_sequences_are_no_part_of_them(causal):
    lengths = {"q_lengths": [40, 5, 0, 1, 260], "kv_lengths": [64, 130, 9, 0, 300]}
    x = packed(800, 900, **RAGGED, **lengths, causal=causal)
    assert_close(forward(x), x)


@pytest.mark.parametrize("offsets", [[0], [5], [0, 0], [3, 3, 3], [100, 100]], ids=str)
def test_no_sequence_or_empty_ones_give_zeros(offsets):
    out, lse = forward(packed(100, cu_seqlens_q=offsets, causal=True))
    assert not out.astype(np.float32).any()
    assert (lse == -np.inf).all()


def test_an_empty_document_may_come_first():
    x = documents((0, 1023), causal=True)
    assert_close(forward(x), x)
    assert_gradients_close(gradients(x), x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_another_sequence_holds_changes_nothing(bad):
    lengths = (100, 77, 300, 20)
    x = documents(lengths, tail=30, causal=True)
    spoilt = {**x, **{name: x[name].copy() for name in "qkv"}}
    for name in "qkv":
        spoilt[name][100:177] = bad
        spoilt[name][sum(lengths) :] = bad
    clean, got = forward(x), forward(spoilt)
    others = np.r_[0:100, 177 : sum(lengths)]
    np.testing.assert_array_equal(got.out[others], clean.out[others])
    np.testing.assert_array_equal(got.lse[:, others], clean.lse[:, others])
    assert not got.out[sum(lengths) :].astype(np.float32).any()


def test_a_new_batch_of_documents_compiles_nothing():
    run = jax.jit(functools.partial(jax_fa4.attention_varlen, causal=True, implementation="kernel"))
    for lengths in ([500, 0, 12], [1, 510, 1], [512, 0, 0]):
        x = documents(lengths)
        out = run(*(jnp.asarray(x[name]) for name in ("q", "k", "v")), jnp.asarray(np.cumsum([0, *lengths]), jnp.int32))
        assert_out(out, {**x, "causal": True})
    assert run._cache_size() == 1


def assert_out(out, x):
    exact, rounded = testing.attention_varlen(x), testing.attention_varlen(x, testing.rounded)
    assert testing.error_ratio(out, exact.out, rounded.out, "bfloat16") <= 1


def test_sequences_may_be_as_many_as_tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 2, MANY)
    x = packed(MANY, heads=2, kv_heads=1, cu_seqlens_q=np.cumsum([0, *lengths]).tolist(), causal=True)
    out, lse = forward(x)
    used = lengths.sum()
    np.testing.assert_array_equal(out[:used], np.repeat(x["v"][:used], 2, axis=1))  # a token that sees only itself
    assert np.isfinite(lse[:, :used]).all()
    assert not out[used:].astype(np.float32).any()
    assert (lse[:, used:] == -np.inf).all()


def test_rows_of_a_batch_have_sequences_of_their_own():
    rows = [documents((30, 200, 70), seed=1), documents((300, 0, 0), seed=2), documents((0, 1, 299), seed=3)]
    stacked = {name: jnp.stack([row[name] for row in rows]) for name in ("q", "k", "v", "cu_seqlens_q")}
    run = jax.jit(jax.vmap(functools.partial(jax_fa4.attention_varlen, causal=True, implementation="kernel")))
    for out, row in zip(run(*stacked.values()), rows, strict=True):
        assert_out(out, {**row, "causal": True})


def test_two_runs_give_the_same_bits():
    x = documents(causal=True)
    first = forward(x)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, forward(x), first)


def gradients(x, deterministic=False):
    """By q, k and v, of cotangents that differ in every element."""
    arrays, static = split(x)
    others = {name: a for name, a in arrays.items() if name not in DIFFERENTIATED}
    dout, dlse = cotangents(x)

    @jax.jit
    def run(wrt):
        call = functools.partial(jax_fa4.attention_varlen, return_lse=True, implementation="kernel")
        _, pullback = jax.vjp(lambda wrt: call(**wrt, **others, **static, deterministic=deterministic), wrt)
        return pullback((dout, dlse))[0]

    return jax.tree.map(np.asarray, run({name: arrays[name] for name in DIFFERENTIATED if name in arrays}))


def cotangents(x):
    rng = np.random.default_rng(5)
    (total, heads, _), dim = x["q"].shape, x["v"].shape[-1]
    dout = rng.standard_normal((total, heads, dim)).astype(x["q"].dtype)
    return jnp.asarray(dout), jnp.asarray(rng.standard_normal((heads, total)), jnp.float32)


def assert_gradients_close(got, x):
    exact = testing.gradients_varlen(x, *cotangents(x))
    rounded = testing.gradients_varlen(x, *cotangents(x), testing.rounded_gradients)
    for name, gradient in got.items():
        kind = "float32" if name == "sinks" else x["q"].dtype.name
        assert testing.error_ratio(gradient, exact[name], rounded[name], kind, 3) <= 1, name


@pytest.mark.parametrize("options", GRADIENT_OPTIONS.values(), ids=GRADIENT_OPTIONS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_gradients_of_a_document_come_from_itself_alone(dims, options):
    x = documents(tail=70, dims=dims, **options)
    assert_gradients_close(gradients(x), x)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_gradients_of_every_head_dim_are_as_exact_as_its_precision_allows(dims):
    x = documents((129, 0, 300, 1), dims=dims, causal=True, dtype="float16")
    assert_gradients_close(gradients(x), x)


@pytest.mark.parametrize(
    ("causal", "dims"), [(False, (64, 64)), (True, (64, 64)), (True, (136, 8)), (False, (192, 192)), (True, (256, 256))]
)
def test_gradients_of_rows_of_no_sequence_are_zero(causal, dims):
    lengths = {"q_lengths": [40, 5, 0, 1, 260], "kv_lengths": [64, 130, 9, 0, 300]}
    x = packed(800, 900, **RAGGED, **lengths, causal=causal, dims=dims)
    got = gradients(x)
    assert_gradients_close(got, x)
    for name, side in (("q", "q"), ("k", "kv"), ("v", "kv")):
        used = np.zeros(len(x[name]), bool)
        for start, length, end in zip(
            RAGGED[f"cu_seqlens_{side}"], lengths[f"{side}_lengths"], RAGGED[f"cu_seqlens_{side}"][1:], strict=False
        ):
            used[start : min(start + length, end)] = True
        assert not got[name][~used].astype(np.float32).any()


@WIDTHS
def test_gradients_don_t_depend_on_what_another_sequence_holds(dims):
    lengths = (100, 77, 300, 20)
    x = documents(lengths, tail=30, causal=True, dims=dims)
    spoilt = {**x, **{name: x[name].copy() for name in "qkv"}}
    for name in "qkv":
        spoilt[name][100:177] = np.nan
        spoilt[name][sum(lengths) :] = np.nan
    others = np.r_[0:100, 177 : sum(lengths)]
    clean, got = gradients(x, deterministic=True), gradients(spoilt, deterministic=True)
    for name in "qkv":
        np.testing.assert_array_equal(got[name][others], clean[name][others])
        assert not got[name][sum(lengths) :].astype(np.float32).any()


@WIDTHS
def test_deterministic_gradients_have_the_same_bits_in_every_run(dims):
    x = documents((700, 129, 0, 1, 450, 300), causal=True, heads=8, dims=dims)
    first = gradients(x, deterministic=True)
    assert_gradients_close(first, x)
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, gradients(x, deterministic=True), first)
