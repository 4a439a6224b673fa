"""Derivatives of any order and mode, in float64, against autodiff of attention written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention

pytestmark = pytest.mark.usefixtures("quick_compilation")
B, T, S, N, K, D, E = 2, 5, 6, 4, 2, 8, 16
CAUSAL = np.arange(S) <= np.arange(T)[:, None] + S - T


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def arguments():
    rng = np.random.default_rng(0)
    shapes = {"q": (B, T, N, D), "k": (B, S, K, D), "v": (B, S, K, E), "sinks": (N,), "bias": (B, 1, T, S)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {
        "softmax_scale": np.float64(0.4),
        "softcap": np.float64(1.5),
    }


def loss_of(attend):
    """A loss that is no polynomial of out and lse, so that every derivative has all its terms."""

    def loss(args):
        out, lse = attend(**args)
        return jnp.sin(out).sum() + jnp.exp(lse / 3).sum() + (out[..., 0] * jnp.swapaxes(lse, -1, -2)).sum()

    return loss


@pytest.fixture
def losses(written_out):
    """The loss of ours, and that of the reference."""
    ours = functools.partial(attention, causal=True, return_lse=True)
    return loss_of(ours), loss_of(functools.partial(written_out, visible=CAUSAL))


def direction(args, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(np.shape(a)) for name, a in args.items()}


def along(loss, args, u):
    return jax.jvp(loss, (args,), (u,))[1]


def dot(a, b):
    return sum(jnp.vdot(a[name], b[name]) for name in a)


ORDERS = {
    "grad": lambda f, u, w: jax.grad(f),
    "jvp": lambda f, u, w: lambda a: along(f, a, u),
    "jvp-of-grad": lambda f, u, w: lambda a: jax.jvp(jax.grad(f), (a,), (u,))[1],
    "grad-of-grad": lambda f, u, w: jax.grad(lambda a: dot(jax.grad(f)(a), u)),
    "grad-of-jvp": lambda f, u, w: jax.grad(lambda a: along(f, a, u)),
    "jvp-of-jvp": lambda f, u, w: lambda a: along(lambda b: along(f, b, u), a, w),
    "third": lambda f, u, w: lambda a: along(lambda b: dot(jax.grad(f)(b), u), a, w),
}


@pytest.mark.parametrize("derivative", ORDERS.values(), ids=ORDERS)
def test_every_order_and_mode_equals_autodiff_of_the_definition(derivative, losses, assert_close):
    args = arguments()
    ours, wanted = (jax.jit(derivative(f, direction(args, 1), direction(args, 2)))(args) for f in losses)
    assert_close(ours, wanted, rtol=1e-9)


@pytest.mark.parametrize("name", ["k", "softcap", "sinks"])
def test_any_argument_alone_can_be_differentiated_twice(name, losses, assert_close):
    args = arguments()

    def curvature(loss):
        part = lambda a: loss(args | {name: a})  # noqa: E731
        u = direction(args, 1)[name]
        return jax.jit(lambda a: (jax.grad(part)(a), jax.jvp(jax.grad(part), (a,), (u,))[1]))(args[name])

    assert_close(*map(curvature, losses), rtol=1e-9)


def test_jacobians_in_both_modes_agree(assert_close):
    q, k, v = (arguments()[name][0, :2] for name in "qkv")
    both = (jax.jit(jac(lambda q: attention(q, k, v, return_lse=True)))(q) for jac in (jax.jacfwd, jax.jacrev))
    assert_close(*both, rtol=1e-11)


def test_linearize_and_its_transpose_are_jvp_and_vjp(losses, assert_close):
    args = arguments()
    u = direction(args, 1)

    @jax.jit
    def both(args):
        _, linear = jax.linearize(losses[0], args)
        return linear(u), jax.linear_transpose(linear, args)(1.0)[0]

    wanted = jax.jit(lambda args: (along(losses[0], args, u), jax.grad(losses[0])(args)))
    assert_close(both(args), wanted(args), rtol=1e-11)


def test_the_transpose_of_a_vjp_is_a_jvp(assert_close):
    q, k, v = (arguments()[name] for name in "qkv")

    @jax.jit
    def both(q):
        out, vjp = jax.vjp(lambda q: attention(q, k, v), q)
        return jax.linear_transpose(vjp, out)((q,)), jax.jvp(lambda q: attention(q, k, v), (q,), (q,))[1:]

    assert_close(*both(q), rtol=1e-11)


def test_grad_runs_one_forward_and_one_backward(losses, runs):
    assert runs(jax.grad(losses[0]), arguments()) == {"forward": 1, "backward": 1, "tangent": 0}


def test_jvp_runs_one_forward_and_one_tangent(losses, runs):
    args = arguments()
    assert runs(lambda u: along(losses[0], args, u), args) == {"forward": 1, "backward": 0, "tangent": 1}


def test_the_hessian_of_the_loss_by_out_runs_no_further_forward(losses, runs):
    args = arguments()
    assert runs(ORDERS["jvp-of-grad"](losses[0], args, args), args)["forward"] == 1


def test_nothing_is_computed_for_a_bias_whose_gradient_nobody_wants(losses, equations):
    args = arguments()
    [backward] = equations("jax_fa4_backward", jax.grad(lambda q: losses[0](args | {"q": q})), args["q"])
    assert backward.params["wrt"] == ("q", "k", "v")


def test_no_tangent_of_operands_means_no_derivative_of_the_results(runs):
    q = arguments()["q"]
    counts = runs(jax.grad(lambda a: a.sum() + attention(q, q, q).sum()), np.ones(3))
    assert counts == {"forward": 1, "backward": 0, "tangent": 0}


def test_lse_alone_has_gradients(losses, written_out, assert_close):
    args = arguments()
    ours = jax.jit(jax.grad(lambda a: attention(**a, causal=True, return_lse=True)[1].sum()))
    wanted = jax.jit(jax.grad(lambda a: written_out(**a, visible=CAUSAL)[1].sum()))
    assert_close(ours(args), wanted(args), rtol=1e-11)


def test_second_derivatives_of_rows_without_a_key_are_zero():
    q, k, v = (arguments()[name] for name in "qkv")

    def loss(q):
        out, lse = attention(q, k[:, :2], v[:, :2], causal=True, return_lse=True)
        return (out**3).sum() + jnp.exp(lse).sum()

    curvature = jax.jit(lambda q: jax.jvp(jax.grad(loss), (q,), (q,))[1])(q)
    assert (curvature[:, : T - 2] == 0).all()
    assert jnp.isfinite(curvature).all()
