"""The layout of a warp's registers.

Which register, constant or special register, seen as which type, lies in which slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.text import module as text

__all__ = ["DTYPES", "PAIRS", "WIDTHS", "RegisterFile", "Slots"]

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "bf16": np.uint16,
    "f32x2": np.float32,
    "f16x2": np.float16,
    "bf16x2": np.uint16,
    "b128": np.uint64,
}
PAIRS = {"f32x2": 64, "f16x2": 32, "bf16x2": 32}  # types of two halves, seen as 64 values, and their width
WIDTHS = {name: int(name[1:]) for name in DTYPES if name[1:].isdigit()} | PAIRS | {"pred": 1, "bf16": 16}  # bits
CONTAINERS = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}  # by width
POISON = {
    1: False,
    16: 0xFFFF,
    32: 0xFFFFFFFF,
    64: 0xFFFFFFFFFFFFFFFF,
    128: 0xFFFFFFFFFFFFFFFF,
}  # NaN in every float type
LANES = 32


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RegisterFile:
    """The registers of a warp: one array a slot, which are views of one array for all registers of a width."""

    v: list[npt.NDArray[Any]]
    pools: dict[int, npt.NDArray[Any]]


class Slots:
    """The layout of `Warp.v` for one program: which register, constant or special register, seen as which type."""

    def __init__(self) -> None:
        self.registers: dict[tuple[int, str], int] = {}
        self.constants: dict[tuple[int, str], tuple[int, npt.NDArray[Any]]] = {}
        self.specials: dict[tuple[str, str], int] = {}
        self._defined: dict[int, int] = {}
        self._free: list[RegisterFile] = []
        self.count = 0

    def defined(self, register: text.Register) -> int:
        """The slot of the shadow of a register that may be read unwritten: bool [32]."""
        if register.index not in self._defined:
            self._defined[register.index] = self._next()
        return self._defined[register.index]

    def allocate(self) -> RegisterFile:
        """The registers of one warp, new or those of one that has ended; `reset` makes them ready."""
        if self._free:
            return self._free.pop()
        v: list[Any] = [None] * self.count
        row_of: dict[int, dict[int, int]] = {}  # width -> register -> row of its pool
        for index, kind in self.registers:
            rows = row_of.setdefault(WIDTHS[kind], {})
            rows.setdefault(index, len(rows))
        pools: dict[int, npt.NDArray[Any]] = {
            width: np.empty((len(rows), 2, LANES) if width == 128 else (len(rows), LANES), CONTAINERS[width])
            for width, rows in row_of.items()
        }
        kinds = {kind for _, kind in self.registers}
        views = {kind: list(pools[WIDTHS[kind]].view(DTYPES[kind])) for kind in kinds}
        for (index, kind), slot in self.registers.items():
            v[slot] = views[kind][row_of[WIDTHS[kind]][index]]
        for slot, array in self.constants.values():
            v[slot] = array
        for slot in self._defined.values():
            v[slot] = np.empty(LANES, bool)
        return RegisterFile(v=v, pools=pools)

    def free(self, registers: RegisterFile) -> None:
        """The warp has ended: another one may have its registers."""
        self._free.append(registers)

    def reset(self, registers: RegisterFile, special: Callable[[str, str], npt.NDArray[Any]]) -> None:
        """Make a register file ready for a warp. `special(name, type)` gives special registers and addresses."""
        for width, pool in registers.pools.items():
            pool[...] = POISON[width]
        for (name, kind), slot in self.specials.items():
            registers.v[slot] = special(name, kind)
        for slot in self._defined.values():
            registers.v[slot][...] = False

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def register(self, register: text.Register, kind: str) -> int:
        """The slot of `register` seen as type `kind`."""
        key = (register.index, kind)
        if key not in self.registers:
            self.registers[key] = self._next()
        return self.registers[key]

    def constant(self, bits: int, kind: str) -> int:
        """The slot of a constant, the same in all lanes, given as a bit pattern."""
        width = WIDTHS[kind]
        bits &= (1 << width) - 1
        if (bits, kind) not in self.constants:
            if width == 128:
                halves = (bits & (1 << 64) - 1, bits >> 64)
                array = np.repeat(np.array(halves, np.uint64)[:, None], LANES, axis=1)
            else:
                array = np.full(LANES, bits, CONTAINERS[width]).view(DTYPES[kind])
            array.setflags(write=False)
            self.constants[bits, kind] = (self._next(), array)
        return self.constants[bits, kind][0]

    def special(self, name: str, kind: str) -> int:
        """The slot of a special register."""
        key = (name, kind)
        if key not in self.specials:
            self.specials[key] = self._next()
        return self.specials[key]
