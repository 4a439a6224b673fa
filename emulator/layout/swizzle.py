"""Shared-memory swizzles, PTX ISA 5.5: an exclusive-or of address bits that spreads a tile's rows over the banks."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

__all__ = [
    "B32",
    "B64",
    "B128",
    "B128_ATOM_32B",
    "B128_ATOM_32B_FLIP_8B",
    "B128_ATOM_64B",
    "NONE",
    "Addresses",
    "Swizzle",
]

Addresses = npt.NDArray[np.int64]  # bytes from the start of a CTA's shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swizzle:
    """`bits` address bits from bit 7 upwards are xor-ed onto as many bits from bit `base` upwards.

    The address is the absolute one inside the CTA's shared memory, so a tile may start anywhere inside the pattern.
    """

    span_bytes: int  # length of the rows that the pattern is made for; 16 where there is none
    bits: int
    base: int = 4
    flips_8_bytes: bool = False  # also bit 3 ^= bit 7

    @property
    def period_bytes(self) -> int:
        """Distance after which the pattern repeats."""
        return 128 << self.bits if self.bits else self.span_bytes

    def __call__(self, address: Addresses) -> Addresses:
        """The place in memory of the byte whose unswizzled address is given; its own inverse."""
        if not self.bits:
            return address
        moved = address ^ ((address >> 7 & ((1 << self.bits) - 1)) << self.base)
        return moved ^ (address >> 7 & 1) << 3 if self.flips_8_bytes else moved


NONE = Swizzle(span_bytes=16, bits=0)
B32 = Swizzle(span_bytes=32, bits=1)
B64 = Swizzle(span_bytes=64, bits=2)
B128 = Swizzle(span_bytes=128, bits=3)
B128_ATOM_32B = Swizzle(span_bytes=128, bits=2, base=5)
B128_ATOM_32B_FLIP_8B = Swizzle(span_bytes=128, bits=2, base=5, flips_8_bytes=True)
B128_ATOM_64B = Swizzle(span_bytes=128, bits=1, base=6)

BY_NAME = {
    "none": NONE,
    "32B": B32,
    "64B": B64,
    "128B": B128,
    "128B_ATOM_32B": B128_ATOM_32B,
    "128B_ATOM_32B_FLIP_8B": B128_ATOM_32B_FLIP_8B,
    "128B_ATOM_64B": B128_ATOM_64B,
}


def by_name(name: str) -> Swizzle:
    """The mode that a launch names."""
    return BY_NAME[name]
