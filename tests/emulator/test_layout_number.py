"""Number formats against sign, exponent and mantissa written out."""

import numpy as np
import pytest

from jax_fa4.emulator.layout import number


def value(bits, exponent_bits, mantissa_bits):
    """Value of an IEEE-like bit pattern by its definition; infinities and NaN are the caller's."""
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (bits & (1 << mantissa_bits) - 1) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    magnitude = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    return -magnitude if bits >> exponent_bits + mantissa_bits & 1 else magnitude


@pytest.mark.parametrize("bits", range(256))
def test_e4m3_uses_the_top_exponent_for_numbers(bits):
    decoded = number.E4M3.decode(np.array([bits], np.uint8))[0]
    if bits & 0x7F == 0x7F:
        assert np.isnan(decoded)
    else:
        assert decoded == value(bits, 4, 3)


@pytest.mark.parametrize("bits", range(256))
def test_e5m2_has_infinities_as_ieee(bits):
    decoded = number.E5M2.decode(np.array([bits], np.uint8))[0]
    if bits >> 2 & 31 == 31:
        assert np.isnan(decoded) if bits & 3 else np.isinf(decoded)
    else:
        assert decoded == value(bits, 5, 2)


@pytest.mark.parametrize(("name", "exponent_bits", "mantissa_bits"), [("f16", 5, 10), ("bf16", 8, 7)])
def test_16_bit_floats(name, exponent_bits, mantissa_bits):
    bits = np.random.default_rng(0).integers(0, 2**16, 2000).astype(np.uint16)
    bits = bits[(bits >> mantissa_bits & (1 << exponent_bits) - 1) != (1 << exponent_bits) - 1]
    decoded = number.FORMATS[name].decode(bits)
    assert decoded.dtype == np.float32
    assert [float(d) for d in decoded] == [value(int(b), exponent_bits, mantissa_bits) for b in bits]


def test_tf32_drops_the_low_13_bits():
    bits = np.array([0x3F801FFF, 0xBF802000], np.uint32)
    assert (number.TF32.decode(bits) == np.array([1.0, -1.0009765625], np.float32)).all()


def test_bytes_are_integers():
    bits = np.array([0, 127, 128, 255], np.uint8)
    assert (number.S8.decode(bits) == [0, 127, -128, -1]).all()
    assert (number.U8.decode(bits) == [0, 127, 128, 255]).all()


@pytest.mark.parametrize("name", ["bf16", "f16", "e4m3", "e5m2"])
def test_the_smallest_normal_number_has_the_least_exponent(name):
    f = number.FORMATS[name]
    values = f.decode(np.arange(2 ** (8 * f.element_bytes)).astype(f.bits_dtype))
    mantissa_bits = {"bf16": 7, "f16": 10, "e4m3": 3, "e5m2": 2}[name]
    smallest = values[np.isfinite(values) & (values > 0)].min()
    assert smallest == 2.0 ** (f.min_exponent - mantissa_bits)
