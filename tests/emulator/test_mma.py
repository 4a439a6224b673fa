"""The arithmetic of matrix units against the same model in exact rational numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest

from jax_fa4.emulator import mma
from jax_fa4.emulator.layout import number


def exponent(x, min_exponent):
    return -126 if x == 0 else max(math.frexp(x)[1] - 1, min_exponent)


def truncated(x, unit):
    """A fraction cut towards zero to a multiple of `unit`."""
    return int(x / unit) * unit


def modelled(a, b, c, formats, fraction_bits, result_bits):
    """One output element in rational arithmetic."""
    exponents = [
        exponent(x, formats[0].min_exponent) + exponent(y, formats[1].min_exponent) for x, y in zip(a, b, strict=True)
    ]
    products = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)]
    unit = Fraction(2) ** (max([exponent(c, -126), *exponents]) - fraction_bits)
    total = truncated(Fraction(c), unit) + sum(truncated(p, unit) for p in products)
    if total == 0:
        return 0.0
    e = math.floor(math.log2(abs(total)))
    e += (abs(total) >= Fraction(2) ** (e + 1)) - (abs(total) < Fraction(2) ** e)
    return float(truncated(total, Fraction(2) ** max(e - result_bits, -149)))


def random_values(rng, f, shape):
    """Bit patterns of finite values over the whole range of the format, zeros and subnormals among them."""
    bits = rng.integers(0, 2 ** (8 * f.element_bytes), shape, dtype=np.uint64).astype(f.bits_dtype)
    x = f.decode(bits)
    x = np.where(np.isfinite(x), x, np.float32(0))
    return np.where(rng.random(shape) < 0.1, np.float32(0), x)


def narrow_values(rng, f, shape):
    """Values around 1, as in attention."""
    mantissa = {"bf16": 8, "f16": 11, "tf32": 11, "e4m3": 4, "e5m2": 3}[f.name]
    m, e = np.frexp(rng.standard_normal(shape))
    return np.ldexp(np.round(m * 2**mantissa), e - mantissa).astype(np.float32)


CASES = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}


@pytest.mark.parametrize("values", [random_values, narrow_values])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", [mma.PRECISE, mma.FP8_WGMMA], ids=["25", "13"])
def test_every_element_is_the_models(name, values, precision):
    f, rng = number.FORMATS[name], np.random.default_rng(len(name) + CASES[name])
    a, b = values(rng, f, (5, CASES[name])), values(rng, f, (7, CASES[name]))
    c = (rng.standard_normal((5, 7)) * 2.0 ** rng.integers(-30, 30, (5, 7))).astype(np.float32)
    d = mma.multiply_accumulate(a, b, c, formats=(f, f), precision=precision)
    for i, j in np.ndindex(5, 7):
        row, column = [float(x) for x in a[i]], [float(x) for x in b[j]]
        expected = modelled(row, column, float(c[i, j]), (f, f), precision.fraction_bits, precision.result_bits)
        if abs(expected) >= 2.0**128:
            expected = math.copysign(math.inf, expected)
        assert d[i, j] == expected, (i, j)


def test_small_products_are_exact():
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (64, 16)).astype(np.float32) for _ in range(2))
    d = mma.multiply_accumulate(a, b, None, formats=(number.BF16, number.BF16))
    assert d.dtype == np.float32
    assert (d == a @ b.T).all()


def test_a_term_26_binary_places_below_the_largest_is_lost():
    a, b = np.zeros((1, 16), np.float32), np.ones((1, 16), np.float32)
    a[0, :3] = [2.0**0, 2.0**-25, 2.0**-26]
    d = mma.multiply_accumulate(a, b, np.float32([[-1]]), formats=(number.BF16, number.BF16))
    assert d[0, 0] == 2.0**-25


def test_the_sum_is_cut_not_rounded():
    c = np.float32([[1]])
    a, b = np.zeros((1, 16), np.float32), np.ones((1, 16), np.float32)
    a[0, 0] = 1.75 * 2.0**-24
    assert mma.multiply_accumulate(a, b, c, formats=(number.BF16, number.BF16))[0, 0] == 1
    assert mma.multiply_accumulate(-a, b, -c, formats=(number.BF16, number.BF16))[0, 0] == -1


@pytest.mark.parametrize(
    ("x", "y", "c", "expected"),
    [
        (np.inf, 1, 0, np.inf),
        (np.inf, -1, 5, -np.inf),
        (1, 1, np.inf, np.inf),
        (np.inf, 0, 0, np.nan),
        (np.inf, 1, -np.inf, np.nan),
        (np.nan, 0, 0, np.nan),
        (1, 1, np.nan, np.nan),
        (2.0**100, 2.0**100, 0, np.inf),
    ],
)
def test_infinities_and_nan_follow_ieee(x, y, c, expected):
    a, b = np.ones((2, 16), np.float32), np.ones((2, 16), np.float32)
    a[0, 3], b[0, 3] = x, y
    c = np.array([[c, 1], [1, 1]], np.float32)
    d = mma.multiply_accumulate(a, b, c, formats=(number.BF16, number.BF16))
    assert d[1, 1] == 17
    if np.isnan(expected):
        assert d.view(np.uint32)[0, 0] == 0x7FFFFFFF
    else:
        assert d[0, 0] == expected


def test_integers_wrap_or_saturate():
    a = np.full((1, 32), 127, np.float32)
    c = np.array([[2**31 - 1]], np.int32)
    assert mma.multiply_accumulate_integer(a, a, c, saturate=True)[0, 0] == 2**31 - 1
    assert mma.multiply_accumulate_integer(a, a, c, saturate=False)[0, 0] == 2**31 - 1 + 32 * 127**2 - 2**32
    assert mma.multiply_accumulate_integer(a, -a, None, saturate=False)[0, 0] == -32 * 127**2


def test_float16_results_round_to_even_and_have_one_nan():
    d = np.float32([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1e6, -np.nan])
    assert list(mma.to_float16(d)) == [0x3C00, 0x3C02, 0x7C00, 0x7FFF]
