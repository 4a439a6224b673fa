"""The 32-bit instruction descriptor of tcgen05.mma, PTX ISA 9.7.16.4.2: shape, types, majors and signs of one MMA."""

from __future__ import annotations

import dataclasses
import functools

from jax_fa4.emulator.layout.number import BF16, E4M3, E5M2, F16, TF32, Format

__all__ = ["InstructionDescriptor", "decode"]

OPERANDS: dict[str, dict[int, Format]] = {
    "f16": {0: F16, 1: BF16},
    "tf32": {2: TF32},
    "f8f6f4": {0: E4M3, 1: E5M2},
}
UNMODELLED_OPERANDS = {"f8f6f4": {3: "e2m3", 4: "e3m2", 5: "e2m1"}}
ACCUMULATORS = {0: "f16", 1: "f32"}
RESERVED_BITS = (0, 1, 2, 3, 6, 23, 29, 30, 31)  # among them sparsity, saturation of i8, and .ws
ROWS = {1: (64, 128), 2: (128, 256)}  # M by cta_group
MAX_COLUMNS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionDescriptor:
    """One D[m, n] (+)= A[m, K] B[n, K] of a CTA or a CTA pair."""

    m: int
    n: int
    a: Format
    b: Format
    accumulator: str  # f32 or f16
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool


def _operand(kind: str, code: int, name: str) -> Format:
    if code in UNMODELLED_OPERANDS.get(kind, {}):
        raise ValueError(f"operand {name} has type {UNMODELLED_OPERANDS[kind][code]}, which is not modelled")
    if code not in OPERANDS[kind]:
        raise ValueError(f"operand {name} has type code {code}, kind::{kind} takes {sorted(OPERANDS[kind])}")
    return OPERANDS[kind][code]


def _check_shape(d: InstructionDescriptor, cta_group: int) -> None:
    if d.m not in ROWS[cta_group]:
        raise ValueError(f"M is {d.m}, cta_group::{cta_group} takes {ROWS[cta_group]}")
    step = 8 if d.m == 64 else 16  # texts differ on 8 for M = 128: the stricter one
    if d.b_mn_major and d.b.element_bytes == 1:
        step = 16 * cta_group
    if not step <= d.n <= MAX_COLUMNS or d.n % step:
        raise ValueError(f"N is {d.n}, a multiple of {step} from {step} to {MAX_COLUMNS} is legal here")


@functools.cache
def decode(bits: int, kind: str, cta_group: int) -> InstructionDescriptor:
    """The fields of a descriptor for `kind` f16, tf32 or f8f6f4. Raises ValueError for what the kind doesn't allow."""
    for bit in RESERVED_BITS:
        if bits >> bit & 1:
            raise ValueError(f"instruction descriptor {bits:#010x} has bit {bit} set, kind::{kind} needs 0")
    code = bits >> 4 & 3
    if code not in ACCUMULATORS or (kind == "tf32" and code == 0):
        raise ValueError(f"instruction descriptor {bits:#010x} has accumulator code {code}, not legal for kind::{kind}")
    descriptor = InstructionDescriptor(
        m=(bits >> 24 & 31) << 4,
        n=(bits >> 17 & 63) << 3,
        a=_operand(kind, bits >> 7 & 7, "A"),
        b=_operand(kind, bits >> 10 & 7, "B"),
        accumulator=ACCUMULATORS[code],
        negate_a=bool(bits >> 13 & 1),
        negate_b=bool(bits >> 14 & 1),
        a_mn_major=bool(bits >> 15 & 1),
        b_mn_major=bool(bits >> 16 & 1),
    )
    _check_shape(descriptor, cta_group)
    return descriptor
