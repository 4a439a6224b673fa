"""Instructions for which the DSL's own form doesn't do, one a function."""

from cutlass import BFloat16, Float32, Int32, Numeric
from cutlass._mlir.dialects import llvm

__all__ = ["cvt_pair"]


def cvt_pair(dtype: type[Numeric], low: Float32, high: Float32) -> Int32:
    """cvt.rn.{bf16x2,f16x2}.f32: two floats rounded to 16 bit, `low` in the lower half (PTX ISA, cvt).

    Volatile: the compiler would else carry 32-bit weights through a loop and convert them late, at twice the registers.
    """
    form = "bf16x2" if dtype is BFloat16 else "f16x2"
    packed = llvm.inline_asm(
        Int32.mlir_type,
        [high.ir_value(), low.ir_value()],
        f"cvt.rn.{form}.f32 $0, $1, $2;",
        "=r,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(packed)
