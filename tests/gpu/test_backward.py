"""The backward on a GPU: our kernels against gradients of exact attention, and under transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

from ..emptied import REASONS, rows_to_empty, without_keys
from .busy import busy_stream

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 2049)
UNEQUAL = ((1, 1025), (7, 129), (129, 7), (128, 1), (1000, 63), (300, 1))
VARIANTS = [
    {"dtype": dtype, "head_dim": head_dim, "causal": causal}
    for dtype in ("bfloat16", "float16")
    for head_dim in (64, 128)
    for causal in (False, True)
]
SHAPES = [
    *({"q": n, "kv_heads": 1, "group": 2, "batch": (1,)} for n in LENGTHS),
    *({"q": q, "k": k, "group": 2} for q, k in UNEQUAL),
    *({"q": 200, "k": 333, "group": group} for group in (1, 3, 8, 16)),
    {"q": 1000, "k": 700, "batch": (1,), "kv_heads": 1, "group": 15},  # CTAs share a tile's query heads
    {"q": 200, "k": 333, "batch": (2, 3)},
    {"q": 200, "k": 333, "batch": ()},
    {"q": 200, "k": 333, "layout": "BNTH"},
    {"q": 200, "k": 333, "softmax_scale": 4.0},  # logits beyond +-88
    {"q": 300, "window": (50, 20)},
    {"q": 300, "k": 450, "window": (0, None)},
    {"q": 450, "k": 300, "window": (None, 37)},
]
CELLS = [
    Cell(**variant, **shape)
    for variant in VARIANTS
    for shape in SHAPES
    if not (variant["causal"] and "window" in shape)
]
FEATURE = {"q": 333, "k": 500, "group": 2, "head_dim": 128, "dtype": "bfloat16"}
FEATURES = [
    {"window": (150, 60)},
    {"window": (None, 20), "q_offset": 77},
    {"q_lengths": (0, 200)},
    {"kv_lengths": (129, 450)},
    {"segments": 5},
    {"mask": "full"},
    {"bias": "full"},
    {"softcap": 20.0},
    {"sinks": True},
    {"q_lengths": (333, 70), "kv_lengths": (1, 500), "causal": True},
    {"kv_lengths": (0, 257), "window": (40, None), "q_offset": -5, "sinks": True},
    {"segments": 3, "causal": True, "kv_lengths": (500, 130), "q_lengths": (100, 333)},
    {"segments": 4, "mask": "keys", "sinks": True, "softcap": 5.0},
    {"bias": "shared", "mask": "shared", "causal": True},
    {"bias": "keys", "softcap": 30.0, "q_lengths": (20, 333), "window": (200, 0)},
    {"bias": "full", "segments": 2, "kv_lengths": (400, 33), "head_dim": 128, "head_dim_v": 64},
    {"bias": "full", "mask": "full", "softcap": 3.0, "segments": 2, "sinks": True, "q_lengths": (333, 128)}
    | {"kv_lengths": (500, 127), "window": (200, 100), "q_offset": 10},
]
HEAD_DIMS = [(d, None) for d in range(8, 257, 8)] + [(64, 128), (128, 64), (40, 72), (104, 8), (192, 128), (40, 248)]
CELLS += [
    *(Cell(**{**FEATURE, **feature}) for feature in FEATURES),
    *(Cell(**{**FEATURE, "head_dim": 64, "dtype": "float16", **feature}) for feature in FEATURES[2::3]),
    *(Cell(**{**FEATURE, "head_dim": d, "head_dim_v": e, "q": 200, "causal": True}) for d, e in HEAD_DIMS),
    *(Cell(**{**FEATURE, "head_dim": 96, **feature}) for feature in (*FEATURES[:5], *FEATURES[9:12])),
    *(Cell(**{**FEATURE, **feature, "head_dim": 256, "head_dim_v": None}) for feature in FEATURES[-4:]),
    *(Cell(**{**FEATURE, "head_dim": 192, "head_dim_v": 128, **feature}) for feature in (FEATURES[0], *FEATURES[9:14])),
    *(Cell(**{**FEATURE, "head_dim": d, "q": 1100, "k": 900, "causal": True}) for d in (192, 256)),
    *(Cell(**{**FEATURE, "head_dim": d, "q": q, "k": q, "group": 1}) for d in (72, 96, 192) for q in (63, 129, 512)),
    Cell(**{**FEATURE, "head_dim": 192, "head_dim_v": 128, "q": 3000, "k": 2500, "batch": (1,), "kv_heads": 4}),
    Cell(**{**FEATURE, "layout": "BNTH", "segments": 3, "head_dim": 72, "mask": "full"}),
    Cell(**{**FEATURE, "bias": "full", "mask": "keys", "batch": (2, 3), "kv_heads": 3}),
    Cell(**{**FEATURE, "head_dim": 104, "q": 512, "k": 512, "batch": (1,)}),
    *(Cell(**{**FEATURE, "head_dim": d, "q": 200, "causal": True, "softmax_scale": 4.0}) for d in (96, 192, 256)),
]
HALF = {**FEATURE, "q": 200, "k": 333, "dtype": "float16"}
CELLS += [  # dtype, layout and group with wide heads
    Cell(**{**HALF, "head_dim": 96, "layout": "BNTH", "group": 4, "kv_lengths": (129, 300), "window": (150, 60)}),
    Cell(**{**HALF, "head_dim": 192, "group": 8, "kv_heads": 1, "causal": True, "segments": 3}),
    Cell(**{**HALF, "head_dim": 192, "head_dim_v": 128, "layout": "BNTH", "group": 4, "mask": "full"}),
    Cell(**{**HALF, "head_dim": 256, "layout": "BNTH", "group": 4, "bias": "full", "q_lengths": (70, 200)}),
    Cell(**{**HALF, "head_dim": 192, "layout": "BNTH", "group": 4, "window": (150, 60), "dtype": "bfloat16"}),
    Cell(**{**HALF, "head_dim": 256, "layout": "BNTH", "group": 8, "kv_heads": 1, "dtype": "bfloat16"}),
]
SHARED = {**FEATURE, "q": 400, "k": 150, "batch": (1,), "kv_heads": 1, "group": 8}
CELLS += [  # CTAs share a tile's query heads
    Cell(**{**SHARED, "q_lengths": (333,), "kv_lengths": (70,), "causal": True, "layout": "BNTH", "head_dim": 64}),
    Cell(**{**SHARED, "window": (300, 40), "dtype": "float16", "group": 15}),
    Cell(**{**SHARED, "segments": 3, "head_dim": 128, "head_dim_v": 64, "batch": (2,)}),
    Cell(**{**SHARED, "bias": "full", "head_dim": 96, "group": 5, "q": 700, "layout": "BNTH", "dtype": "float16"}),
]
SMALL = Cell(q=200, k=333, group=2, head_dim=64, causal=True, dtype="bfloat16")

kernel = functools.partial(jax_fa4.attention, implementation="kernel", return_lse=True)


def cotangents(x, seed=1):
    """dout and dlse of a call."""
    rng = np.random.default_rng(seed)
    heads = -2 if x.get("layout", "BTNH") == "BTNH" else -3
    length = -5 - heads
    *batch, _, _, _ = x["q"].shape
    dout = rng.standard_normal((*x["q"].shape[:-1], x["v"].shape[-1])).astype(x["q"].dtype)
    return dout, rng.standard_normal((*batch, x["q"].shape[heads], x["q"].shape[length])).astype(np.float32)


def gradients(x, dout, dlse, **more):
    """dq, dk, dv of the kernels."""
    options = {name: value for name, value in x.items() if name not in ("q", "k", "v")}

    def pull(q, k, v):
        _, vjp = jax.vjp(functools.partial(kernel, **options, **more), q, k, v)
        return vjp((jnp.asarray(dout), jnp.asarray(dlse)))

    return jax.jit(pull)(*(jnp.asarray(x[name]) for name in "qkv"))


def assert_close(got, x, dout, dlse, dtype):
    exact, rounded = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
    factor = 3 if "softcap" in x else 2
    for name, gradient in zip("qkv", got, strict=True):
        assert testing.error_ratio(gradient, exact[name], rounded[name], dtype, factor) <= 1, f"d{name}"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_as_exact_as_their_precision_allows(cell):
    x = testing.random(cell, seed=CELLS.index(cell))
    dout, dlse = cotangents(x)
    assert_close(gradients(x, dout, dlse), x, dout, dlse, cell.dtype)


@pytest.mark.parametrize(
    ("dims", "deterministic"),
    [
        *((dims, False) for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))),
        *((dims, True) for dims in ((64, 64), (192, 128))),
    ],
    ids=str,
)
def test_what_lies_beyond_a_length_changes_nothing_even_as_nan(dims, deterministic):
    of_side = {"q_lengths": (70, 128), "kv_lengths": (129, 450)}
    x = testing.random(Cell(**{**FEATURE, "head_dim": dims[0], "head_dim_v": dims[1], **of_side}))
    arrays = {name: x.pop(name) for name in "qkv"}
    arrays["dout"], arrays["dlse"] = cotangents({**x, **arrays})

    @jax.jit
    def pull(q, k, v, dout, dlse):
        return jax.vjp(functools.partial(kernel, **x, deterministic=deterministic), q, k, v)[1]((dout, dlse))

    expected = pull(**arrays)
    for name, array in arrays.items():
        beyond = np.array(array)
        for entry, length in enumerate(of_side["kv_lengths" if name in ("k", "v") else "q_lengths"]):
            beyond[(entry, ..., slice(length, None)) if name == "dlse" else (entry, slice(length, None))] = np.nan
        got = pull(**{**arrays, name: beyond})
        for a, b, side in zip(got, expected, ("q_lengths", "kv_lengths", "kv_lengths"), strict=True):
            if deterministic or side == "kv_lengths":
                np.testing.assert_array_equal(a, b, name)
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.02, err_msg=name)
            for entry, length in enumerate(of_side[side]):
                assert (a[entry, length:] == 0).all()


@pytest.mark.parametrize(
    ("head_dim", "reasons"),
    [(64, REASONS), (96, REASONS), *((128, [reason]) for reason in REASONS), (256, REASONS)],
    ids=str,
)
def test_rows_that_see_no_key_get_zero_and_give_nothing(head_dim, reasons):
    x = testing.random(Cell(**{**FEATURE, "head_dim": head_dim}))
    rows = rows_to_empty(2, FEATURE["q"])
    for reason in reasons:
        x = without_keys(x, rows, reason)
    assert (np.isneginf(testing.attention(x).lse) == rows[:, None]).all()
    dout, dlse = cotangents(x)
    dlse = np.where(rows[:, None], np.inf, dlse)
    got = gradients(x, dout, dlse)
    assert_close(got, x, dout, dlse, "bfloat16")
    assert (np.asarray(got[0])[rows] == 0).all()
    assert all((g[-1] == 0).all() for g in got)
    dout[rows] = 100
    for a, b in zip(gradients(x, dout, dlse)[1:], got[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("queries", "keys"), [(100, 0), (100, 1), (0, 9), (300, 130)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_no_query_sees_gets_exactly_zero(queries, keys, head_dim):
    q, k = jnp.ones((2, queries, 4, head_dim), jnp.float16), jnp.ones((2, keys, 2, head_dim), jnp.float16)
    x = {"q": q, "k": k, "v": k, "causal": True}
    dout, dlse = cotangents(x)
    dq, dk, dv = gradients(x, dout, np.where(np.arange(queries) < queries - keys, np.inf, dlse))
    assert (dq[:, : max(queries - keys, 0)] == 0).all()
    assert all(jnp.isfinite(g).all() for g in (dq, dk, dv))
    if not queries:
        assert (dk == 0).all()
        assert (dv == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_keys_are_the_same_bits_in_every_run_and_those_of_queries_but_for_rounding(head_dim):
    """The parts of dq are added in float32 in no fixed order: another order may round to a neighbour in bfloat16."""
    x = testing.random(Cell(q=1000, group=4, head_dim=head_dim, causal=True, dtype="bfloat16"))
    dout, dlse = cotangents(x)
    first = gradients(x, dout, dlse)
    assert_close(first, x, dout, dlse, "bfloat16")
    dq = np.asarray(first[0], np.float64)
    for _ in range(5):
        again = gradients(x, dout, dlse)
        jax.tree.map(np.testing.assert_array_equal, again[1:], first[1:])
        difference = np.abs(np.asarray(again[0], np.float64) - dq)
        assert (difference <= 2.0**-7 * np.abs(dq) + 2.0**-18 * np.abs(dq).max()).all()


def test_vmap_gives_what_a_loop_gives():
    x = testing.random(SMALL)
    dout, dlse = cotangents(x)

    def pull(q, k, v):
        return jax.vjp(functools.partial(kernel, causal=True), q, k, v)[1]((jnp.asarray(dout), jnp.asarray(dlse)))

    many = [jnp.stack([jnp.asarray(x[name]), -jnp.asarray(x[name])]) for name in "qkv"]
    got = jax.jit(jax.vmap(pull))(*many)
    for i in range(2):
        one = {name: np.asarray(a[i]) for name, a in zip("qkv", many, strict=True)} | {"causal": True}
        assert_close([g[i] for g in got], one, dout, dlse, "bfloat16")


@pytest.mark.parametrize(
    "feature",
    [
        {"head_dim": 64},
        {"head_dim": 64, "head_dim_v": 128, "dtype": "float16", "window": (300, None), "layout": "BNTH", "kv_heads": 2},
        {"head_dim": 256},
        {"head_dim": 192, "causal": True},
        {"head_dim": 192, "head_dim_v": 128},
        {"causal": True},
        {"causal": True, "kv_heads": 1, "group": 32, "batch": (1,)},
        {"window": (300, 200)},
        {"segments": 5, "causal": True, "kv_lengths": (900, 700)},
    ],
    ids=["d64", "d64-v128", "d256", "d192-causal", "d192-v128", "causal", "shared-heads", "window", "segments"],
)
def test_deterministic_gradients_are_the_same_bits_in_every_run(feature):
    x = testing.random(Cell(**{**FEATURE, "q": 1000, "k": 1500, "kv_heads": 8, **feature}))
    dout, dlse = cotangents(x)
    options = {name: value for name, value in x.items() if name not in ("q", "k", "v")}
    arrays = [jnp.asarray(x[name]) for name in "qkv"]

    @jax.jit
    def pull(q, k, v):
        _, vjp = jax.vjp(functools.partial(kernel, **options, deterministic=True), q, k, v)
        return vjp((jnp.asarray(dout), jnp.asarray(dlse)))

    first = pull(*arrays)
    assert_close(first, x, dout, dlse, x["q"].dtype)
    for _ in range(200):
        assert all(jax.tree.map(lambda a, b: bool((a == b).all()), pull(*arrays), first))


@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_gradients_of_many_query_heads_to_a_kv_head(causal):
    x = testing.random(Cell(q=2048, kv_heads=2, group=8, head_dim=128, causal=causal, dtype="bfloat16"))
    dout, dlse = cotangents(x)

    @jax.jit
    def pull(q, k, v, dout, dlse):
        return jax.vjp(functools.partial(kernel, causal=causal, deterministic=True), q, k, v)[1]((dout, dlse))

    arrays = [jnp.asarray(a) for a in (x["q"], x["k"], x["v"], dout, dlse)]
    first = pull(*arrays)
    for _ in range(200):
        assert all(jax.tree.map(lambda a, b: bool((a == b).all()), pull(*arrays), first))
    is_first = np.arange(16) == 0  # exact attention of one head is done in a second
    dout, dlse = np.where(is_first[:, None], dout, 0).astype(dout.dtype), np.where(is_first[:, None], dlse, 0)
    got = pull(*arrays[:3], jnp.asarray(dout), jnp.asarray(dlse, jnp.float32))
    one = {name: a[:1, :, :1] if name in "qkv" else a for name, a in x.items()}
    assert_close([g[:1, :, :1] for g in got], one, dout[:1, :, :1], dlse[:1, :1], "bfloat16")


@pytest.mark.parametrize(
    "feature",
    [
        {},
        {"head_dim": 64, "causal": True},
        {"causal": True, "kv_heads": 1, "group": 32},
        {"head_dim": 256},
        {"head_dim": 192, "window": (300, 200), "kv_heads": 4},
        {"head_dim": 192, "head_dim_v": 128, "segments": 5, "causal": True, "dtype": "float16", "kv_heads": 4},
        {"head_dim": 96, "causal": True, "kv_lengths": (1300,), "kv_heads": 4},
    ],
    ids=["d128", "d64-causal", "shared-heads", "d256", "d192-window", "d192-v128-segments", "d96-lengths"],
)
def test_deterministic_gradients_are_the_same_bits_beside_a_busy_stream(feature):
    x = testing.random(Cell(**{**FEATURE, "q": 1000, "k": 1500, "kv_heads": 8, "batch": (1,), **feature}))
    dout, dlse = cotangents(x)
    options = {name: value for name, value in x.items() if name not in ("q", "k", "v")}

    @jax.jit
    def pull(arrays):
        _, vjp = jax.vjp(functools.partial(kernel, **options, deterministic=True), *arrays)
        return vjp((jnp.asarray(dout), jnp.asarray(dlse)))

    @jax.jit
    def unequal(found, expected):
        return sum((a != b).sum() for a, b in zip(found, expected, strict=True))

    arrays = [jnp.asarray(x[name]) for name in "qkv"]
    expected = jax.block_until_ready(pull(arrays))
    assert_close(expected, x, dout, dlse, x["q"].dtype)
    assert unequal(pull(arrays), expected) == 0
    with busy_stream() as stream:
        for _ in range(20):
            with stream.working():
                differences = jax.block_until_ready([unequal(pull(arrays), expected) for _ in range(10)])
            assert sum(map(int, differences)) == 0


SINKS = {"q": 200, "k": 333, "sinks": True}


@pytest.mark.parametrize(
    ("cell", "sinks"),
    [
        (Cell(**{**FEATURE, **SINKS, "head_dim": 64, "causal": True}), None),
        (Cell(**{**FEATURE, **SINKS, "q": 333, "k": 200, "head_dim": 192, "causal": True}), (30, -3000, 0.5, 2)),
        (
            Cell(**{**FEATURE, **SINKS, "q_lengths": (150, 70), "kv_lengths": (129, 0), "layout": "BNTH", "group": 4}),
            None,
        ),
        (Cell(**{**FEATURE, **SINKS, "head_dim": 256, "kv_lengths": (300, 0), "group": 3, "dtype": "float16"}), None),
        (Cell(**{**FEATURE, **SINKS, "head_dim": 96, "window": (20, 0), "layout": "BNTH"}), (-3000, 8, -1, 60)),
    ],
    ids=["d64", "d192-empty-rows", "BNTH-lengths", "d256-lengths", "d96-BNTH-window"],
)
def test_scale_and_sinks_have_gradients_too(cell, sinks):
    """Of rows without a key, too, which look at their sink alone. A far sink takes all of a row, or nothing."""
    x = testing.random(cell) | {"softmax_scale": np.float32(0.125)}
    x["sinks"] = x["sinks"] if sinks is None else np.array(sinks, np.float32)
    dout, dlse = cotangents(x)
    names = ("softmax_scale", "sinks")
    rest = {name: value for name, value in x.items() if name not in names}

    @jax.jit
    def pull(*values):
        return jax.vjp(lambda *values: kernel(**rest, **dict(zip(names, values, strict=True))), *values)[1](
            (dout, dlse)
        )

    exact, rounded = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
    for name, got in zip(names, pull(*(x[name] for name in names)), strict=True):
        error = np.abs(np.asarray(got, np.float64) - exact[name])
        assert error.max() <= testing.error_bound(exact[name], rounded[name], cell.dtype, 3), f"d{name}: {error}"


def test_batches_and_heads_beyond_65535_are_right():
    x = testing.random(Cell(batch=(70000,), q=2, k=3, kv_heads=1, head_dim=64, dtype="bfloat16"))
    dout, dlse = cotangents(x)
    got = gradients(x, dout, dlse)
    for part in (slice(0, 50), slice(65500, 65600), slice(69950, 70000)):
        some = {name: a[part] for name, a in x.items()}
        assert_close([g[part] for g in got], some, dout[part], dlse[part], "bfloat16")


@pytest.mark.parametrize("long", ["q", "kv"])
def test_gradients_of_more_than_2_to_the_31_elements_are_right_to_their_end(long):
    if (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) < 80e9:
        pytest.skip("needs 80 GB of GPU memory")
    heads = {"group": 128, "kv_heads": 1} if long == "q" else {"kv_heads": 128}
    x = testing.random(Cell(batch=(1,), q=100, head_dim=128, dtype="bfloat16", window=(20, 0), **heads))
    dout, dlse = cotangents(x)
    dout[:, :20], dlse[..., :20] = 0, 0  # these see what lies in front of the keys, too

    def with_zeros_in_front(a, axis):
        return jnp.pad(a, [(140_000 - 100, 0) if i == axis else (0, 0) for i in range(4)][: a.ndim])

    arrays = {name: jnp.asarray(x[name]) for name in "qkv"} | {"dout": jnp.asarray(dout), "dlse": jnp.asarray(dlse)}
    axes = {"q": 1, "dout": 1, "dlse": 2} if long == "q" else {"k": 1, "v": 1}
    arrays |= {name: with_zeros_in_front(arrays[name], axis) for name, axis in axes.items()}

    @jax.jit
    def pull(q, k, v, dout, dlse):
        return jax.vjp(functools.partial(kernel, window=(20, 0)), q, k, v)[1]((dout, dlse))

    got = pull(**arrays)
    assert not any((g[:, :-100] != 0).any() for g in got)
    assert_close([g[:, -100:] for g in got], x, dout, dlse, "bfloat16")


@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    [(64, False), (96, False), (128, False), (192, False), (256, False), (64, True), (256, True)],
)
def test_scores_far_below_minus_88_have_gradients(head_dim, deterministic):
    """exp(-lse) overflows, also for the rows of a tile that lie beyond the last key."""
    x = testing.random(Cell(**{**FEATURE, "head_dim": head_dim, "q": 200, "k": 333}))
    x |= {"q": np.abs(x["q"]) + x["q"].dtype.type(2), "k": -np.abs(x["k"]) - x["k"].dtype.type(2)}
    x["softmax_scale"] = 0.3
    assert testing.attention(x).lse.max() < -100
    dout, dlse = cotangents(x)
    assert_close(gradients(x, dout, dlse, deterministic=deterministic), x, dout, dlse, "bfloat16")


def test_no_keys_give_zero_without_bounds_too():
    x = testing.random(Cell(**{**FEATURE, "k": 0}))
    dout, dlse = cotangents(x)
    dq, dk, dv = gradients(x, dout, np.full_like(dlse, np.inf))
    assert (dq == 0).all()
    assert dk.shape == dv.shape == x["k"].shape


def test_an_empty_batch_has_empty_gradients():
    x = testing.random(Cell(**{**FEATURE, "batch": (0,)}))
    assert [g.shape for g in gradients(x, *cotangents(x))] == [x[name].shape for name in "qkv"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_key_of_one_head_gives_queries_and_keys_zero_and_values_all(dtype):
    x = testing.random(Cell(batch=(1,), q=1, k=1, kv_heads=1, head_dim=16, dtype=dtype), seed=352)
    dout, _ = cotangents(x)
    dq, dk, dv = gradients(x, dout, np.zeros((1, 1, 1), np.float32))
    np.testing.assert_array_equal(dv, dout)
    for gradient in (dq, dk):  # the score's gradient is a difference of two sums of the same products
        assert np.abs(np.asarray(gradient, np.float32)).max() < 1e-4


def test_packed_segments_and_a_tail_of_padding_at_8192_keys():
    starts = np.array([0, 1000, 1001, 2500, 3100, 4800, 5000, 6600, 8192 - 256], np.int32)
    x = testing.random(Cell(batch=(1,), q=8192, kv_heads=1, head_dim=64, causal=True, dtype="bfloat16"))
    dout, dlse = cotangents(x)
    ids = np.searchsorted(starts, np.arange(8192), side="right").astype(np.int32)[None]
    got = gradients(x | {"q_segment_ids": ids, "kv_segment_ids": np.where(ids == len(starts), -1, ids)}, dout, dlse)
    packed = {name: a if name == "causal" else a[0] for name, a in x.items()} | {"cu_seqlens_q": starts}
    exact = testing.gradients_varlen(packed, dout[0], dlse[0])
    rounded = testing.gradients_varlen(packed, dout[0], dlse[0], testing.rounded_gradients)
    for name, (gradient,) in zip("qkv", got, strict=True):
        error = np.abs(np.asarray(gradient, np.float64) - exact[name]).max()
        assert error <= testing.error_bound(exact[name], rounded[name], "bfloat16"), f"d{name}: {error}"
        assert (gradient[starts[-1] :] == 0).all()
