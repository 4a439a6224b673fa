"""Conversions, PTX ISA 9.7.9.21 (`cvt`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_fa4.emulator import rounding
from jax_fa4.emulator.decode import Form, Pure, family
from jax_fa4.emulator.rounding import bf16_bits, bf16_value, flush, saturate

INTEGER_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOAT_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
PACKED = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")
INTEGER = re.compile(r"[us](8|16|32|64)$")
INTEGER_DTYPE = {f"{k}{n}": np.dtype(f"{'u' if k == 'u' else 'i'}{n // 8}") for k in "us" for n in (8, 16, 32, 64)}
MAXIMUM = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "e4m3": 448.0, "e5m2": 57344.0}
FLOAT8 = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # exponent bits, fraction bits, bias

Function = Callable[..., Any]


def float8_bits(x, name: str):
    """float32 to 8-bit patterns: to nearest even, larger magnitudes clamp to the largest finite, NaN is 0x7F."""
    _, fraction_bits, bias = FLOAT8[name]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), MAXIMUM[name])
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, 1 - bias), 1 - bias)
    steps = np.rint(np.ldexp(magnitude, fraction_bits - exponent)).astype(np.int64)  # 2**fraction_bits and up if normal
    code = (exponent + bias - 1 << fraction_bits) + steps  # a carry into the exponent comes out right
    code = np.minimum(code, 0x7E if name == "e4m3" else 0x7B)
    return np.where(np.isnan(x), 0x7F, code | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def float8_value(bits, name: str):
    """8-bit patterns as float32, exactly."""
    exponent_bits, fraction_bits, bias = FLOAT8[name]
    code = bits.astype(np.int64)
    exponent, fraction = code >> fraction_bits & (1 << exponent_bits) - 1, code & (1 << fraction_bits) - 1
    value = np.where(
        exponent == 0,
        np.ldexp(fraction.astype(np.float64), 1 - bias - fraction_bits),
        np.ldexp(1 + fraction / (1 << fraction_bits), exponent - bias),
    )
    top = exponent == (1 << exponent_bits) - 1
    if name == "e4m3":
        value = np.where(top & (fraction == 7), np.nan, value)
    else:
        value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
    return np.where(code >> 7 & 1, -value, value).astype(np.float32)


def _to_half(x, name: str, *, satfinite: bool, relu: bool, mode: str):
    """float32 to f16 or bf16 patterns."""
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))
    if satfinite:
        x = np.where(np.isnan(x), x, np.clip(x, -MAXIMUM[name], MAXIMUM[name])).astype(np.float32)
    if mode == "rz":
        x = _cut(x, name)
    if name == "bf16":
        return bf16_bits(x)
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def _cut(x, name: str):
    """Towards zero to what the 16-bit type can hold."""
    if name == "bf16":
        return np.where(np.isnan(x), x, (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
    y = x.astype(np.float16)
    too_far = np.abs(y.astype(np.float32)) > np.abs(x)
    return np.where(too_far, np.nextafter(y, np.float16(0)), y).astype(np.float32)


def _to_tf32(x):
    """10 fraction bits, ties away from zero; infinities and NaN lose the other bits, so that a NaN may end as one."""
    bits = x.view(np.uint32)
    return np.where(np.isfinite(x), bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)


def _to_integer(x, kind: str):
    """Already integral floats, clamped to the type; NaN is 0 (64 bit: 1 << 63)."""
    limits = np.iinfo(INTEGER_DTYPE[kind])
    wide = x.astype(np.float64)
    inside = np.where(np.isnan(wide) | (wide < float(limits.min)) | (wide >= float(limits.max)), 0.0, wide)
    value = inside.astype(INTEGER_DTYPE[kind])
    value = np.where(wide >= float(limits.max), limits.max, np.where(wide < float(limits.min), limits.min, value))
    nan_value = np.array(1 << 63, np.uint64).astype(INTEGER_DTYPE[kind]) if limits.bits == 64 else 0
    return np.where(np.isnan(wide), nan_value, value).astype(INTEGER_DTYPE[kind])


def _register_type(kind: str) -> str:
    """How a type lies in a register: 8-bit integers in 16 bits."""
    return {"u8": "u16", "s8": "s16", "tf32": "b32", "e4m3x2": "b16", "e5m2x2": "b16"}.get(kind, kind)


@family("cvt")
def cvt(form: Form) -> Pure:
    """`cvt[.rounding][.ftz][.sat][.satfinite][.relu].D.S d, a[, b]`."""
    types = form.types()
    if len(types) == 2 and types[0] in PACKED:
        return _packed(form, *types)
    target, source = types
    integer_mode = form.take(*INTEGER_ROUNDINGS, default="none")
    mode = form.take(*FLOAT_ROUNDINGS, default="rn")
    ftz, sat = form.has("ftz"), form.has("sat")
    satfinite, relu = form.has("satfinite"), form.has("relu")
    form.end()
    load = _loader(source)
    if INTEGER.match(target):
        function = _integer_target(form, target, source, integer_mode, sat)
    else:
        function = _float_target(form, target, source, integer_mode, mode, satfinite=satfinite, relu=relu)

    def convert(a):
        value = load(a)
        if ftz and value.dtype == np.float32:
            value = flush(value)
        value = function(value)
        if sat and value.dtype.kind == "f":
            value = saturate(value)
        return flush(value) if ftz and value.dtype == np.float32 else value

    output = _destination(form, target)
    return form.pure(convert, [(form.dst(0, output), output)], [form.src(1, _source_type(form, source))])


def _loader(source: str) -> Function:
    """From register contents to values."""
    if source in ("u8", "s8"):
        dtype = INTEGER_DTYPE[source]
        return lambda a: a.astype(np.uint8).view(dtype)
    if source == "bf16":
        return bf16_value
    if source in ("u16", "s16", "u32", "s32", "u64", "s64"):
        dtype = INTEGER_DTYPE[source]
        return lambda a: a.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)
    return lambda a: a


def _width(form: Form, index: int) -> int | None:
    return getattr(form.operands[index], "width", None)


def _source_type(form: Form, source: str) -> str:
    """Integer sources may lie in wider registers."""
    kind = _register_type(source)
    width = _width(form, 1)
    return f"u{width}" if INTEGER.match(source) and width is not None and f"u{width}" != kind else kind


def _destination(form: Form, target: str) -> str:
    """Integer results may go to wider registers, extended by their sign."""
    kind = _register_type(target)
    width = _width(form, 0)
    return f"{target[0]}{width}" if INTEGER.match(target) and width is not None else kind


def _integer_target(form: Form, target: str, source: str, mode: str, sat: bool) -> Function:
    dtype = INTEGER_DTYPE[target]
    if INTEGER.match(source):
        if not sat:
            return lambda x: x.astype(dtype)
        limits = np.iinfo(dtype)
        return lambda x: np.array([min(max(int(v), limits.min), limits.max) for v in x]).astype(dtype)
    if mode == "none":
        raise form.unknown("needs an integer rounding mode")
    rounded = INTEGER_ROUNDINGS[mode]
    return lambda x: _to_integer(rounded(x.astype(np.float64)), target)


def _float_target(
    form: Form, target: str, source: str, integer_mode: str, mode: str, *, satfinite: bool, relu: bool
) -> Function:
    if target == "tf32":
        return _to_tf32
    if integer_mode != "none":
        if target != source:
            raise form.unknown("rounds to an integer between different types")
        return INTEGER_ROUNDINGS[integer_mode]
    if target in ("f16", "bf16"):
        if target == "f16" and source == "f16":
            return lambda x: x
        name = target
        as_register = (lambda bits: bits.view(np.float16)) if target == "f16" else (lambda bits: bits)
        return lambda x: as_register(_to_half(x.astype(np.float32), name, satfinite=satfinite, relu=relu, mode=mode))
    if target == "f64":
        return lambda x: x.astype(np.float64)
    if target != "f32":
        raise form.unknown(f"converts to unknown type {target}")
    if source in ("f32", "f16", "bf16"):
        return lambda x: x.astype(np.float32)
    return lambda x: _round_wide(x, mode)


def _round_wide(x, mode: str):
    """Integers and doubles to float32 with a rounding mode."""
    s = x.astype(np.float64)
    if x.dtype.itemsize == 8 and x.dtype.kind in "iu":
        error = np.array([float(int(v) - int(w)) if np.isfinite(w) else 0.0 for v, w in zip(x, s, strict=True)])
    else:
        error = np.zeros_like(s)
    return rounding.to_float32(s, error, mode)


def _packed(form: Form, target: str, source: str) -> Pure:
    """Two values into one register: the first source goes to the upper half."""
    mode = form.take(*FLOAT_ROUNDINGS, default="rn")
    satfinite, relu = form.has("satfinite"), form.has("relu")
    form.drop("ftz")
    form.end()
    half = target[:-2]
    if source == "f32":
        inputs = [form.src(1, "f32"), form.src(2, "f32")]
        if half in FLOAT8:

            def to_float8(a, b):
                high, low = (np.where(x > 0, x, np.where(np.isnan(x), x, 0)) if relu else x for x in (a, b))
                return float8_bits(high, half).astype(np.uint16) << 8 | float8_bits(low, half)

            return form.pure(to_float8, [(form.dst(0, "b16"), "b16")], inputs)

        def to_half(a, b):
            both = np.concatenate((a, b))
            bits = _to_half(both, half, satfinite=satfinite, relu=relu, mode=mode).astype(np.uint32)
            return bits[:32] << np.uint32(16) | bits[32:]

        return form.pure(to_half, [(form.dst(0, "b32"), "b32")], inputs)
    if source[:-2] in FLOAT8 and half in ("f16", "bf16"):

        def from_float8(a):
            high, low = float8_value(a >> 8, source[:-2]), float8_value(a & 0xFF, source[:-2])
            both = np.concatenate((high, low))
            bits = _to_half(both, half, satfinite=False, relu=relu, mode="rn").astype(np.uint32)
            return bits[:32] << np.uint32(16) | bits[32:]

        return form.pure(from_float8, [(form.dst(0, "b32"), "b32")], [form.src(1, "b16")])
    if source in ("f16x2", "bf16x2") and half in FLOAT8:

        def halves_to_float8(a):
            halves = bf16_value(a) if source == "bf16x2" else a.astype(np.float32)
            if relu:
                halves = np.where(halves > 0, halves, np.where(np.isnan(halves), halves, 0))
            bits = float8_bits(halves, half).astype(np.uint16)
            return bits[1::2] << 8 | bits[::2]

        return form.pure(halves_to_float8, [(form.dst(0, "b16"), "b16")], [form.src(1, source)])
    raise form.unknown("is not implemented")
