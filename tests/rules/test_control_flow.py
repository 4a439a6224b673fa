"""The op under jax.checkpoint, scan, cond, while and pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention
from jax_fa4.rules import LSE_NAME, OUT_NAME

pytestmark = pytest.mark.usefixtures("quick_compilation")
q = np.random.default_rng(0).standard_normal((2, 6, 2, 8)).astype(np.float32)
weights = np.linspace(0.5, 1.5, 4, dtype=np.float32)


def block(x, w):
    return x + attention(jnp.tanh(w * x), x, x, causal=True)


def loss_of(layer):
    return lambda x, w: (layer(x, w) ** 2).sum()


POLICIES = {
    "nothing": (None, 2),
    "out-and-lse": (jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME), 1),
    "out-alone": (jax.checkpoint_policies.save_only_these_names(OUT_NAME), 2),
    "everything": (jax.checkpoint_policies.everything_saveable, 1),
}


@pytest.mark.parametrize("in_scan", [False, True], ids=["plain", "scan"])
@pytest.mark.parametrize(("policy", "forwards"), POLICIES.values(), ids=POLICIES)
def test_saving_both_names_spares_the_second_forward(policy, forwards, in_scan, runs):
    layer = jax.checkpoint(block, policy=policy)

    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    args = (q, weights) if in_scan else (q, weights[0])
    counts = runs(jax.grad(loss_of(scanned if in_scan else layer)), *args)
    assert counts == {"forward": forwards, "backward": 1, "tangent": 0}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 saves less than named here, whatever the names")
def test_names_count_under_the_other_implementation_of_checkpoint_too(runs):
    policy, forwards = POLICIES["out-and-lse"]
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        assert runs(jax.grad(loss_of(jax.checkpoint(block, policy=policy))), q, weights[0])["forward"] == forwards
    finally:
        jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("policy", [policy for policy, _ in POLICIES.values()], ids=POLICIES)
def test_checkpoint_changes_no_gradient(policy, assert_close):
    layer = jax.checkpoint(block, policy=policy)
    actual, wanted = (jax.jit(jax.grad(loss_of(f), (0, 1)))(q, weights[0]) for f in (layer, block))
    assert_close(actual, wanted)


def unrolled(x, w):
    for each in weights:
        x = block(x, each * w)
    return x


def test_scan_equals_the_unrolled_loop(assert_close):
    def scanned(x, w):
        return jax.lax.scan(lambda x, each: (block(x, each * w), None), x, weights)[0]

    actual, wanted = (jax.jit(jax.value_and_grad(loss_of(f), (0, 1)))(q, weights[0]) for f in (scanned, unrolled))
    assert_close(actual, wanted)


def test_forward_mode_goes_through_while_loops(assert_close):
    def looped(x, w):
        return jax.lax.fori_loop(0, jnp.int32(len(weights)), lambda i, x: block(x, jnp.asarray(weights)[i] * w), x)

    actual, wanted = (jax.jit(lambda x, f=f: jax.jvp(lambda x: f(x, 1.0), (x,), (x,)))(q) for f in (looped, unrolled))
    assert_close(actual, wanted)


@pytest.mark.parametrize("chosen", [False, True])
def test_cond_takes_the_branch_and_its_gradient(chosen, assert_close):
    def either(x, w):
        return jax.lax.cond(w > 0, block, lambda x, w: x * w, x, w)

    w = np.float32(1 if chosen else -1)
    actual, wanted = (
        jax.jit(jax.grad(loss_of(f), (0, 1)))(q, w) for f in (either, block if chosen else lambda x, w: x * w)
    )
    assert_close(actual, wanted)


def test_pmap_gives_every_device_its_gradient(assert_close):
    gradient = jax.grad(loss_of(block), (0, 1))
    x, w = np.stack([q, 2 * q]), weights[:2]
    actual = jax.pmap(gradient, devices=jax.devices()[:2])(x, w)
    wanted = [jax.jit(gradient)(*each) for each in zip(x, w, strict=True)]
    assert_close(actual, jax.tree.map(lambda *leaves: np.stack(leaves), *wanted))


def test_nothing_depends_on_being_jitted(assert_close):
    def gradient(x):
        return jax.grad(loss_of(block), (0, 1))(x, 0.7)

    assert_close(gradient(q), jax.jit(gradient)(q))
    with jax.disable_jit():
        assert_close(gradient(q), jax.jit(gradient)(q))
