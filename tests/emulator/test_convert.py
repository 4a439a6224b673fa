"""Conversions against ml_dtypes, exact rationals and Python integers."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from .snippet import evaluate
from .test_float import floats, rounded

RNG = np.random.default_rng(0)
HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def numbers(seed: int, limit: float) -> np.ndarray:
    x = floats(seed)
    return np.where(np.isnan(x) | (np.abs(x) > limit), np.float32(seed), x).astype(np.float32)


@pytest.mark.parametrize("half", HALVES)
def test_pairs_of_halves_put_the_first_operand_on_top(half):
    a, b = floats(1), floats(2)
    with np.errstate(over="ignore"):
        high, low = a.astype(HALVES[half]).view(np.uint16), b.astype(HALVES[half]).view(np.uint16)
    high, low = (np.where(np.isnan(x), 0x7FFF, bits) for x, bits in ((a, high), (b, low)))
    found = evaluate(f"cvt.rn.{half}x2.f32 %r20, %r1, %r2;", {"r1": a, "r2": b}, "r20", np.uint32)
    assert np.array_equal(found, high.astype(np.uint32) << 16 | low)


@pytest.mark.parametrize("half", HALVES)
def test_single_halves_and_back(half):
    a = floats(1)
    with np.errstate(over="ignore"):
        bits = np.where(np.isnan(a), 0x7FFF, a.astype(HALVES[half]).view(np.uint16))
    found = evaluate(f"cvt.rn.{half}.f32 %h20, %r1;", {"r1": a}, "h20", np.uint16)
    assert np.array_equal(found, bits)
    back = evaluate(f"cvt.f32.{half} %r20, %h1;", {"h1": found}, "r20", np.float32)
    assert np.array_equal(back, found.view(HALVES[half]).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("half", HALVES)
def test_satfinite_and_relu(half):
    a = floats(1)
    largest = float(ml_dtypes.finfo(HALVES[half]).max)
    clipped = np.where(np.isnan(a), a, np.clip(a, -largest, largest)).astype(np.float32)
    found = evaluate(f"cvt.rn.satfinite.{half}x2.f32 %r20, %r1, %r1;", {"r1": a}, "r20", np.uint16)[::2]
    assert np.array_equal(found, np.where(np.isnan(a), 0x7FFF, clipped.astype(HALVES[half]).view(np.uint16)))
    positive = evaluate(f"cvt.rn.relu.{half}x2.f32 %r20, %r1, %r1;", {"r1": a}, "r20", np.uint16)[::2]
    with np.errstate(over="ignore"):
        expected = np.where(a > 0, a, np.float32(0)).astype(HALVES[half]).view(np.uint16)
    assert np.array_equal(positive, np.where(np.isnan(a), 0x7FFF, expected))


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_rounds_to_even_and_clamps(name):
    a = np.concatenate([floats(1)[:16], (RNG.standard_normal(16) * 100).astype(np.float32)])
    b = (RNG.standard_normal(32) * 2.0**-8).astype(np.float32)
    largest = float(ml_dtypes.finfo(FLOAT8[name]).max)

    def bits(x):
        clipped = np.clip(np.where(np.isnan(x), 0, x), -largest, largest).astype(np.float32)
        return np.where(np.isnan(x), 0x7F, clipped.astype(FLOAT8[name]).view(np.uint8)).astype(np.uint16)

    found = evaluate(f"cvt.rn.satfinite.{name}x2.f32 %h20, %r1, %r2;", {"r1": a, "r2": b}, "h20", np.uint16)
    assert np.array_equal(found, bits(a) << 8 | bits(b))


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_widens_exactly(name):
    codes = np.arange(256, dtype=np.uint8)
    for part in codes.reshape(4, 32, 2):
        pairs = np.ascontiguousarray(part).view(np.uint16).reshape(32)
        found = evaluate(f"cvt.rn.f16x2.{name}x2 %r20, %h1;", {"h1": pairs}, "r20", np.float16).reshape(32, 2)
        expected = part.view(FLOAT8[name]).astype(np.float16)
        assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_floats_become_integers_by_rounding_mode_and_clamp(mode, function):
    a = np.concatenate([floats(1)[:16], (RNG.standard_normal(16) * 3).astype(np.float32)])
    found = evaluate(f"cvt.{mode}.s32.f32 %r20, %r1;", {"r1": a}, "r20", np.int32)
    exact = [
        0 if np.isnan(x) else int(min(max(float(x), -(2.0**31)), 2.0**31 - 1)) for x in function(a.astype(np.float64))
    ]
    assert list(found) == exact
    unsigned = evaluate(f"cvt.{mode}.u32.f32 %r20, %r1;", {"r1": a}, "r20", np.uint32)
    wide = [0 if np.isnan(x) else int(min(max(float(x), 0.0), 2.0**32 - 1)) for x in function(a.astype(np.float64))]
    assert list(unsigned) == wide
    integral = evaluate(f"cvt.{mode}.f32.f32 %r20, %r1;", {"r1": a}, "r20", np.float32)
    assert np.array_equal(integral, function(a), equal_nan=True)


def test_64_bit_integers_from_nan_have_only_the_top_bit():
    found = evaluate("cvt.rzi.s64.f32 %d20, %r1;", {"r1": np.full(32, np.nan, np.float32)}, "d20", np.uint64)
    assert (found == 1 << 63).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integers_become_floats_rounded_once(mode, kind):
    bits = int(kind[1:])
    name = "r1" if bits == 32 else "d1"
    a = RNG.integers(0, 1 << 63, 32, dtype=np.uint64) * np.uint64(2)
    a = (a >> np.uint64(64 - bits)).astype(f"u{bits // 8}")
    found = evaluate(f"cvt.{mode}.f32.{kind} %r20, %{name};", {name: a}, "r20", np.float32)
    exact = a.view(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    assert list(found) == [rounded(Fraction(int(x)), mode) for x in exact]


@pytest.mark.parametrize(
    ("opcode", "source", "result", "function"),
    [
        ("cvt.s16.s8 %h20, %h1", "h1", "h20", lambda x: x.astype(np.int8).astype(np.int16).view(np.uint16)),
        ("cvt.u16.u8 %h20, %h1", "h1", "h20", lambda x: x & 0xFF),
        ("cvt.s32.s16 %r20, %h1", "h1", "r20", lambda x: x.view(np.int16).astype(np.int32).view(np.uint32)),
        ("cvt.s32.s8 %r20, %h1", "h1", "r20", lambda x: x.astype(np.int8).astype(np.int32).view(np.uint32)),
        ("cvt.u32.u16 %r20, %h1", "h1", "r20", lambda x: x.astype(np.uint32)),
        ("cvt.u16.u32 %h20, %r1", "r1", "h20", lambda x: x.astype(np.uint16)),
        ("cvt.u32.u64 %r20, %d1", "d1", "r20", lambda x: x.astype(np.uint32)),
        ("cvt.u64.u32 %d20, %r1", "r1", "d20", lambda x: x.astype(np.uint64)),
        ("cvt.s64.s32 %d20, %r1", "r1", "d20", lambda x: x.view(np.int32).astype(np.int64).view(np.uint64)),
    ],
)
def test_integers_are_truncated_or_extended_by_the_source_type(opcode, source, result, function):
    width = {"h": np.uint16, "r": np.uint32, "d": np.uint64}
    a = RNG.integers(0, 1 << 63, 32, dtype=np.uint64).astype(width[source[0]])
    found = evaluate(f"{opcode};", {source: a}, result, width[result[0]])
    assert np.array_equal(found, function(a))


def test_saturation_to_the_unit_interval():
    a = floats(1)
    found = evaluate("cvt.sat.f32.f32 %r20, %r1;", {"r1": a}, "r20", np.float32)
    assert np.array_equal(found, np.where(np.isnan(a), 0, np.clip(a, 0, 1)))


def test_tf32_rounds_ties_away():
    a = numbers(1, 1e30)
    found = evaluate("cvt.rna.tf32.f32 %r20, %r1;", {"r1": a}, "r20", np.uint32)
    assert np.array_equal(found, (a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000))
