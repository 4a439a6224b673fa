"""`dot_product_attention` against `jax.nn`'s own."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, T, S, N, K, H = 2, 6, 9, 4, 2, 16
RNG = np.random.default_rng(0)
BIAS = RNG.standard_normal((BATCH, N, T, S)).astype(np.float32)
MASK = RNG.random((BATCH, N, T, S)) < 0.7
MASK[..., 0] = True  # `jax.nn` averages all values where a query sees no key
DOUT = RNG.standard_normal((BATCH, T, N, H)).astype(np.float32)
TWO_IMPLEMENTATIONS = 4  # factor of a bound for the difference of two, each of which may be off by a factor of 2

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal-from-the-start": {"is_causal": True},
    "window-of-one-number": {"local_window_size": 2},
    "window-of-a-pair": {"local_window_size": (5, 0)},
    "causal-window": {"is_causal": True, "local_window_size": (2, 3)},
    "bias-of-one-head": {"bias": BIAS[:1, :1]},
    "mask-of-keys": {"mask": MASK[:, :1, :1]},
    "lengths": {
        "query_seq_lengths": np.array([6, 4], np.int32),
        "key_value_seq_lengths": np.array([3, 9], np.int32),
        "is_causal": True,
    },
    "everything": {
        "bias": BIAS,
        "mask": MASK,
        "is_causal": True,
        "key_value_seq_lengths": np.array([8, 9], np.int32),
        "local_window_size": (7, 7),
    },
}
NAMES = {
    "scale": "softmax_scale",
    "is_causal": "causal",
    "query_seq_lengths": "q_lengths",
    "key_value_seq_lengths": "kv_lengths",
}


def operands(head_dim: int = H, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (BATCH, T, N, head_dim), (BATCH, S, K, head_dim), (BATCH, S, K, head_dim)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def derivatives(function: Any, call: dict[str, Any]) -> dict[str, jax.Array]:
    """out, lse, and the gradients of q, k, v and bias."""
    wrt = dict(zip(("query", "key", "value"), operands(), strict=True)) | {n: x for n, x in call.items() if n == "bias"}

    @jax.jit
    def program(wrt):
        (out, lse), pullback = jax.vjp(lambda wrt: function(**{**call, **wrt}, return_residual=True), wrt)
        return {"out": out, "lse": lse, **pullback((jnp.asarray(DOUT), jnp.ones_like(lse)))[0]}

    return program(wrt)


def references(call: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Exact and rounded values of the same, for several inputs."""
    window = call.get("local_window_size", (None, None))
    options = {NAMES.get(name, name): x for name, x in call.items() if name != "local_window_size"}
    options |= {"q_offset": np.int32(0), "window": window if isinstance(window, tuple) else (window, window)}
    draws = []
    for seed in range(4):
        q, k, v = operands(seed=seed)
        x = {"q": q, "k": k, "v": v, **options}
        for forward, gradients in (
            (testing.attention, testing.gradients),
            (testing.rounded, testing.rounded_gradients),
        ):
            draws.append({**forward(x)._asdict(), **gradients(x, DOUT)})
    names = {"q": "query", "k": "key", "v": "value"}
    exact, rounded = (
        {names.get(name, name): np.stack([draw[name] for draw in some]) for name in draws[0]}
        for some in (draws[::2], draws[1::2])
    )
    return exact, rounded


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_jax_nn(name):
    call = CALLS[name]
    ours, theirs = (derivatives(f, call) for f in (jax_fa4.dot_product_attention, jax.nn.dot_product_attention))
    exact, rounded = references(call)
    live = np.arange(T) < call.get("query_seq_lengths", np.array([T, T]))[:, None]  # what lse is elsewhere differs
    assert ours.keys() == theirs.keys()
    for result, value in ours.items():
        bound = testing.error_bound(exact[result], rounded[result], "float32", TWO_IMPLEMENTATIONS)
        difference = np.abs(np.asarray(value) - np.asarray(theirs[result]))
        assert (difference[live] if result == "lse" else difference).max() <= bound, result


