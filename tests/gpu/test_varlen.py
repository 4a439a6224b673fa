"""Packed sequences on a GPU: our kernels against each sequence on its own, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing

from .busy import busy_stream

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
GAPS = {"q_lengths": [40, 5, 0, 1, 260], "kv_lengths": [64, 130, 9, 0, 300]}  # of RAGGED's sequences
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
    x = packed(800, 900, **RAGGED, **GAPS, causal=causal)
    got = forward(x)
    assert_close(got, x)
    rows = ~used_rows(x, "q")
    assert not got.out[rows].astype(np.float32).any()
    assert (got.lse[:, rows] == -np.inf).all()


def used_rows(x, side):
    """Whether each row of queries or keys ("kv") belongs to a sequence."""
    offsets, used = x[f"cu_seqlens_{side}"], np.zeros(len(x["q" if side == "q" else "k"]), bool)
    lengths = np.minimum(x.get(f"{side}_lengths", len(used)), np.diff(offsets))
    for start, length in zip(offsets[:-1], lengths, strict=True):
        used[start : start + length] = True
    return used


def test_gaps_may_hold_nan():
    x = packed(800, 900, **RAGGED, **GAPS, causal=True)
    spoilt, given = {**x, **{name: x[name].copy() for name in "qkv"}}, [np.array(a) for a in cotangents(x)]
    for name in "qkv":
        spoilt[name][~used_rows(x, "q" if name == "q" else "kv")] = np.nan
    clean, clean_gradients = forward(x), gradients(x, deterministic=True)
    given[0][~used_rows(x, "q")] = np.nan
    given[1][:, ~used_rows(x, "q")] = np.nan
    jax.tree.map(np.testing.assert_array_equal, forward(spoilt), clean)
    jax.tree.map(np.testing.assert_array_equal, gradients(spoilt, True, given), clean_gradients)


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize(
    "lengths", [(1300, 129, 450), (300, 1, 64, 700, 0, 129, 31) * 6], ids=["few, walking", "many, by tickets"]
)
def test_a_document_has_the_same_bits_alone_and_among_others(lengths, dims):
    x = documents(lengths, tail=5, heads=16, causal=True, dims=dims)
    dout, dlse = cotangents(x)
    together, of_together = forward(x), gradients(x, deterministic=True)
    for number in {0, 1, len(lengths) - 1, len(lengths) // 2}:
        start, length = x["cu_seqlens_q"][number], lengths[number]
        rows = slice(start, start + length)
        alone = x | {name: x[name][rows] for name in "qkv"} | {"cu_seqlens_q": np.array([0, length], np.int32)}
        got, of_alone = forward(alone), gradients(alone, True, (dout[rows], dlse[:, rows]))
        np.testing.assert_array_equal(got.out, together.out[rows])
        np.testing.assert_array_equal(got.lse, together.lse[:, rows])
        for name in "qkv":
            np.testing.assert_array_equal(of_alone[name], of_together[name][rows], err_msg=name)


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


def gradients(x, deterministic=False, given=None):
    """By q, k and v, of `given` cotangents or of some that differ in every element."""
    arrays, static = split(x)
    others = {name: a for name, a in arrays.items() if name not in DIFFERENTIATED}
    dout, dlse = map(jnp.asarray, given or cotangents(x))

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
    x = packed(800, 900, **RAGGED, **GAPS, causal=causal, dims=dims)
    got = gradients(x)
    assert_gradients_close(got, x)
    for name, side in (("q", "q"), ("k", "kv"), ("v", "kv")):
        assert not got[name][~used_rows(x, side)].astype(np.float32).any()


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


def test_deterministic_gradients_have_the_same_bits_beside_a_busy_stream():
    x = documents((700, 129, 0, 1, 450, 300), causal=True, heads=8)
    arrays, dout_dlse = [jnp.asarray(x[name]) for name in "qkv"], cotangents(x)
    attend = functools.partial(jax_fa4.attention_varlen, causal=True, deterministic=True, return_lse=True)

    @jax.jit
    def pull(arrays):
        call = functools.partial(attend, cu_seqlens_q=jnp.asarray(x["cu_seqlens_q"]), implementation="kernel")
        return jax.vjp(call, *arrays)[1](dout_dlse)

    @jax.jit
    def unequal(found, expected):
        return sum((a != b).sum() for a, b in zip(found, expected, strict=True))

    expected = jax.block_until_ready(pull(arrays))
    assert_gradients_close(dict(zip("qkv", expected, strict=True)), x)
    assert unequal(pull(arrays), expected) == 0
    with busy_stream() as stream:
        for _ in range(20):
            with stream.working():
                differences = jax.block_until_ready([unequal(pull(arrays), expected) for _ in range(10)])
            assert sum(map(int, differences)) == 0


def test_gradients_of_as_many_sequences_as_tokens():
    lengths = np.random.default_rng(0).integers(0, 2, MANY)
    x = packed(MANY, heads=2, kv_heads=1, cu_seqlens_q=np.cumsum([0, *lengths]).tolist(), causal=True)
    used, scale = lengths.sum(), 1 / 8
    q, k = (x[name][:used].astype(np.float32) for name in "qk")
    dout, dlse = (np.asarray(a, np.float32) for a in cotangents(x))
    dscores = scale * dlse[:, :used].T[..., None]  # a token that sees only itself moves lse, and no weight
    expected = {
        "q": dscores * k,
        "k": (dscores * q).sum(1, keepdims=True),
        "v": dout[:used].sum(1, keepdims=True),
    }
    for name, gradient in gradients(x).items():
        tolerance = np.abs(expected[name]).max() / 64
        np.testing.assert_allclose(gradient[:used].astype(np.float32), expected[name], rtol=0, atol=tolerance)
        assert not gradient[used:].astype(np.float32).any()


def test_one_sequence_that_sees_all_its_keys():
    x = documents((512,), heads=8, kv_heads=8, dims=(104, 104))
    assert_close(forward(x), x)
    assert_gradients_close(gradients(x), x)


def test_without_any_key_all_is_zero():
    x = packed(100, 0, cu_seqlens_q=[0, 60, 100], cu_seqlens_kv=[0, 0, 0], causal=True)
    out, lse = forward(x)
    assert not out.astype(np.float32).any()
    assert (lse == -np.inf).all()
    got = gradients(x)
    assert {name: gradient.shape for name, gradient in got.items()} == {name: x[name].shape for name in "qkv"}
    assert not got["q"].astype(np.float32).any()


@pytest.mark.parametrize("empties", [40, 700])
def test_windows_meet_long_runs_of_empty_sequences(empties):
    x = documents((*[0] * empties, 300, *[0] * empties, 1, 0, 129, *[0] * empties), tail=9, window=(100, 30))
    assert_close(forward(x), x)
    assert_gradients_close(gradients(x), x)


def test_a_length_below_zero_is_none():
    x = packed(800, 900, **RAGGED, **GAPS, causal=True)
    x["q_lengths"][[0, 3]] = x["kv_lengths"][[1, 3]] = 0
    below = {name: np.where(x[name] == 0, -1, x[name]) for name in GAPS}
    jax.tree.map(np.testing.assert_array_equal, forward(x | below), forward(x))
    jax.tree.map(np.testing.assert_array_equal, gradients(x | below, True), gradients(x, True))


def test_gradients_of_rows_of_a_batch_that_have_sequences_of_their_own():
    """Two rows of 8192 tokens, each of 8 documents and a tail of 256 rows."""
    cuts = [np.sort(np.random.default_rng(seed).choice(7936, 7, replace=False)) for seed in range(2)]
    offsets = [np.array([0, *cut, 7936], np.int32) for cut in cuts]
    rows = [
        packed(8192, heads=2, kv_heads=1, seed=n, causal=True, cu_seqlens_q=o.tolist()) for n, o in enumerate(offsets)
    ]
    given = [cotangents(row) for row in rows]
    stacked = {name: jnp.stack([row[name] for row in rows]) for name in ("q", "k", "v", "cu_seqlens_q")}
    attend = functools.partial(jax_fa4.attention_varlen, causal=True, return_lse=True, implementation="kernel")

    @jax.jit
    @jax.vmap
    def pull(x, cotangent):
        return jax.vjp(lambda q, k, v: attend(q, k, v, x["cu_seqlens_q"]), *(x[name] for name in "qkv"))[1](cotangent)

    got = pull(stacked, tuple(map(jnp.stack, zip(*given, strict=True))))
    for n, row in enumerate(rows):
        assert_gradients_close({name: gradient[n] for name, gradient in zip("qkv", got, strict=True)}, row)


def random_packing(number):
    """Offsets and lengths of six sequences in 600 queries and 640 keys; on some side one is empty and one is a row."""
    rng = np.random.default_rng(number)
    offsets = {"q": np.sort(rng.integers(0, 601, 7)), "kv": np.sort(rng.integers(0, 641, 7))}
    for side in (("q",), ("kv",), ("q", "kv"))[number % 3]:
        o = offsets[side]
        o[3], o[5], o[0] = o[2], min(o[4] + 1, o[6]), o[0] * (number % 2)  # rows in front of the first, or none
    lengths = {side: rng.choice([0, 1, 64, 129, 700], 6) if number % 4 else np.full(6, 700) for side in offsets}
    packing = {f"cu_seqlens_{side}": o for side, o in offsets.items()}
    packing |= {f"{side}_lengths": length for side, length in lengths.items()}
    return {name: value.astype(np.int32) for name, value in packing.items()}


@jax.jit
def randomly_packed(arrays, values, cotangent):
    """out and lse, and gradients by q, k and v: one program for all packings."""
    attend = functools.partial(jax_fa4.attention_varlen, return_lse=True, implementation="kernel")
    results, pull = jax.vjp(lambda arrays: attend(**arrays, **values), arrays)
    return testing.Forward(*results), pull(cotangent)[0]


@pytest.mark.parametrize("number", range(20))
def test_every_packing_is_its_sequences(number):
    left, right = np.random.default_rng(number).integers(0, 300, 2).astype(np.int32)
    x = packed(600, 640, heads=2, kv_heads=1, seed=number)
    values = random_packing(number) | {"window": (left, right)}
    results, got = randomly_packed(*jax.tree.map(jnp.asarray, (x, values)), cotangents(x))
    assert_close(results, x | values)
    assert_gradients_close(got, x | values)
    assert randomly_packed._cache_size() == 1
