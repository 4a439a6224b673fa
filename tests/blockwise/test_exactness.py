"""Forward, backward and tangent in float64 against the definition in float64: nothing is left but rounding."""

import functools

import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.blockwise import Results
from jax_fa4.testing import Cell

cell = functools.partial(Cell, dtype="float64", q=7, k=11, head_dim=8)
CELLS = [
    cell(),
    cell(batch=(), k=12, group=3),
    cell(batch=(2, 1, 2), head_dim_v=24, softmax_scale=0.9),
    cell(causal=True, q=13, k=9, sinks=True),
    cell(window=(2, 1), kv_lengths=(0, 6), group=2),
    cell(window=(1, None), q_offset=-3, bias="full"),
    cell(q_lengths=(3, 0), kv_lengths=(11, 4), causal=True, sinks=True),
    cell(segments=3, softcap=1.5, bias="keys"),
    cell(mask="full", softcap=0.5, sinks=True, bias="shared", group=2),
    cell(k=0, sinks=True),
    cell(q=0),
    cell(batch=(0,)),
]
FLOATS = ("q", "k", "v", "softmax_scale", "softcap", "sinks", "bias")
ROUNDING = 1e-12  # of sums of up to a few hundred float64 terms of order 1


def floats(x):
    return tuple(name for name in FLOATS if getattr(x, name) is not None)


def random_like(a, seed):
    return np.random.default_rng(seed).standard_normal(a.shape).astype(a.dtype)


def assert_equal(actual, exact):
    np.testing.assert_allclose(actual, exact, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_forward(cell, operands, forward):
    out, lse = forward(operands(cell))
    exact = testing.attention(testing.random(cell))
    assert_equal(out, exact.out)
    assert_equal(lse, exact.lse)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_backward(cell, operands, forward, backward):
    x = operands(cell)
    saved = forward(x)
    cotangents = Results(random_like(saved.out, 1), random_like(saved.lse, 2))
    gradients = backward(x, saved, cotangents, *floats(x))
    exact = testing.gradients(testing.random(cell), *cotangents)
    for name, gradient in gradients.items():
        assert gradient.shape == getattr(x, name).shape
        assert_equal(gradient.reshape(exact[name].shape), exact[name])


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tangent_is_the_transpose_of_backward(cell, operands, forward, backward, tangent):
    x = operands(cell)
    saved = forward(x)
    cotangents = Results(random_like(saved.out, 1), random_like(saved.lse, 2))
    tangents = {name: random_like(getattr(x, name), seed) for seed, name in enumerate(floats(x), start=3)}
    moved = tangent(x, saved, tangents)
    gradients = backward(x, saved, cotangents, *floats(x))
    along = sum(np.vdot(a, b) for a, b in zip(moved, cotangents, strict=True))
    assert_equal(along, sum(np.vdot(tangents[name], g) for name, g in gradients.items()))


@pytest.mark.parametrize("name", FLOATS)
def test_tangent_is_the_limit_of_finite_differences(name, operands, forward, tangent):
    x = operands(cell(q=4, k=6, softcap=1.5, sinks=True, bias="full", window=(3, 1), group=2))
    zeros = {n: np.zeros_like(getattr(x, n)) for n in FLOATS}
    direction, step = random_like(getattr(x, name), 1), 1e-5
    moved = tangent(x, forward(x), zeros | {name: direction})
    ahead, behind = (forward(x._replace(**{name: getattr(x, name) + sign * step * direction})) for sign in (1, -1))
    for one, a, b in zip(moved, ahead, behind, strict=True):
        np.testing.assert_allclose(one, (a - b) / (2 * step), atol=1e-8)  # step**2 and rounding / step
