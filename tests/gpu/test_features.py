"""Every feature of the forward on a GPU, alone and with others: our kernel against exact attention."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.configs import forward_config
from jax_fa4.testing import Cell

from ..pairwise import pairwise

pytestmark = pytest.mark.gpu

BASE = {"q": 333, "k": 500, "group": 2, "head_dim": 128, "dtype": "bfloat16"}
HEAD_DIMS = [(d, None) for d in range(8, 257, 8)] + [
    (192, 128),
    (64, 128),
    (128, 64),
    (256, 72),
    (40, 248),
    (8, 256),
    (256, 8),
]
FEATURES = {
    "causal": {"causal": True},
    "window": {"window": (150, 60)},
    "q_offset": {"window": (None, 20), "q_offset": 77},
    "q_lengths": {"q_lengths": (0, 200)},
    "kv_lengths": {"kv_lengths": (129, 450)},
    "segments": {"segments": 5},
    "mask": {"mask": "full"},
    "bias": {"bias": "full"},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
}
SHAPES = [(*axes, 500) for axes in itertools.product((1, 2), (1, 4), (1, 333))] + [(333, 500)]  # of a bias or a mask
TOGETHER = [
    {"kv_lengths": (0, 257), "window": (40, None), "q_offset": -5, "sinks": True},
    {"segments": 3, "causal": True, "kv_lengths": (500, 130), "q_lengths": (100, 333)},
    {"bias": "full", "mask": "full", "softcap": 3.0, "segments": 2, "sinks": True, "q_lengths": (333, 128)}
    | {"kv_lengths": (500, 127), "window": (200, 100), "q_offset": 10},
]
CLASSES = {  # of head dims that have rows of their own in a table of configs
    "d64": {"head_dim": 64},
    "d96": {"head_dim": 96},
    "d128": {"head_dim": 128},
    "d192.128": {"head_dim": 192, "head_dim_v": 128},
    "d192": {"head_dim": 192},
    "d256": {"head_dim": 256},
}
BOUNDS = ({}, {"causal": True}, {"window": (150, None)}, {"window": (100, 30)}, {"window": (70, 5), "q_offset": -9})
GROUPS = {1: 2, 2: 2, 3: 1, 8: 1}  # kv heads
FACTORS = {
    "head_dims": tuple(CLASSES),
    "dtype": ("bfloat16", "float16"),
    "bounds": (*BOUNDS[:3], BOUNDS[4]),
    "layout": ("BTNH", "BNTH"),
    "group": tuple(GROUPS),
    "edge": (-1, 1),
    "has_lengths": (False, True),
    "segments": (None, 3),
    "mask": (None, "full", "shared"),
    "bias": (None, "full", "keys"),
    "softcap": (None, 20.0),
    "sinks": (False, True),
}
SELECTING = {  # what selects a table of configs
    "lengths": {"has_lengths": True},
    "segments": {"segments": 3},
    "segments and lengths": {"segments": 3, "has_lengths": True},
    "softcap": {"softcap": 20.0},
}


def at_edges(*, head_dims, bounds, group=2, edge=1, has_lengths=False, **features):
    """A cell of as many queries and keys as tiles hold, and `edge`; lengths of one more and one less."""
    fields = {**CLASSES[head_dims], **bounds, **features}
    cell = Cell(**fields, group=group, kv_heads=GROUPS[group], kv_lengths=(1, 1) if has_lengths else None)
    config = forward_config(cell.spec, "sm_90a")
    q, k = (-(-least // tile) * tile + edge for least, tile in ((150, config.tile_m), (200, config.tile_n)))
    lengths = {"q_lengths": (config.tile_m - 1, q), "kv_lengths": (config.tile_n + 1, 2 * config.tile_n - 1)}
    return dataclasses.replace(cell, q=q, k=k, **(lengths if has_lengths else {}))


PAIRS = [at_edges(**row) for row in pairwise(FACTORS)]
SHIPPED = [  # those of other head dims are in test_forward.py
    at_edges(head_dims=head_dims, dtype=dtype, bounds=bounds, edge=1 if dtype == "bfloat16" else -1)
    for head_dims, dtype, bounds in itertools.product(
        ("d96", "d192.128", "d192", "d256"), ("bfloat16", "float16"), BOUNDS[:4]
    )
]
ROWS = [
    at_edges(head_dims=head_dims, dtype="bfloat16", bounds=BOUNDS[(i + j) % 4], group=3, **features)
    for (i, head_dims), (j, features) in itertools.product(enumerate(CLASSES), enumerate(SELECTING.values()))
    if head_dims not in ("d64", "d128") or len(features) > 1
]
CELLS = [
    *(Cell(**{**BASE, **feature}) for feature in FEATURES.values()),
    *(Cell(**{**BASE, "head_dim": 64, "dtype": "float16", **feature}) for feature in FEATURES.values()),
    *(Cell(**{**BASE, **features}) for features in TOGETHER),
    *PAIRS,
    *SHIPPED,
    *ROWS,
    *(Cell(**{**BASE, "head_dim": d, "head_dim_v": e, "q": 200, "k": 333, "causal": True}) for d, e in HEAD_DIMS),
    *(
        Cell(**{**BASE, "head_dim": d, "q": q, "k": k})
        for d, (q, k) in itertools.product((80, 96, 192, 256), ((3, 63), (127, 129), (1000, 1111)))
    ),
    Cell(**{**BASE, "bias": "full", "mask": "keys", "batch": (2, 3), "kv_heads": 3}),
    Cell(**{**BASE, "layout": "BNTH", "segments": 3, "head_dim": 72}),
    Cell(**{**BASE, "segments": 2, "q": 900, "k": 1100}),  # most blocks are of one segment
]


def call(x):
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in x.items() if name not in arrays}
    run = jax.jit(lambda **a: jax_fa4.attention(**a, **static, return_lse=True, implementation="kernel"))
    return testing.Forward(*run(**arrays))


def assert_close(got, x, dtype):
    exact, rounded = testing.attention(x), testing.rounded(x)
    factor = 3 if "softcap" in x else 2
    for name, kind in (("out", dtype), ("lse", "float32")):
        a, b, c = (np.asarray(getattr(result, name), np.float64) for result in (got, exact, rounded))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b), err_msg=name)
        assert testing.error_ratio(a, b, c, kind, factor) <= 1, name


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_feature_is_as_exact_as_its_precision_allows(cell):
    x = testing.random(cell, seed=CELLS.index(cell))
    assert_close(call(x), x, cell.dtype)


@pytest.mark.parametrize("lengths", [(0, 1, 127), (128, 129, 250)])
def test_keys_beyond_a_length_change_nothing_even_as_nan(lengths):
    x = testing.random(Cell(**{**BASE, "batch": (3,), "k": 250, "kv_lengths": lengths}))
    poisoned = dict(x)
    for name in ("k", "v"):
        poisoned[name] = x[name].copy()
        for entry, length in enumerate(lengths):
            poisoned[name][entry, length:] = np.nan
    jax.tree.map(np.testing.assert_array_equal, call(poisoned), call(x))


def test_queries_beyond_a_length_give_zero_even_as_nan():
    x = testing.random(Cell(**{**BASE, "q_lengths": (70, 128)}))
    x["q"][0, 70:] = np.nan
    x["q"][1, 128:] = np.nan
    out, lse = call(x)
    assert (out[0, 70:] == 0).all()
    assert (lse[0, :, 70:] == -jnp.inf).all()
    assert jnp.isfinite(out).all()


@pytest.mark.parametrize("sink", [-1e4, -100.0, 100.0, 1e4, -np.inf])
def test_a_sink_far_from_every_logit_is_safe(sink):
    x = testing.random(Cell(**{**BASE, "causal": True, "q": 600, "sinks": True}))  # its first 100 queries see no key
    x["sinks"] = np.full_like(x["sinks"], sink)
    assert_close(call(x), x, "bfloat16")


def test_a_sink_near_the_largest_number_takes_all_weight():
    x = testing.random(Cell(**{**BASE, "sinks": True}))
    x["sinks"] = np.full_like(x["sinks"], 3e38)
    out, lse = call(x)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, 2.3e38, rtol=1e-6)


def test_segment_ids_need_no_order():
    x = testing.random(Cell(**{**BASE, "q": 1000, "k": 1500, "segments": 9}))
    rng = np.random.default_rng(0)
    for name in ("q_segment_ids", "kv_segment_ids"):
        x[name] = rng.permuted(x[name], axis=-1)
    assert_close(call(x), x, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_may_have_one_element_for_many(shape, dtype):
    x = testing.random(Cell(**BASE))
    bias = np.random.default_rng(0).standard_normal(shape).astype(testing.np_dtype(dtype))
    bias[..., ::7] = -np.inf
    x["bias"] = bias
    assert_close(call(x), x, "bfloat16")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_may_have_one_element_for_many(shape):
    x = testing.random(Cell(**BASE))
    x["mask"] = np.random.default_rng(0).random(shape) < 0.6
    assert_close(call(x), x, "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_length_below_zero_is_none(head_dim):
    x = testing.random(Cell(**{**BASE, "head_dim": head_dim, "q_lengths": (200, 0), "kv_lengths": (0, 257)}))
    below = {name: np.where(x[name] == 0, np.int32(-1), x[name]) for name in ("q_lengths", "kv_lengths")}
    jax.tree.map(np.testing.assert_array_equal, call({**x, **below}), call(x))


def test_values_that_a_program_learns_when_it_runs_compile_nothing():
    x = testing.random(Cell(**{**BASE, "window": (150, 60), "q_offset": 77, "softcap": 20.0, "bias": "full"}))
    arrays = {name: x[name] for name in ("q", "k", "v", "bias")}

    @jax.jit
    def run(left, q_offset, softcap, arrays):
        return jax_fa4.attention(
            **arrays,
            window=(left, 60),
            q_offset=q_offset,
            softcap=softcap,
            return_lse=True,
            implementation="kernel",
        )

    for left, q_offset, softcap in ((150, 77, 20.0), (10, -30, 3.0), (400, 0, 50.0)):
        got = testing.Forward(*run(jnp.int32(left), jnp.int32(q_offset), jnp.float32(softcap), arrays))
        assert_close(got, {**x, "window": (left, 60), "q_offset": q_offset, "softcap": softcap}, "bfloat16")
    assert run._cache_size() == 1


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("feature", ["softcap", "bias"])
def test_a_traced_scale_may_have_any_sign(feature, scale):
    x = testing.random(Cell(**{**BASE, **FEATURES[feature]}))
    x["softmax_scale"] = np.full((), scale, np.float32)
    assert_close(call(x), x, "bfloat16")


@pytest.mark.parametrize("axes", [("d", None), (None, "m")])
def test_two_gpus_share_lengths_segments_bias_and_sinks(axes):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    features = {"kv_lengths": (129, 450), "segments": 3, "bias": "shared", "sinks": True, "head_dim": 64}
    x = testing.random(Cell(**{**BASE, **features}))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape((2, 1) if axes[0] else (1, 2)), ("d", "m"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes[0], None, axes[1]))
    sharded = {name: jax.device_put(jnp.asarray(x[name]), sharding) for name in "qkv"}
    run = jax.jit(
        lambda q, k, v: jax_fa4.attention(**{**x, "q": q, "k": k, "v": v}, return_lse=True, implementation="kernel")
    )
    got = run(**sharded)
    assert got[0].sharding.is_equivalent_to(sharding, 4)
    assert_close(testing.Forward(*got), x, "bfloat16")
