"""Floating-point arithmetic, PTX ISA 9.7.3 to 9.7.5. f32x2 operands are arrays of 64 values, otherwise 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_fa4.emulator import rounding
from jax_fa4.emulator.decode import Form, Pure, family, op
from jax_fa4.emulator.rounding import bf16_bits, bf16_value, flush, saturate

ROUNDINGS = ("rn", "rz", "rm", "rp")
Function = Callable[..., Any]


def _wrapped(function: Function, *, ftz: bool, sat: bool) -> Function:
    """`function` with subnormal inputs and results flushed, and the result clamped to [0, 1]."""
    if not ftz and not sat:
        return function

    def wrapped(*arguments):
        result = function(*(flush(x) for x in arguments)) if ftz else function(*arguments)
        if sat:
            result = saturate(result)
        return flush(result) if ftz else result

    return wrapped


def _widened(function: Function, kind: str) -> Function:
    """A float32 or float64 function on 16-bit operands, rounded once to their type."""
    if kind.startswith("bf16"):
        return lambda *arguments: bf16_bits(function(*(bf16_value(x) for x in arguments)).astype(np.float32))
    return lambda *arguments: function(*(x.astype(np.float64) for x in arguments)).astype(np.float16)


def _half_value(x):
    return x.astype(np.float32)


WIDEN: dict[str, Function] = {"bf16": bf16_value, "f16": _half_value}


def _mixed(function: Function, widen: Function) -> Function:
    """A float32 function whose operands but the last are 16 bit."""
    return lambda *arguments: function(*(widen(x) for x in arguments[:-1]), arguments[-1])


def _arithmetic(form: Form, function: Callable[[str, str], Function], count: int) -> Pure:
    """Decode `op[.rnd][.ftz][.sat].type d, a, ...`; `function(mode, type)` gives what to compute."""
    mode = form.take(*ROUNDINGS, default="rn")
    ftz, sat, relu = form.has("ftz"), form.has("sat"), form.has("relu")
    types = form.types()
    form.end()
    kind = types[0]
    if kind not in ("f32", "f64", "f32x2", "f16", "bf16", "f16x2", "bf16x2"):
        raise form.unknown(f"has unknown type {kind}")
    compute = function(mode, kind)
    if kind[0] == "b" or kind.startswith("f16"):
        compute = _widened(compute, kind)
    if kind[0] != "b":
        compute = _wrapped(compute, ftz=ftz, sat=sat)
    if relu:
        raise form.unknown("with .relu is not implemented")
    narrow = types[1:] or [kind]
    if kind == "f32" and narrow[0] in WIDEN:
        compute = _mixed(compute, WIDEN[narrow[0]])
        inputs = [form.src(1 + i, narrow[0]) for i in range(count - 1)] + [form.src(count, "f32")]
    else:
        inputs = [form.src(1 + i, kind) for i in range(count)]
    return form.pure(compute, [(form.dst(0, kind), kind)], inputs)


def _binary(function: Any) -> Callable[[str, str], Function]:
    return lambda mode, kind: rounding.directed(function, mode) if kind in ("f32", "f32x2") else function


def _fma(mode: str, kind: str) -> Function:
    if kind in ("f32", "f32x2"):
        return rounding.fma if mode == "rn" else lambda a, b, c: rounding.fma(a, b, c, mode)
    return lambda a, b, c: a * b + c


@family("add")
def add(form: Form) -> Pure:
    return _arithmetic(form, _binary(np.add), 2)


@family("sub")
def sub(form: Form) -> Pure:
    return _arithmetic(form, _binary(np.subtract), 2)


@family("mul")
def mul(form: Form) -> Pure:
    return _arithmetic(form, _binary(np.multiply), 2)


@family("fma", "mad")
def fma(form: Form) -> Pure:
    return _arithmetic(form, _fma, 3)


@family("div")
def div(form: Form) -> Pure:
    form.take("approx", "full", default="rn")
    return _arithmetic(form, lambda mode, kind: np.divide, 2)


def _maximum(a, b):
    """The larger one; a NaN is ignored, +0 is larger than -0."""
    result = np.fmax(a, b)
    return result if result.all() else np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), result)


def _minimum(a, b):
    result = np.fmin(a, b)
    return result if result.all() else np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), result)


def _extremum(form: Form, choose: Function) -> Pure:
    propagates, signs, ftz, form_abs = form.has("NaN"), form.has("xorsign"), form.has("ftz"), form.has("abs")
    (kind,) = form.types()
    form.end()
    count = len(form.operands) - 1

    def compute(*arguments):
        chosen = arguments
        if form_abs:
            chosen = tuple(np.abs(x) for x in arguments)
        result = chosen[0]
        for other in chosen[1:]:
            result = choose(result, other)
        if propagates:
            is_nan = np.isnan(arguments[0])
            for other in arguments[1:]:
                is_nan = is_nan | np.isnan(other)
            result = np.where(is_nan, np.float32(np.nan), result)
        if signs:
            result = np.copysign(result, np.copysign(1, arguments[0]) * np.copysign(1, arguments[1]))
        return result

    function: Function = choose if not (propagates or signs or form_abs) and count == 2 else compute
    if kind.startswith("bf16"):
        function = _widened(function, kind)
    function = _wrapped(function, ftz=ftz, sat=False)
    return form.pure(function, [(form.dst(0, kind), kind)], [form.src(1 + i, kind) for i in range(count)])


@family("max")
def maximum(form: Form) -> Pure:
    return _extremum(form, _maximum)


@family("min")
def minimum(form: Form) -> Pure:
    return _extremum(form, _minimum)


op("neg.{f32,f64,f16}", "$1 = $1")(np.negative)
op("abs.{f32,f64,f16}", "$1 = $1")(np.absolute)


@op("neg.ftz.f32", "f32 = f32")
def neg_ftz(a):
    return flush(-a)


@op("abs.ftz.f32", "f32 = f32")
def abs_ftz(a):
    return flush(np.abs(a))


@op("neg.{bf16,bf16x2,f16x2}", "$1 = $1")
def neg_packed(a):
    return (a.view(np.uint16) ^ np.uint16(0x8000)).view(a.dtype)


@op("abs.{bf16,bf16x2,f16x2}", "$1 = $1")
def abs_packed(a):
    return (a.view(np.uint16) & np.uint16(0x7FFF)).view(a.dtype)


@op("copysign.{f32,f64}", "$1 = $1 $1")
def copysign(a, b):
    """The magnitude of b with the sign of a."""
    return np.copysign(b, a)


op("testp.finite.f32", "pred = f32")(np.isfinite)
op("testp.infinite.f32", "pred = f32")(np.isinf)
op("testp.notanumber.f32", "pred = f32")(np.isnan)


@op("testp.number.f32", "pred = f32")
def testp_number(a):
    return ~np.isnan(a)


def _exp2(a):
    return np.exp2(a.astype(np.float64)).astype(np.float32)


def _log2(a):
    return np.log2(a.astype(np.float64)).astype(np.float32)


def _tanh(a):
    return np.tanh(a.astype(np.float64)).astype(np.float32)


def _rsqrt(a):
    return (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)


def _reciprocal(a):
    return np.reciprocal(a)


UNARY: dict[str, Function] = {
    "ex2": _exp2,
    "lg2": _log2,
    "tanh": _tanh,
    "rsqrt": _rsqrt,
    "rcp": _reciprocal,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
}


def _unary(form: Form) -> Pure:
    """The approximations: computed in double precision and rounded, within every documented error bound."""
    function: Function = UNARY[form.instruction.opcode.partition(".")[0]]
    form.take("approx", *ROUNDINGS)
    ftz = form.has("ftz")
    (kind,) = form.types()
    form.end()
    if kind.startswith(("f16", "bf16")):
        plain = function
        function = _widened(lambda a: plain(a.astype(np.float32)), kind)
    elif kind != "f32":
        raise form.unknown(f"has unknown type {kind}")
    else:
        function = _wrapped(function, ftz=ftz, sat=False)
    return form.pure(function, [(form.dst(0, kind), kind)], [form.src(1, kind)])


for _name in UNARY:
    family(_name)(_unary)
