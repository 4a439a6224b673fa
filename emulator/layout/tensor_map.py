"""Tensor maps and the boxes that TMA copies: index maps. CUDA driver API `cuTensorMapEncodeTiled`, PTX ISA 5.5.

Dimension 0 is the innermost one here; numpy arrays of a box are indexed outermost first, [i4, i3, i2, i1, i0].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jax_fa4.emulator.layout import swizzle
from jax_fa4.emulator.layout.swizzle import Addresses, Swizzle

__all__ = ["ELEMENT_BYTES", "Clip", "TensorMap"]

ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "tf32": 4,
}  # fmt: skip
FLOATS = ("f16", "bf16", "f32", "f64", "tf32")
NAN_FILL = 0x7FF7  # of each 16 bits, for every type: what an H200 writes
MAX_BOX, MAX_ELEMENT_STRIDE = 256, 8
MAX_STRIDE = 1 << 40
UNIT_BYTES = 8
PERIOD = 1024  # bytes after which every swizzle repeats


class Clip(NamedTuple):
    """The part of a box that lies inside the tensor, and where it is in global memory."""

    inside: tuple[slice, ...]  # of the box, outermost first
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    address: int  # of its first element


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor in global memory and how boxes of it are copied. Innermost first. Raises ValueError if illegal."""

    address: int  # of element 0, in the emulated global memory
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all but the innermost dimension
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()  # () means 1 everywhere
    swizzle: Swizzle = swizzle.NONE
    fills_nan: bool = False  # what loads write for elements outside the tensor, instead of 0

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * self.rank)
        for ok, message in self._rules():
            if not ok:
                raise ValueError(f"tensor map: {message}")

    def _rules(self) -> list[tuple[bool, str]]:
        """(holds, what to say otherwise), from the driver's documentation."""
        inner_bytes = self.box[0] * self.element_bytes
        limit = self.swizzle.span_bytes if self.swizzle is not swizzle.NONE else MAX_BOX * 8
        lists = {"strides": len(self.strides) + 1, "box": len(self.box), "element_strides": len(self.element_strides)}
        return [
            (1 <= self.rank <= 5, f"rank is {self.rank}, 1 to 5 are legal"),
            *((length == self.rank, f"{name} doesn't fit rank {self.rank}") for name, length in lists.items()),
            (self.address % 16 == 0, f"address {self.address:#x} is not a multiple of 16"),
            (all(1 <= d <= 1 << 32 for d in self.dims), f"dims {self.dims} must be in 1 .. 2**32"),
            (
                all(s % 16 == 0 and 0 <= s < MAX_STRIDE for s in self.strides),
                f"strides {self.strides} must be multiples of 16 bytes below 2**40",
            ),
            (all(1 <= b <= MAX_BOX for b in self.box), f"box {self.box} must be in 1 .. {MAX_BOX}"),
            (
                all(1 <= s <= MAX_ELEMENT_STRIDE for s in self.element_strides),
                f"element strides {self.element_strides} must be in 1 .. {MAX_ELEMENT_STRIDE}",
            ),
            (inner_bytes % 16 == 0, f"inner box of {inner_bytes} bytes is not a multiple of 16"),
            (inner_bytes <= limit, f"inner box of {inner_bytes} bytes exceeds the swizzle's span of {limit}"),
            (
                self.swizzle is swizzle.NONE or inner_bytes == limit,
                f"inner box of {inner_bytes} bytes is below the swizzle's span of {limit}: its pitch is undocumented",
            ),
            (not self.fills_nan or self.dtype in FLOATS, f"NaN fill is for floats, not for {self.dtype}"),
        ]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        """Size of one element."""
        return ELEMENT_BYTES[self.dtype]

    @functools.cached_property
    def box_shape(self) -> tuple[int, ...]:
        """Elements that one copy moves per dimension, outermost first: ceil(box / element stride)."""
        strides = (1, *self.element_strides[1:])
        return tuple(-(-b // s) for b, s in zip(self.box, strides, strict=True))[::-1]

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes of a copy in shared memory, all of which it signals to an mbarrier, also where it is out of bounds."""
        return int(np.prod(self.box_shape)) * self.element_bytes

    @property
    def fill(self) -> int:
        """Bit pattern of the elements that loads find outside the tensor."""
        return int(f"{NAN_FILL:04X}" * (self.element_bytes // 2), 16) if self.fills_nan else 0

    def clip(self, coordinates: tuple[int, ...]) -> Clip | None:
        """The elements inside the tensor of the box that starts at `coordinates`, anywhere; None if there are none."""
        steps = (1, *self.element_strides[1:])
        strides = (self.element_bytes, *self.strides)
        inside, address = [], self.address
        for start, step, dim, count, stride in zip(
            coordinates, steps, self.dims, self.box_shape[::-1], strides, strict=True
        ):
            first = max(0, -(start // step))  # the least i with start + i * step >= 0
            end = min(count, -((start - dim) // step))  # the least i with start + i * step >= dim
            if first >= end:
                return None
            inside.append(slice(first, end))
            address += (start + first * step) * stride
        return Clip(
            tuple(inside[::-1]),
            tuple(part.stop - part.start for part in inside[::-1]),
            tuple(step * stride for step, stride in zip(steps, strides, strict=True))[::-1],
            address,
        )

    def units(self, start: int) -> Addresses:
        """Where a box at shared offset `start` lies: numbers of 8-byte units, in the order of the box's bytes.

        No swizzle moves less than that.
        """
        base = start % PERIOD
        return _units(self.box_bytes, base, self.swizzle) + (start - base) // UNIT_BYTES


@functools.lru_cache(maxsize=256)
def _units(size: int, start: int, mode: Swizzle) -> Addresses:
    return mode(start + np.arange(0, size, UNIT_BYTES, dtype=np.int64)) // UNIT_BYTES
