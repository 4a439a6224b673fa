"""Ways to write a call that mean the same, and what tracing sees of it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.api import Options
from jax_fa4.testing import Cell

CELL = Cell(q=6, k=8, kv_heads=2, group=2)
X = testing.random(CELL)
RNG = np.random.default_rng(2)


def same(a: Any, b: Any) -> None:
    """Bitwise, leaf by leaf."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a: Any, cell: Cell = CELL, **options: Any) -> None:
    """`a`, (out, lse), is attention of X with these options."""
    exact, rounded = testing.attention(X, **options), testing.rounded(X, **options)
    for value, e, r in zip(a, exact, rounded, strict=True):
        np.testing.assert_allclose(value, e, rtol=0, atol=testing.error_bound(e, r, cell.dtype, factor=3))


def test_numpy_and_jax_arrays_give_the_same():
    same(jax_fa4.attention(**X), jax_fa4.attention(**{name: jnp.asarray(x) for name, x in X.items()}))


def test_objects_that_jax_turns_into_arrays_are_arrays():
    class Parameter:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return jnp.asarray(self.value)

    same(jax_fa4.attention(Parameter(X["q"]), X["k"], X["v"]), jax_fa4.attention(**X))


def test_extra_batch_axes_are_batch():
    x = testing.random(Cell(batch=(2, 3), q=3, k=4))
    out, lse = jax_fa4.attention(**x, return_lse=True)
    merged = {name: a.reshape(6, *a.shape[2:]) for name, a in x.items()}
    flat_out, flat_lse = jax_fa4.attention(**merged, return_lse=True)
    same((out, lse), (flat_out.reshape(out.shape), flat_lse.reshape(lse.shape)))


def test_an_unbatched_call_is_an_entry_of_a_batched_one():
    out, lse = jax_fa4.attention(**X, return_lse=True)
    same(jax_fa4.attention(**{name: x[1] for name, x in X.items()}, return_lse=True), (out[1], lse[1]))


def test_vmap_of_unbatched_calls_is_a_batched_call():
    same(jax.vmap(jax_fa4.attention)(X["q"], X["k"], X["v"]), jax_fa4.attention(**X))


def test_the_layouts_differ_in_the_order_of_axes_only():
    swapped = {name: np.swapaxes(x, 1, 2) for name, x in X.items()}
    out, lse = jax_fa4.attention(**X, causal=True, return_lse=True)
    other_out, other_lse = jax_fa4.attention(**swapped, causal=True, return_lse=True, layout="BNTH")
    same((other_out, other_lse), (jnp.swapaxes(out, 1, 2), lse))


def test_shapes_are_known_without_computing():
    q = jax.ShapeDtypeStruct((3, 5, 6, 64), "bfloat16")
    kv = jax.ShapeDtypeStruct((3, 9, 2, 64), "bfloat16")
    v = jax.ShapeDtypeStruct((3, 9, 2, 128), "bfloat16")
    out, lse = jax.eval_shape(lambda q, k, v: jax_fa4.attention(q, k, v, return_lse=True), q, kv, v)
    assert (out.shape, out.dtype) == ((3, 5, 6, 128), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((3, 6, 5), jnp.float32)


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        cell = Cell(q=5, k=7, head_dim=24, dtype="float64", causal=True, sinks=True)
        x = testing.random(cell)
        out, lse = jax_fa4.attention(**x, return_lse=True)
    out, lse = np.asarray(out), np.asarray(lse)
    exact = testing.attention(x)
    assert out.dtype == lse.dtype == np.float64
    assert np.abs(out - exact.out).max() < np.finfo(np.float64).eps * 16
    assert np.abs(lse - exact.lse).max() < np.finfo(np.float64).eps * 16


SCALARS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options, and those that must be equal to them
    "numpy-numbers": (
        {"softmax_scale": np.float32(0.5), "softcap": np.float64(3), "window": (np.int64(2), np.uint8(1))},
        {"softmax_scale": 0.5, "softcap": 3, "window": (2, 1)},
    ),
    "arrays-of-rank-0": (
        {"softmax_scale": np.asarray(0.5), "softcap": jnp.float32(3), "window": [jnp.int32(2), np.asarray(1)]},
        {"softmax_scale": 0.5, "softcap": 3.0, "window": (2, 1)},
    ),
    "window-none": ({"window": None}, {}),
    "window-beyond-the-keys": ({"window": (2**40, 10**18)}, {}),
    "causal-closes-the-right": ({"causal": True, "window": (2, 5)}, {"window": (2, 0)}),
    "causal-numpy-bool": ({"causal": np.bool_(True)}, {"causal": True}),
    "offset-alone": ({"q_offset": 5}, {}),
    "offset-of-the-end": ({"q_offset": 2, "causal": True}, {"causal": True}),
    "offset-per-entry": ({"q_offset": np.array([1, 1]), "causal": True}, {"q_offset": 1, "causal": True}),
    "one-length-for-all": (
        {"kv_lengths": 5, "q_lengths": np.int32(4)},
        {"kv_lengths": np.array([5, 5]), "q_lengths": np.array([4, 4])},
    ),
    "lengths-of-other-types": ({"kv_lengths": np.array([3, 8], np.uint8)}, {"kv_lengths": jnp.array([3, 8])}),
    "default-scale": ({"softmax_scale": 0.25}, {}),
}