def test_the_signature_is_that_of_jax_nn():
    ours, theirs = (inspect.signature(f) for f in (jax_fa4.dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("head_dim", [4, 20])
def test_any_head_dim_works(head_dim):
    q, k, v = operands(head_dim)
    ours = jax_fa4.dot_product_attention(q, k, v)
    exact, rounded = (f({"q": q, "k": k, "v": v}).out for f in (testing.attention, testing.rounded))
    assert ours.shape == exact.shape
    assert np.abs(ours - exact).max() <= testing.error_bound(exact, rounded, "float32")


def test_starts_and_ends_that_meet_need_no_offset():
    x = np.ones((2, 6, 2, 8), np.float32)
    lengths = np.array([6, 3])
    calls = ((x, {}), (x[:, 1:], {}), (x, {"key_value_seq_lengths": lengths}))
    programs = [
        str(jax.make_jaxpr(lambda q, call=call: jax_fa4.dot_product_attention(q, x, x, is_causal=True, **call))(q))
        for q, call in calls
    ]
    assert ["has_q_offset=True" in program for program in programs] == [False, True, True]


def test_a_batch_axis_is_optional():
    q, k, v = operands()
    call = {"mask": MASK[:1], "is_causal": True, "return_residual": True}
    out, residual = jax_fa4.dot_product_attention(q[0], k[0], v[0], **call)
    batched_out, batched_residual = jax_fa4.dot_product_attention(q[:1], k[:1], v[:1], **call)
    np.testing.assert_array_equal(out, batched_out[0])
    np.testing.assert_array_equal(residual, batched_residual[0])


def test_the_residual_is_rounded_to_the_inputs_and_has_no_gradient():
    q, k, v = (x.astype(jnp.bfloat16) for x in operands())
    out, residual = jax_fa4.dot_product_attention(q, k, v, return_residual=True)
    assert (out.dtype, residual.dtype, residual.shape) == (jnp.bfloat16, jnp.bfloat16, (BATCH, T, N))

    def residual_sum(q):
        return jax_fa4.dot_product_attention(q, k, v, return_residual=True)[1].astype(jnp.float32).sum()

    assert not jax.grad(residual_sum)(q).any()


def test_a_query_that_sees_no_key_is_zero():
    q, k, v = operands()
    mask = MASK.copy()
    mask[0, 1, 2] = False
    out, residual = jax_fa4.dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert not out[0, 2, 1].any()
    assert residual[0, 2, 1] == -np.inf
    assert np.isfinite(residual).sum() == residual.size - 1


BAD_CALLS = [
    ({"scale": 0}, ValueError, "scale must be finite and > 0, got 0"),
    ({"scale": 1e39}, ValueError, "scale must be from 1.18e-38 to 3.4e+38, got 1e+39"),
    ({"is_causal": 1}, TypeError, "is_causal must be a Python bool, got 1 (int)"),
    ({"local_window_size": -1}, ValueError, "local_window_size[0] must be None or >= 0, got -1; None is unbounded"),
    (
        {"local_window_size": (1, 2, 3)},
        TypeError,
        "local_window_size must be None or a pair (left, right), got a tuple of 3",
    ),
    (
        {"query_seq_lengths": np.arange(3)},
        ValueError,
        "query_seq_lengths must broadcast to [*batch] = (2,), got shape (3,)",
    ),
    ({"key_value_seq_lengths": np.array([1, 10])}, ValueError, "key_value_seq_lengths must be from 0 to 9, got 10"),
    ({"implementation": "pallas"}, ValueError, "implementation must be None, 'xla' or 'cudnn', got 'pallas'"),
    (
        {"query": np.ones((2, 6, 4, 257), np.float32), "key": np.ones((2, 9, 2, 257), np.float32)},
        ValueError,
        "query's head_dim must be from 1 to 256, got 257",
    ),
    ({"key": np.ones((2, 9, 2, 8), np.float32)}, ValueError, "key must have query's head_dim 16, got 8"),
    ({"value": np.ones((2, 9, 2, 16), np.float16)}, TypeError, "value must have query's dtype float32, got float16"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS, ids=[m.split(" must")[0] for _, _, m in BAD_CALLS])
def test_messages_name_the_arguments_as_jax_nn_does(change, error, message):
    good = dict(zip(("query", "key", "value"), operands(), strict=True))
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        jax_fa4.dot_product_attention(**{**good, **change})
