"""Number formats of matrix operands: bit patterns -> float32, which holds every value of each of them exactly."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

__all__ = ["BF16", "E4M3", "E5M2", "F16", "F32", "FORMATS", "S8", "TF32", "U8", "Format", "encode_bf16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One element type as an MMA reads it from registers, shared or tensor memory."""

    name: str  # as PTX spells it
    element_bytes: int
    min_exponent: int = 0  # of normal numbers; unused by integers
    is_integer: bool = False

    @property
    def bits_dtype(self) -> np.dtype:
        """Unsigned integers that hold the bit patterns."""
        return np.dtype(f"u{self.element_bytes}")

    def decode(self, bits: npt.NDArray) -> npt.NDArray[np.float32]:
        """Values of bit patterns, any shape; NaN and infinities stay what they are."""
        return _DECODERS[self.name](bits)


@functools.cache
def _byte_values(name: str) -> npt.NDArray[np.float32]:
    """All 256 values of an 8-bit type; e4m3 has no infinity and one NaN of each sign."""
    bits = np.arange(256)
    if name == "e5m2":
        return (bits << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, magnitude, -magnitude).astype(np.float32)


_DECODERS = {
    "f32": lambda bits: bits.view(np.float32),
    "tf32": lambda bits: (bits & np.uint32(0xFFFFE000)).view(np.float32),  # the low 13 bits are dropped
    "bf16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
    "f16": lambda bits: bits.view(np.float16).astype(np.float32),
    "e4m3": lambda bits: _byte_values("e4m3")[bits],
    "e5m2": lambda bits: _byte_values("e5m2")[bits],
    "s8": lambda bits: bits.view(np.int8).astype(np.float32),
    "u8": lambda bits: bits.astype(np.float32),
}

F32 = Format(name="f32", element_bytes=4, min_exponent=-126)
TF32 = Format(name="tf32", element_bytes=4, min_exponent=-126)
BF16 = Format(name="bf16", element_bytes=2, min_exponent=-126)
F16 = Format(name="f16", element_bytes=2, min_exponent=-14)
E4M3 = Format(name="e4m3", element_bytes=1, min_exponent=-6)
E5M2 = Format(name="e5m2", element_bytes=1, min_exponent=-14)
S8 = Format(name="s8", element_bytes=1, is_integer=True)
U8 = Format(name="u8", element_bytes=1, is_integer=True)
FORMATS = {f.name: f for f in (F32, TF32, BF16, F16, E4M3, E5M2, S8, U8)}


def encode_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even; NaN becomes 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)
