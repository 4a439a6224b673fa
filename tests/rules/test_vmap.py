"""vmap over any operands equals a loop, forward and backward, and copies no more than it must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention

pytestmark = pytest.mark.usefixtures("quick_compilation")
M, B, T, S, N, K, D = 3, 2, 5, 7, 4, 2, 8
FLOATS = ("q", "k", "v", "softmax_scale", "softcap", "sinks", "bias")


def mapped():
    """Every argument with a leading axis of M different values."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((M, *shape)).astype(np.float32)

    def integers(low, high, *shape):
        return rng.integers(low, high, (M, *shape)).astype(np.int32)

    return {
        "q": normal(B, T, N, D),
        "k": normal(B, S, K, D),
        "v": normal(B, S, K, D),
        "softmax_scale": np.asarray([0.2, 0.3, 0.5], np.float32),
        "softcap": np.asarray([1, 2, 3], np.float32),
        "sinks": normal(N),
        "bias": normal(B, 1, T, S),
        "mask": rng.random((M, B, 1, T, S)) < 0.8,
        "q_lengths": integers(0, T + 1, B),
        "kv_lengths": integers(0, S + 1, B),
        "q_segment_ids": integers(0, 2, B, T),
        "kv_segment_ids": integers(0, 2, B, S),
        "q_offset": integers(-2, 3, B),
        "left": np.asarray([1, 2, 3], np.int32),
        "right": np.asarray([2, 0, 1], np.int32),
    }


NAMES = tuple(mapped())
# name i is mapped in subset `bit` by that bit of i + 1: any two names differ in one of these, and meet in another
HALVES = [{name for i, name in enumerate(NAMES, start=1) if i >> bit & 1} for bit in range(4)]
SUBSETS = [*HALVES, *(set(NAMES) - half for half in HALVES), {"q"}, {"kv_lengths"}, {"softmax_scale"}, set(NAMES)]


def results(args):
    args = dict(args)
    window = args.pop("left"), args.pop("right")
    out, lse = attention(**args, window=window, return_lse=True)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def loss(floats, integers):
    out, lse = results(floats | integers)
    return (out**2).sum() + jnp.sin(lse).sum()


def results_and_gradients(args):
    floats = {name: args[name] for name in FLOATS}
    return results(args), jax.grad(loss)(floats, {name: a for name, a in args.items() if name not in FLOATS})


one_by_one = jax.jit(results_and_gradients)


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "-".join(sorted(subset)))
def test_vmap_of_results_and_gradients_equals_a_loop(subset, assert_close):
    args = {name: a if name in subset else a[1] for name, a in mapped().items()}
    axes = {name: 0 if name in subset else None for name in NAMES}
    each = [{name: a[i] if name in subset else a for name, a in args.items()} for i in range(M)]
    actual = jax.jit(jax.vmap(results_and_gradients, in_axes=(axes,)))(args)
    assert_close(actual, stacked([one_by_one(a) for a in each]))


@pytest.mark.parametrize("subset", [("q",), ("bias", "softmax_scale"), ("kv_lengths",)], ids="-".join)
def test_grad_of_vmap_sums_over_what_is_not_mapped(subset, assert_close):
    args = {name: a if name in subset else a[1] for name, a in mapped().items()}
    axes = {name: 0 if name in subset else None for name in NAMES}

    def total(floats):
        of_floats, rest = ({n: axes[n] for n in NAMES if (n in FLOATS) == kind} for kind in (True, False))
        integers = {name: args[name] for name in rest}
        return jax.vmap(loss, in_axes=(of_floats, rest))(floats, integers).sum()

    each = [one_by_one({n: a[i] if n in subset else a for n, a in args.items()})[1] for i in range(M)]
    wanted = {n: g if n in subset else g.sum(0) for n, g in stacked(each).items()}
    assert_close(jax.jit(jax.grad(total))({name: args[name] for name in FLOATS}), wanted)


def test_mapped_axes_may_be_anywhere_and_vmaps_may_nest(assert_close):
    q, k = mapped()["q"], mapped()["k"]

    def attend(q, k):
        return attention(q, k, k, causal=True, return_lse=True)

    over_m = jax.vmap(attend, in_axes=(0, 2), out_axes=(0, 1))
    out, lse = jax.jit(jax.vmap(over_m, in_axes=(1, 0), out_axes=1))(q, k.transpose(1, 2, 3, 0, 4))
    assert_close((out, lse.transpose(2, 1, 0, 3)), attend(q, k))


def test_an_unmapped_mask_is_not_copied(equations):
    q, mask = np.ones((M, B, T, N, D), np.float32), np.ones((B, 1, T, T), bool)
    [forward] = equations("jax_fa4_forward", jax.vmap(lambda q: attention(q, q, q, mask=mask)), q)
    of = dict(zip(forward.params["fields"], forward.invars, strict=True))
    assert of["mask"].aval.shape == (1, B, 1, T, T)
    assert of["softmax_scale"].aval.shape == ()


def test_mapped_scalars_are_told_to_the_spec(equations):
    q = np.ones((B, T, N, D), np.float32)

    def call(window):
        return attention(q, q, q, window=(window, 0))

    [forward] = equations("jax_fa4_forward", jax.vmap(call), np.arange(M))
    assert forward.params["spec"].has_batched_scalars
    [forward] = equations("jax_fa4_forward", call, np.int32(1))
    assert not forward.params["spec"].has_batched_scalars


def test_second_derivatives_can_be_mapped(assert_close):
    q, k = mapped()["q"], mapped()["k"][0]

    def curvature(q):
        loss = lambda q: (attention(q, k, k) ** 3).sum()  # noqa: E731
        return jax.jvp(jax.grad(loss), (q,), (q,))[1]

    assert_close(jax.jit(jax.vmap(curvature))(q), stacked(map(jax.jit(curvature), q)))


def test_vmap_over_nothing_but_an_index(assert_close):
    q = mapped()["q"]
    rows = jax.vmap(lambda i: attention(q, q, q)[i])(jnp.arange(M))
    assert_close(rows, attention(q, q, q))
