"""Floating-point instructions against exact rational arithmetic, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from .snippet import evaluate

RNG = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 0.5, 2.0**-126]


def floats(seed: int) -> np.ndarray:
    """32 values: special ones, and random ones of very different magnitudes."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-40, 40, 32 - len(SPECIAL)).astype(np.float64))
    return rng.permutation(np.concatenate([SPECIAL, rng.standard_normal(32 - len(SPECIAL)) * scale]).astype(np.float32))


def rounded(value: Fraction, mode: str) -> np.float32:
    """A rational to float32: nearest (ties to even), or towards zero, minus or plus infinity."""
    if value == 0:
        return np.float32(0)
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)) - 1, -126)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps = value / unit
    down = math.floor(steps)
    nearest = round(steps)  # ties to even
    chosen = {"rn": nearest, "rm": down, "rp": math.ceil(steps), "rz": down if value > 0 else math.ceil(steps)}[mode]
    exact = chosen * unit
    if abs(exact) >= Fraction(2) ** 128:
        limit = np.finfo(np.float32).max
        away = mode == "rn" or mode == ("rp" if value > 0 else "rm")
        return np.float32(math.copysign(np.inf if away else limit, value))
    return np.float32(float(exact))


def run(opcode: str, *inputs: np.ndarray) -> np.ndarray:
    names = [f"r{1 + i}" for i in range(len(inputs))]
    operands = ", ".join(f"%{name}" for name in names)
    return evaluate(f"{opcode} %r20, {operands};", dict(zip(names, inputs, strict=True)), "r20", np.float32)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal, NaN with NaN, and the signs of zeros too."""
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


MODES = ["rn", "rz", "rm", "rp"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "function"), [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)])
def test_arithmetic_is_rounded_once(name, function, mode):
    a, b = floats(1), floats(2)
    found = run(f"{name}.{mode}.f32", a, b)
    with np.errstate(all="ignore"):
        plain = function(a.astype(np.float64), b.astype(np.float64))
    for x, y, z, about in zip(a, b, found, plain, strict=True):
        if np.isfinite(x) and np.isfinite(y):
            exact = function(Fraction(float(x)), Fraction(float(y)))
            assert z == rounded(exact, mode), (x, y)
        else:
            assert np.array_equal(z, np.float32(about), equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_fma_is_rounded_once(mode):
    a, b = floats(1), floats(2)
    with np.errstate(all="ignore"):
        cancelling = -(a.astype(np.float64) * b).astype(np.float32)  # leaves the product's own rounding error
    for c in (floats(3), cancelling):
        found = run(f"fma.{mode}.f32", a, b, c)
        for x, y, z, d in zip(a, b, c, found, strict=True):
            if np.isfinite(x) and np.isfinite(y) and np.isfinite(z):
                assert d == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), mode), (x, y, z)


def test_fma_breaks_ties_by_what_rounding_to_double_would_lose():
    a, b = np.full(32, 1 + 2.0**-12, np.float32), np.full(32, 1 + 2.0**-12, np.float32)
    c = np.exp2(-np.arange(32, dtype=np.float32) - 24) * np.float32(1)
    found = run("fma.rn.f32", a, b, c)
    product = Fraction(float(a[0])) * Fraction(float(b[0]))
    assert [float(x) for x in found] == [float(rounded(product + Fraction(float(z)), "rn")) for z in c]


def test_packed_arithmetic_does_both_halves():
    a, b, c = (np.stack([floats(seed), floats(seed + 3)], axis=1) for seed in (1, 2, 3))
    patterns = [np.ascontiguousarray(x).view(np.uint64).reshape(32) for x in (a, b, c)]
    for opcode, count, single in (("add.rn", 2, "add.rn"), ("mul.rn", 2, "mul.rn"), ("fma.rn", 3, "fma.rn")):
        operands = ", ".join(f"%d{1 + i}" for i in range(count))
        inputs = {f"d{1 + i}": patterns[i] for i in range(count)}
        found = evaluate(f"{opcode}.f32x2 %d20, {operands};", inputs, "d20", np.float32).reshape(32, 2)
        for half in range(2):
            assert_same(found[:, half], run(f"{single}.f32", *(x[:, half] for x in (a, b, c)[:count])))


def test_flushing_and_saturation():
    a = floats(1)
    tiny = (np.abs(a) < 2.0**-126) & ~np.isnan(a)
    assert_same(
        run("add.ftz.f32", a, np.full(32, -0.0, np.float32)), np.where(tiny, np.copysign(0, a), a).astype(np.float32)
    )
    clipped = np.where(np.isnan(a), 0, np.clip(a, 0, 1)).astype(np.float32)
    assert np.array_equal(run("add.sat.f32", a, np.zeros(32, np.float32)), clipped)


def test_minimum_and_maximum_drop_nan_and_order_zeros():
    a, b = floats(1), floats(2)
    a[:4], b[:4] = [0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, 0.0, -0.0]
    largest, smallest = run("max.f32", a, b), run("min.f32", a, b)
    assert np.array_equal(np.signbit(largest[:4]), [False, False, False, True])
    assert np.array_equal(np.signbit(smallest[:4]), [True, True, False, True])
    assert np.array_equal(largest, np.fmax(a, b), equal_nan=True)
    assert np.array_equal(smallest, np.fmin(a, b), equal_nan=True)
    propagated = run("max.NaN.f32", a, b)
    assert np.array_equal(np.isnan(propagated), np.isnan(a) | np.isnan(b))
    three = run("max.f32", a, b, floats(3))
    assert np.array_equal(three, np.fmax(np.fmax(a, b), floats(3)), equal_nan=True)


def test_xorsign_takes_the_larger_magnitude_and_the_product_of_signs():
    a, b = RNG.standard_normal((2, 32)).astype(np.float32)
    found = run("max.xorsign.abs.f32", a, b)
    assert np.array_equal(found, np.maximum(np.abs(a), np.abs(b)) * np.sign(a) * np.sign(b))


def test_signs():
    a, b = floats(1), floats(2)
    assert_same(run("neg.f32", a), -a)
    assert_same(run("abs.f32", a), np.abs(a))
    assert_same(run("copysign.f32", a, b), np.copysign(b, a))


UNARY = {
    "ex2.approx.ftz.f32": (np.exp2, 2.5e-7),
    "ex2.approx.f32": (np.exp2, 2.5e-7),
    "lg2.approx.ftz.f32": (np.log2, 2.4e-7),
    "rcp.approx.ftz.f32": (np.reciprocal, 1.2e-7),
    "rcp.rn.f32": (np.reciprocal, 6e-8),
    "rsqrt.approx.ftz.f32": (lambda x: 1 / np.sqrt(x), 1.3e-7),
    "sqrt.approx.f32": (np.sqrt, 1.2e-7),
    "sqrt.rn.f32": (np.sqrt, 6e-8),
    "tanh.approx.f32": (np.tanh, 4.9e-4),
}


@pytest.mark.parametrize("opcode", UNARY)
def test_functions_keep_to_their_error_bounds(opcode):
    function, bound = UNARY[opcode]
    a = (RNG.standard_normal(32) * 8).astype(np.float32)
    if "lg2" in opcode or "sqrt" in opcode:
        a = np.abs(a)
    exact = function(a.astype(np.float64))
    assert (np.abs(run(opcode, a) - exact) <= bound * np.maximum(np.abs(exact), 1e-30)).all()


@pytest.mark.parametrize(
    ("opcode", "inputs", "expected"),
    [
        ("ex2.approx.ftz.f32", [-np.inf, np.inf, 0.0, -0.0, -127.0, 1e-40], [0, np.inf, 1, 1, 0, 1]),
        ("ex2.approx.f32", [-127.0, -149.0], [2.0**-127, 2.0**-149]),
        ("rcp.approx.ftz.f32", [0.0, -0.0, np.inf, -np.inf, 1e-40], [np.inf, -np.inf, 0, -0.0, np.inf]),
        ("lg2.approx.ftz.f32", [0.0, -0.0, np.inf, 1.0], [-np.inf, -np.inf, np.inf, 0]),
        ("rsqrt.approx.ftz.f32", [0.0, -0.0, np.inf], [np.inf, -np.inf, 0]),
        ("sqrt.rn.f32", [-0.0, 4.0], [-0.0, 2]),
        ("tanh.approx.f32", [np.inf, -np.inf, 0.0], [1, -1, 0]),
    ],
)
def test_functions_at_special_values(opcode, inputs, expected):
    a = np.resize(np.array(inputs, np.float32), 32)
    assert_same(run(opcode, a)[: len(inputs)], np.array(expected, np.float32))
    negative = np.full(32, -1, np.float32)
    if opcode.startswith(("lg2", "rsqrt", "sqrt")):
        assert np.isnan(run(opcode, negative)).all()


def test_division_is_rounded_once():
    a, b = RNG.standard_normal((2, 32)).astype(np.float32)
    found = run("div.rn.f32", a, b)
    exact = [rounded(Fraction(float(x)) / Fraction(float(y)), "rn") for x, y in zip(a, b, strict=True)]
    assert np.array_equal(found, np.array(exact))


def test_products_of_bfloat16_are_summed_in_float32():
    a, b = RNG.standard_normal((2, 32)).astype(ml_dtypes.bfloat16)
    c = RNG.standard_normal(32).astype(np.float32)
    inputs = {"h1": a.view(np.uint16), "h2": b.view(np.uint16), "r1": c}
    found = evaluate("fma.rn.f32.bf16 %r20, %h1, %h2, %r1;", inputs, "r20", np.float32)
    rows = zip(a.astype(np.float64), b.astype(np.float64), c, strict=True)
    assert list(found) == [rounded(Fraction(x) * Fraction(y) + Fraction(float(z)), "rn") for x, y, z in rows]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_packed_halves(dtype):
    name = "f16x2" if dtype is np.float16 else "bf16x2"
    a, b = (RNG.standard_normal((32, 2)).astype(dtype) for _ in range(2))
    inputs = {f"r{i}": np.ascontiguousarray(x).view(np.uint32).reshape(32) for i, x in ((1, a), (2, b))}
    for opcode, expected in (("add.rn", a + b), ("mul.rn", a * b), ("max", np.maximum(a, b))):
        found = evaluate(f"{opcode}.{name} %r20, %r1, %r2;", inputs, "r20", np.uint16)
        assert np.array_equal(found.view(dtype).reshape(32, 2), expected), opcode


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_float_comparisons_with_nan(name):
    a, b = floats(1), floats(2)
    b[::3] = a[::3]
    is_nan = np.isnan(a) | np.isnan(b)
    plain = COMPARISONS[name](a, b)
    ordered = evaluate(f"setp.{name}.f32 %p20, %r1, %r2;", {"r1": a, "r2": b}, "p20", bool)
    assert np.array_equal(ordered.reshape(32, 4)[:, 0], plain & ~is_nan)
    unordered = evaluate(f"setp.{name}u.f32 %p20, %r1, %r2;", {"r1": a, "r2": b}, "p20", bool)
    assert np.array_equal(unordered.reshape(32, 4)[:, 0], plain | is_nan)
    numbers = evaluate("setp.num.f32 %p20, %r1, %r2;", {"r1": a, "r2": b}, "p20", bool)
    assert np.array_equal(numbers.reshape(32, 4)[:, 0], ~is_nan)


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_integer_comparisons_and_combination(name, kind):
    a = RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    b = np.where(np.arange(32) % 3, a[::-1], a).astype(np.uint32)
    q = np.arange(32) % 2 == 0
    dtype = np.int32 if kind == "s32" else np.uint32
    holds = COMPARISONS[name](a.view(dtype), b.view(dtype))
    inputs = {"r1": a, "r2": b, "p1": q}
    plain = evaluate(f"setp.{name}.{kind} %p20, %r1, %r2;", inputs, "p20", np.uint32)
    assert np.array_equal(plain != 0, holds)
    both = evaluate(f"setp.{name}.and.{kind} %p20|%p21, %r1, %r2, %p1;", inputs, "p21", np.uint32)
    assert np.array_equal(both != 0, ~holds & q)
    negated = evaluate(f"setp.{name}.or.{kind} %p20, %r1, %r2, !%p1;", inputs, "p20", np.uint32)
    assert np.array_equal(negated != 0, holds | ~q)
