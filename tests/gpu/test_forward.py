"""The forward on a GPU: our kernel against exact attention, and under the transformations that wrap it."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.support import FallbackWarning
from jax_fa4.testing import Cell

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 4097)
GROUPS = (1, 3, 4, 8, 16)
UNEQUAL = ((1, 4097), (7, 129), (129, 7), (128, 1), (1000, 63), (300, 1))
VARIANTS = [
    {"dtype": dtype, "head_dim": head_dim, "causal": causal}
    for dtype in ("bfloat16", "float16")
    for head_dim in (64, 128)
    for causal in (False, True)
]
SHAPES = [
    *({"q": n, "kv_heads": 1, "group": 2, "batch": (1,)} for n in LENGTHS),
    *({"q": q, "k": k, "group": 2} for q, k in UNEQUAL),
    *({"q": 200, "k": 333, "group": group} for group in GROUPS),
    {"q": 200, "k": 333, "batch": (2, 3)},
    {"q": 200, "k": 333, "batch": ()},
    {"q": 200, "k": 333, "layout": "BNTH"},
    {"q": 200, "k": 333, "softmax_scale": 40.0},  # logits beyond +-100
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
CELLS += [  # several tiles a CTA; test_features.py has others of these head dims
    Cell(q=1000, batch=(6,), kv_heads=4, head_dim=head_dim, causal=causal, dtype="bfloat16")
    for head_dim in (96, 192, 256)
    for causal in (False, True)
]
SMALL = Cell(q=200, k=333, group=2, head_dim=64, causal=True, dtype="bfloat16")

kernel = functools.partial(jax_fa4.attention, implementation="kernel", return_lse=True)


def assert_close(got, x, dtype):
    exact, rounded = testing.attention(x, np.float64), testing.rounded(x)
    for name, kind in (("out", dtype), ("lse", "float32")):
        a, b, c = (np.asarray(getattr(r, name), np.float64) for r in (testing.Forward(*got), exact, rounded))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b), err_msg=name)
        assert testing.error_ratio(a, b, c, kind) <= 1, name


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_kernel_is_as_exact_as_its_precision_allows(cell):
    x = testing.random(cell, seed=CELLS.index(cell))
    assert_close(jax.jit(functools.partial(kernel, **options(x)))(**arrays(x)), x, cell.dtype)


@pytest.mark.parametrize("keys", [0, 1])
def test_queries_that_see_no_key_are_zero(keys):
    q, k = jnp.ones((2, 100, 4, 64), jnp.float16), jnp.ones((2, keys, 2, 64), jnp.float16)
    out, lse = kernel(q, k, k, causal=True)
    assert (out[:, : 100 - keys] == 0).all()
    assert (lse[..., : 100 - keys] == -jnp.inf).all()
    assert jnp.isfinite(lse[..., 100 - keys :]).all()


def test_queries_without_keys_are_zero_without_a_mask_too():
    q, k = jnp.ones((2, 100, 4, 64), jnp.float16), jnp.ones((2, 0, 2, 64), jnp.float16)
    out, lse = kernel(q, k, k)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()


def test_no_queries_give_no_output():
    q, k = jnp.ones((2, 0, 4, 64), jnp.float16), jnp.ones((2, 9, 2, 64), jnp.float16)
    out, lse = kernel(q, k, k)
    assert out.shape == (2, 0, 4, 64)
    assert lse.shape == (2, 4, 0)


def test_an_empty_batch_gives_no_output():
    q, k = jnp.ones((0, 100, 4, 64), jnp.float16), jnp.ones((0, 70, 2, 64), jnp.float16)
    out, lse = kernel(q, k, k)
    assert out.shape == (0, 100, 4, 64)
    assert lse.shape == (0, 4, 100)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_thousand_runs_give_the_same_bits(head_dim):
    x = arrays(testing.random(Cell(q=1000, kv_heads=4, group=4, head_dim=head_dim, causal=True, dtype="bfloat16")))

    @jax.jit
    def runs_that_differ(x):
        first = kernel(**x, causal=True)

        def again(i, differing):
            x_again, _ = jax.lax.optimization_barrier((x, i))  # else one call would serve all rounds
            same = [(a == b).all() for a, b in zip(kernel(**x_again, causal=True), first, strict=True)]
            return differing + ~(same[0] & same[1])

        return jax.lax.fori_loop(0, 1000, again, 0)

    assert runs_that_differ(x) == 0


@pytest.mark.parametrize("mapped", ["q", "qk", "qkv"])
def test_vmap_gives_what_a_loop_gives(mapped):
    x = arrays(testing.random(SMALL))
    many = {name: jnp.stack([a, a * 0.5, -a]) if name in mapped else a for name, a in x.items()}
    run = functools.partial(kernel, causal=True)
    got = jax.vmap(lambda q, k, v: run(q, k, v), [0 if name in mapped else None for name in "qkv"])(*many.values())
    for i in range(3):
        one = run(*(a[i] if name in mapped else a for name, a in many.items()))
        jax.tree.map(np.testing.assert_array_equal, [r[i] for r in got], list(one))


def test_gradients_of_the_kernel_are_those_of_exact_attention():
    x = testing.random(SMALL)
    dout = np.random.default_rng(1).standard_normal(x["q"].shape).astype(np.float32)
    dlse = np.random.default_rng(2).standard_normal((2, 4, 200)).astype(np.float32)

    def loss(q, k, v):
        out, lse = jax_fa4.attention(q, k, v, causal=True, return_lse=True)
        return jnp.vdot(out, dout.astype(out.dtype)).astype(jnp.float32) + jnp.vdot(lse, dlse)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        got = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays(x).values())
    exact = testing.gradients(x, dout.astype(x["q"].dtype), dlse)
    rounded = testing.rounded_gradients(x, dout.astype(x["q"].dtype), dlse)
    for name, gradient in zip("qkv", got, strict=True):
        assert testing.error_ratio(gradient, exact[name], rounded[name], "bfloat16") <= 1, name


def test_a_captured_program_with_many_calls_gives_what_single_calls_give():
    x = arrays(testing.random(SMALL))

    def chain(q, k, v):
        for _ in range(6):
            q = q + kernel(q, k, v, causal=True)[0]
        return q

    q, k, v = x.values()
    captured = jax.jit(chain)
    for scale in (1.0, 2.0):  # the second run replays the graph with buffers that may have moved
        step, expected = jax.jit(functools.partial(kernel, causal=True)), q * scale
        for _ in range(6):
            expected = expected + step(expected, k, v)[0]
        np.testing.assert_array_equal(captured(q * scale, k, v), expected)


@pytest.mark.parametrize("many", ["batches", "heads"])
def test_batches_and_heads_beyond_65535_are_right(many):
    batch, kv_heads = (70000, 1) if many == "batches" else (1, 70000)
    x = testing.random(Cell(batch=(batch,), q=2, k=3, kv_heads=kv_heads, head_dim=64, dtype="bfloat16"))
    out, lse = kernel(**arrays(x))
    for part in (slice(0, 50), slice(65500, 65600), slice(69950, 70000)):
        of_array, of_lse = (part, part) if many == "batches" else (np.s_[:, :, part], np.s_[:, part])
        x_part = {name: a[of_array] for name, a in arrays(x).items()}
        assert_close((out[of_array], lse[of_lse]), x_part, "bfloat16")


@pytest.mark.parametrize(("long", "head_dim"), [("q", 128), ("kv", 128), ("q", 192)])  # 192: stored row by row
def test_arrays_of_more_than_2_to_the_31_elements_are_read_and_written_to_their_end(long, head_dim):
    if (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) < 30e9:
        pytest.skip("needs 30 GB of GPU memory")
    heads = {"group": 128, "kv_heads": 1} if long == "q" else {"kv_heads": 128}
    x = testing.random(Cell(batch=(1,), q=100, head_dim=head_dim, dtype="bfloat16", window=(20, 0), **heads))
    in_front = ((0, 0), (140_000 - 100, 0), (0, 0), (0, 0))  # 140,000 * 128 * head_dim elements, zeros in front
    padded = {name: jnp.pad(a, in_front) if name in long else a for name, a in arrays(x).items()}
    out, lse = jax.jit(functools.partial(kernel, window=(20, 0)))(**padded)
    # the first 20 of the last rows see padding
    assert_close((out[:, -80:], lse[..., -80:]), {**x, "q": x["q"][:, 20:]}, "bfloat16")


def test_a_feature_without_a_kernel_warns_and_runs():
    x = testing.random(Cell(q=9, head_dim=64))
    with pytest.warns(FallbackWarning, match="float32"):
        got = jax_fa4.attention(**x, return_lse=True)
    assert_close(got, x, "float32")


def test_asking_for_a_kernel_that_does_not_exist_raises():
    q = jnp.ones((1, 9, 2, 64), jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        kernel(q, q, q)


@pytest.mark.parametrize("axes", [("d", None), (None, "m"), ("d", "m")])
def test_two_gpus_share_batch_or_heads(axes):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    shape = {"d": (2, 1), "m": (1, 2)}["m" if axes[1] else "d"] if None in axes else (2, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(shape), ("d", "m"))
    x = testing.random(SMALL)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes[0], None, axes[1]))
    got = jax.jit(functools.partial(kernel, causal=True))(**jax.device_put(arrays(x), sharding))
    assert got[0].sharding.is_equivalent_to(sharding, 4)
    assert_close(got, x, "bfloat16")


def test_a_call_runs_on_the_device_that_holds_its_operands():
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = testing.random(SMALL)
    got = kernel(**jax.device_put(arrays(x), jax.devices()[1]), causal=True)
    assert got[0].devices() == {jax.devices()[1]}
    assert_close(got, x, "bfloat16")


def arrays(x):
    return {name: jnp.asarray(x[name]) for name in "qkv"}


def options(x):
    return {name: value for name, value in x.items() if name not in ("q", "k", "v")}
