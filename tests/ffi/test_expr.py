"""Expressions: what Python builds, and that the library computes what Python does."""

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.plan import (
    BufferSpec,
    Launch,
    Plan,
    Scalar,
    ceil_div,
    dim,
    encode,
    evaluate,
    lead,
    maximum,
    minimum,
    multiprocessors,
)
from jax_fa4.plan.expr import Const, as_expr

MULTIPROCESSORS = 78
SHAPES = ((2, 3, 100, 64), (2, 3, 7))
SPECS = (
    BufferSpec(name="x", dtype="bfloat16", shape=(None, None)),
    BufferSpec(name="y", dtype="float32", shape=(None,)),
)


def plan_of(expr):
    launch = Launch(cubin="0" * 64, entry="k", grid=(1, 1, 1), block=32, params=(Scalar(dtype="i64", value=expr),))
    return Plan(arch="sm_90a", operands=SPECS, results=(), launches=(launch,))


def value_in_library(answer, expr, shapes=SHAPES):
    """An int, or the text of an error."""
    buffers = [(spec.dtype, shape, 0x1000) for spec, shape in zip(SPECS, shapes, strict=True)]
    said = answer(encode(plan_of(expr)), buffers, [], multiprocessors=MULTIPROCESSORS)
    if "error" in said:
        return said["error"]["message"]
    return int.from_bytes(bytes.fromhex(said["launches"][0]["params"][0]), "little", signed=True)


CASES = {
    "axis": (dim(0, -2), 100),
    "first-axis-of-batch": (dim(0, -3), 3),
    "batch": (lead(0, 2), 6),
    "everything": (lead(0, 0), 38400),
    "sum": (dim(0, -2) + 28, 128),
    "difference": (1 - dim(0, -2), -99),
    "product": (3 * dim(1, -1) * 2, 42),
    "floor": (dim(0, -2) // 64, 1),
    "floor-below-zero": ((0 - dim(0, -2)) // 64, -2),
    "ceiling": (ceil_div(dim(0, -2), 64), 2),
    "ceiling-below-zero": (ceil_div(0 - dim(0, -2), 64), -1),
    "ceiling-exact": (ceil_div(dim(0, -1), 64), 1),
    "minimum": (minimum(dim(0, -2), 64), 64),
    "maximum": (maximum(64, dim(0, -2)), 100),
    "large-constant": (dim(1, -1) * 0 + 2**62, 2**62),
    "multiprocessors": (minimum(dim(0, -2) * 2, multiprocessors()), 78),
    "smallest-constant": (dim(1, -1) * 0 + -(2**63), -(2**63)),
}


@pytest.mark.parametrize(("expr", "value"), CASES.values(), ids=CASES)
def test_an_expression_has_its_value_in_python_and_in_the_library(expr, value, answer):
    assert evaluate(expr, SHAPES, MULTIPROCESSORS) == value
    assert value_in_library(answer, expr) == value


def test_a_batch_without_axes_has_one_entry():
    assert evaluate(lead(0, 2), [(3, 4)]) == 1


def test_constants_are_folded():
    assert ceil_div(100, 64) * 3 + dim(0, -1) == Const(6) + dim(0, -1)


leaves = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-300, 300),
    st.builds(dim, st.just(0), st.integers(-3, -1)),
    st.builds(dim, st.just(1), st.integers(-2, -1)),
    st.builds(lead, st.just(0), st.integers(0, 3)),
    st.builds(lead, st.just(1), st.integers(0, 2)),
    st.just(multiprocessors()),
)


def safe(function):
    """Constants that cannot be folded become 0: here only what the library has to compute counts."""

    def build(left, right):
        try:
            return as_expr(function(left, right))
        except (ValueError, ZeroDivisionError):
            return 0

    return build


operators = st.sampled_from((operator.add, operator.sub, operator.mul, ceil_div, operator.floordiv, minimum, maximum))
exprs = st.recursive(
    leaves, lambda inner: st.builds(lambda f, a, b: safe(f)(a, b), operators, inner, inner), max_leaves=12
)
sizes = st.integers(0, 1000)


@settings(max_examples=300, deadline=None)
@given(expr=exprs, batch=st.tuples(sizes, sizes), tails=st.tuples(sizes, sizes, sizes))
def test_the_library_agrees_with_python(answer, expr, batch, tails):
    shapes = ((*batch, *tails[:2]), (*batch, tails[2]))
    try:
        expected = evaluate(expr, shapes, MULTIPROCESSORS)
    except (ValueError, OverflowError):
        expected = None
    if all(0 in shape for shape in shapes):
        return  # a call without a byte launches nothing, and so evaluates nothing
    value = value_in_library(answer, expr, shapes)
    if expected is None:
        assert "does not fit an int64" in value or "a divisor must be positive" in value
    else:
        assert value == expected


def test_an_expression_says_what_it_cannot_hold():
    with pytest.raises(ValueError, match=r"axis must be in \[-9, -1\] \(counted from the end\), got 0"):
        dim(0, 0)
    with pytest.raises(ValueError, match=r"buffer must be in \[0, 64\), got 64"):
        lead(64, 1)
    with pytest.raises(ValueError, match="a constant must be an int64, got 9223372036854775808"):
        dim(0, -1) + 2**63


def test_division_by_a_number_that_is_not_positive_is_an_error():
    with pytest.raises(ValueError, match="cannot divide 64 by 0: a divisor must be positive"):
        evaluate(dim(0, -1) // (dim(0, -2) - 100), SHAPES)