@pytest.mark.parametrize(("options", "meaning"), SCALARS.values(), ids=SCALARS.keys())
def test_options_may_be_written_in_several_ways(options, meaning):
    same(jax_fa4.attention(**X, **options, return_lse=True), jax_fa4.attention(**X, **meaning, return_lse=True))


FULL = (2, 4, 6, 8)  # [batch, N, T, S]


@pytest.mark.parametrize(
    "shape", [(6, 8), (8,), (1, 1, 1, 8), (2, 1, 1, 8), (2, 1, 6, 1), (4, 1, 1), (), (1, 4, 6, 8)], ids=str
)
def test_mask_and_bias_broadcast_as_in_numpy(shape):
    bias = RNG.standard_normal(shape).astype(np.float32)
    mask = RNG.random(shape) < 0.8
    written_out = {"bias": np.broadcast_to(bias, FULL), "mask": np.broadcast_to(mask, FULL)}
    close(jax_fa4.attention(**X, bias=bias, mask=mask, return_lse=True), **written_out)


def test_sinks_may_differ_by_batch_entry():
    sinks = RNG.standard_normal((2, 4)).astype(np.float32)
    out, lse = jax_fa4.attention(**X, sinks=sinks, return_lse=True)
    for b in range(2):
        exact = testing.attention({name: x[b : b + 1] for name, x in X.items()}, sinks=sinks[b])
        np.testing.assert_allclose(out[b], exact.out[0], atol=1e-6)
        np.testing.assert_allclose(lse[b], exact.lse[0], atol=1e-6)


def test_one_segment_row_serves_every_batch_entry():
    ids = {"q_segment_ids": np.array([0, 0, 0, 1, 1, 1]), "kv_segment_ids": np.array([0] * 5 + [1] * 3)}
    rows = {name: np.stack([row, row]) for name, row in ids.items()}
    same(jax_fa4.attention(**X, **ids), jax_fa4.attention(**X, **rows))


@pytest.mark.parametrize(("dtype", "far"), [(jnp.uint32, 2**32 - 1), (jnp.int64, 2**32 + 1)], ids=["uint32", "int64"])
def test_integers_of_wider_types_are_cut_where_a_cast_would_wrap_around(dtype, far, monkeypatch):
    monkeypatch.setattr(jax_fa4.rules, "attend", lambda x, spec: (x, None))  # all that is passed on
    with jax.enable_x64(True):
        far = jnp.asarray(far, dtype)
        x: Any = jax_fa4.attention(**X, window=(far, far), q_offset=far, kv_lengths=far[None], q_lengths=far[None])
    cut = [x.window_left, x.window_right, *x.q_offset, *x.kv_lengths, *x.q_lengths]
    assert [int(number) for number in cut] == [2**31 - 1] * 5


def test_a_token_at_a_position_beyond_int32_is_written_nowhere():
    pool, new, table = X["k"][:, :4], X["k"][:1, :1], jnp.asarray([[0, 1]])
    with jax.enable_x64(True):
        far = jnp.asarray([[2**32 + 1]], jnp.int64)
        pools = jax.jit(jax_fa4.append_kv)(pool, pool, new, new, table, far)
    same(pools, (pool, pool))


@pytest.mark.parametrize("cap", [float(np.finfo(np.float32).max), jnp.float32(3e38)], ids=["number", "array"])
def test_the_largest_softcaps_cap_nothing(cap):
    close(jax_fa4.attention(**X, softcap=cap, return_lse=True))


def test_segment_ids_of_uint32_stay_different(monkeypatch):
    monkeypatch.setattr(jax_fa4.rules, "attend", lambda x, spec: (x, None))
    ids = np.asarray([0, 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], np.uint32)
    x: Any = jax_fa4.attention(**X, q_segment_ids=ids, kv_segment_ids=jnp.zeros(8, jnp.uint32))
    assert len(set(np.asarray(x.q_segment_ids).ravel().tolist())) == 6


def test_new_values_of_traced_options_compile_nothing():
    traces = []

    @jax.jit
    def call(scale, cap, left, offset, lengths):
        traces.append(1)
        return jax_fa4.attention(
            **X,
            softmax_scale=scale,
            softcap=cap,
            window=(left, None),
            causal=True,
            q_offset=offset,
            kv_lengths=lengths,
            return_lse=True,
        )

    for scale, cap, left, offset, lengths in (
        (0.5, 20.0, 3, 2, np.array([8, 7], np.int32)),
        (0.1, 2.0, 0, 4, np.array([1, 8], np.int32)),
    ):
        options = {"softmax_scale": scale, "softcap": cap, "q_offset": offset, "kv_lengths": lengths}
        close(call(scale, cap, left, offset, lengths), **options, window=(left, None), causal=True)
    assert len(traces) == 1


def test_static_values_are_constants_of_one_program():
    def jaxpr(scale: float) -> str:
        return str(jax.make_jaxpr(lambda: jax_fa4.attention(**X, softmax_scale=scale, causal=True))())

    assert jaxpr(0.5).replace("0.5:f32[]", "0.125:f32[]") == jaxpr(0.125)


def test_the_second_call_reuses_the_compiled_program():
    attend = jax_fa4.rules.attend
    jax_fa4.attention(**X, causal=True)
    before = attend._cache_size()
    jax_fa4.attention(**X, causal=True, softmax_scale=0.3)
    assert attend._cache_size() == before


def test_type_checkers_know_every_option():
    options = inspect.signature(jax_fa4.attention).parameters.keys() - {"q", "k", "v", "return_lse"}
    assert Options.__annotations__.keys() == options
