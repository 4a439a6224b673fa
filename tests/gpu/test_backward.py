"""The backward on a GPU: our kernels against gradients of exact attention, and under transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

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
    *(Cell(**{**FEATURE, "head_dim": 256, **feature}) for feature in FEATURES[-4:]),
    *(Cell(**{**FEATURE, "head_dim": 192, "head_dim_v": 128, **feature}) for feature in (FEATURES[0], *FEATURES[9:14])),
    *(Cell(**{**FEATURE, "head_dim": d, "q": 1100, "k": 900, "causal": True}) for d in (192, 256)),
    *(Cell(**{**FEATURE, "head_dim": d, "q": q, "k": q, "group": 1}) for d in (72, 96, 192) for q in (63, 129, 512)),
    Cell(**{**FEATURE, "head_dim": 192, "head_dim_v": 128, "q": 3000, "k": 2500, "batch": (1,), "kv_heads": 4}),
    Cell(**{**FEATURE, "layout": "BNTH", "segments": 3, "head_dim": 72, "mask": "full"}),
    Cell(**{**FEATURE, "bias": "full", "mask": "keys", "batch": (2, 3), "kv_heads": 3}),
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


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_what_lies_beyond_a_length_changes_nothing_even_as_nan(name, head_dim):
    x = testing.random(Cell(**{**FEATURE, "head_dim": head_dim, "q_lengths": (70, 128), "kv_lengths": (129, 450)}))
    dout, dlse = cotangents(x)
    expected = gradients(x, dout, dlse)
    poisoned = {**x, "dout": dout.copy()}
    poisoned[name] = poisoned[name].copy()
    for entry, length in enumerate(x["q_lengths" if name in ("q", "dout") else "kv_lengths"]):
        poisoned[name][entry, length:] = np.nan
    got = gradients(poisoned, poisoned.pop("dout"), dlse)
    for a, b, lengths in zip(got, expected, ("q_lengths", "kv_lengths", "kv_lengths"), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.02)
        for entry, length in enumerate(x[lengths]):
            assert (a[entry, length:] == 0).all()


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


def test_gradients_of_keys_are_the_same_bits_in_every_run():
    x = testing.random(Cell(q=1000, group=4, head_dim=128, causal=True, dtype="bfloat16"))
    dout, dlse = cotangents(x)
    first = gradients(x, dout, dlse)
    for _ in range(5):
        again = gradients(x, dout, dlse)
        jax.tree.map(np.testing.assert_array_equal, again[1:], first[1:])
        assert_close(again, x, dout, dlse, "bfloat16")


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
        {"head_dim": 256},
        {"head_dim": 192, "causal": True},
        {"head_dim": 192, "head_dim_v": 128},
        {"causal": True},
        {"causal": True, "kv_heads": 1, "group": 32, "batch": (1,)},
        {"window": (300, 200)},
        {"segments": 5, "causal": True, "kv_lengths": (900, 700)},
    ],
    ids=["d64", "d256", "d192-causal", "d192-v128", "causal", "shared-heads", "window", "segments"],
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
    assert_close(first, x, dout, dlse, "bfloat16")
    for _ in range(200):
        assert all(jax.tree.map(lambda a, b: bool((a == b).all()), pull(*arrays), first))


@pytest.mark.parametrize(
    "feature",
    [{}, {"head_dim": 64, "causal": True}, {"causal": True, "kv_heads": 1, "group": 32}, {"head_dim": 256}],
    ids=["d128", "d64-causal", "shared-heads", "d256"],
)
def test_deterministic_gradients_are_the_same_bits_beside_a_busy_stream(feature):
    x = testing.random(Cell(**{**FEATURE, "q": 1000, "k": 1500, "kv_heads": 8, "batch": (1,), **feature}))
    dout, dlse = cotangents(x)
    options = {"causal": feature.get("causal", False), "deterministic": True}

    @jax.jit
    def pull(arrays):
        return jax.vjp(functools.partial(kernel, **options), *arrays)[1]((jnp.asarray(dout), jnp.asarray(dlse)))

    @jax.jit
    def unequal(found, expected):
        return sum((a != b).sum() for a, b in zip(found, expected, strict=True))

    arrays = [jnp.asarray(x[name]) for name in "qkv"]
    expected = jax.block_until_ready(pull(arrays))
    assert_close(expected, x, dout, dlse, "bfloat16")
    assert unequal(pull(arrays), expected) == 0
    with busy_stream() as stream:
        for _ in range(20):
            with stream.working():
                differences = jax.block_until_ready([unequal(pull(arrays), expected) for _ in range(10)])
            assert sum(map(int, differences)) == 0


@pytest.mark.parametrize("name", ["softmax_scale", "sinks"])
def test_scale_and_sinks_have_gradients_too(name):
    x = testing.random(dataclasses.replace(SMALL, sinks=True)) | {"softmax_scale": np.float32(0.125)}
    dout, dlse = cotangents(x)

    def attend(value):
        return kernel(**{**x, name: value})

    (got,) = jax.jit(lambda value: jax.vjp(attend, value)[1]((dout, dlse)))(x[name])
    np.testing.assert_allclose(got, testing.gradients(x, dout, dlse)[name], rtol=0.02)


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


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_scores_far_below_minus_88_have_gradients(head_dim):
    """exp(-lse) overflows, also for the rows of a tile that lie beyond the last key."""
    x = testing.random(Cell(**{**FEATURE, "head_dim": head_dim, "q": 200, "k": 333}))
    x |= {"q": np.abs(x["q"]) + x["q"].dtype.type(2), "k": -np.abs(x["k"]) - x["k"].dtype.type(2)}
    x["softmax_scale"] = 0.3
    assert testing.attention(x).lse.max() < -100
    dout, dlse = cotangents(x)
    assert_close(gradients(x, dout, dlse), x, dout, dlse, "bfloat16")
