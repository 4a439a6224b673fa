"""2^x without the special-function unit: x = n + f with f in [0, 1), a polynomial for 2^f, n into the exponent.

Adding 2^23 + 2^22, rounded down, leaves n = floor(x) in the low bits of the sum; the polynomial's bits plus n << 23 are
those of 2^x. Fits have the least relative error on [0, 1] among those that give 1 at 0, so that 2^n is exact.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

from . import ptx

__all__ = ["POLYNOMIALS", "exp2", "exp2_pair"]

FLOOR_BIAS = 12582912.0  # 2^23 + 2^22: floats from there on are whole numbers
SMALLEST = -127.0  # 2^x is 0 from here down
POLYNOMIALS = {  # degree: coefficients, lowest power first
    3: (1.0, 0.6951166307279139, 0.22764497750168178, 0.0770672402995397),  # relative error 8.6e-5
    4: (1.0, 0.6930451545323058, 0.24127855610191123, 0.05224537403796165, 0.013425154424560829),  # 2.9e-6
    5: (
        1.0,
        0.6931519588383223,
        0.24015952046842973,
        0.05581318300626027,
        0.009002237339021358,
        0.0018729661342873915,
    ),  # 6.7e-8 before rounding
}

Pair = tuple[Float32, Float32]


def exp2(x: Float32, degree: int = 3) -> Float32:
    """2^x of a float below 128. Not for NaN."""
    x = cute.arch.fmax(x, SMALLEST)
    shifted = ptx.add_rounded_down(x, Float32(FLOOR_BIAS))
    fraction = x - (shifted - FLOOR_BIAS)
    *rest, power = (Float32(c) for c in POLYNOMIALS[degree])
    for coefficient in reversed(rest):
        power = cute.math.fma(power, fraction, coefficient)
    return _float(_bits(power) + (_bits(shifted) << 23))


def exp2_pair(x: Pair, degree: int = 3) -> Pair:
    """2^x of two floats below 128, by packed arithmetic. Not for NaN."""
    x = tuple(cute.arch.fmax(value, SMALLEST) for value in x)
    shifted = cute.arch.add_packed_f32x2(x, _twice(FLOOR_BIAS), rnd="rm")
    whole = cute.arch.add_packed_f32x2(shifted, _twice(-FLOOR_BIAS))
    fraction = cute.arch.add_packed_f32x2(x, tuple(-value for value in whole))
    *rest, power = (_twice(c) for c in POLYNOMIALS[degree])
    for coefficient in reversed(rest):
        power = cute.arch.fma_packed_f32x2(power, fraction, coefficient)
    low, high = (_bits(p) + (_bits(s) << 23) for p, s in zip(power, shifted, strict=True))
    return _float(low), _float(high)


def _twice(value: float) -> Pair:
    return Float32(value), Float32(value)


def _bits(value: Float32) -> Int32:
    return Int32(llvm.bitcast(cutlass.Int32.mlir_type, value.ir_value()))


def _float(bits: Int32) -> Float32:
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))
