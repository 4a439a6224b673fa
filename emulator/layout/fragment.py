"""Register fragments of wgmma, PTX ISA 9.7.15.5: which thread of the warpgroup holds which element in which register.

Arrays of registers are uint32 [warp, register, lane]; the element order inside a register is little-endian.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.layout.matrix import K_BYTES

__all__ = [
    "Coordinates",
    "a_coordinates",
    "accumulator_coordinates",
    "gather_a",
    "gather_accumulator",
    "scatter_accumulator",
]

ROWS = 64  # of one wgmma: 16 a warp
WARPS, LANES = 4, 32


class Coordinates(NamedTuple):
    """Row and column of each element: int64 [warp, register, lane, element of the register]."""

    row: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]


def _axes(registers: int, elements: int) -> tuple[npt.NDArray[np.int64], ...]:
    return tuple(np.ogrid[:WARPS, :registers, :LANES, :elements])


def _read_only(row: npt.NDArray[np.int64], column: npt.NDArray[np.int64]) -> Coordinates:
    coordinates = Coordinates(*(np.array(a) for a in np.broadcast_arrays(row, column)))
    for array in coordinates:
        array.flags.writeable = False
    return coordinates


@functools.cache
def accumulator_coordinates(n: int, element_bytes: int) -> Coordinates:
    """Fragment D of m64nN: N/2 registers of one 4-byte element, or N/4 registers of two float16.

    A lane holds pairs of neighbouring columns; pairs of rows 8 apart take turns.
    """
    per_register = 4 // element_bytes
    warp, register, lane, element = _axes(n // 2 // per_register, per_register)
    pair, in_pair = (register >> 1, register & 1) if element_bytes == 4 else (register, element)
    return _read_only(16 * warp + lane // 4 + 8 * (pair & 1), 8 * (pair >> 1) + 2 * (lane % 4) + in_pair)


@functools.cache
def a_coordinates(element_bytes: int) -> Coordinates:
    """Fragment A of one wgmma: 4 registers; column counts K. A lane holds 4 bytes of a row at a time."""
    per_register = 4 // element_bytes
    warp, register, lane, element = _axes(4, per_register)
    row = 16 * warp + lane // 4 + 8 * (register & 1)
    return _read_only(row, per_register * (lane % 4 + 4 * (register >> 1)) + element)


@functools.cache
def _places(kind: str, columns: int, element_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Flat matrix index of each register element, and the inverse."""
    coordinates = a_coordinates(element_bytes) if kind == "a" else accumulator_coordinates(columns, element_bytes)
    places = (coordinates.row * columns + coordinates.column).reshape(-1)
    return places, np.argsort(places)


def _gather(registers: npt.NDArray[np.uint32], kind: str, columns: int, bits: npt.DTypeLike) -> npt.NDArray:
    values = np.ascontiguousarray(registers).reshape(-1).view(bits)
    return values.take(_places(kind, columns, values.itemsize)[1]).reshape(ROWS, columns)


def gather_accumulator(registers: npt.NDArray[np.uint32], n: int, bits: npt.DTypeLike) -> npt.NDArray:
    """The matrix [64, n] of element bit patterns (dtype `bits`) that the fragments D of a warpgroup hold."""
    return _gather(registers, "d", n, bits)


def scatter_accumulator(matrix: npt.NDArray) -> npt.NDArray[np.uint32]:
    """The inverse: uint32 [warp, register, lane] of a matrix [64, n]."""
    places, _ = _places("d", matrix.shape[1], matrix.itemsize)
    return np.ascontiguousarray(matrix).reshape(-1).take(places).view(np.uint32).reshape(WARPS, -1, LANES)


def gather_a(registers: npt.NDArray[np.uint32], bits: npt.DTypeLike) -> npt.NDArray:
    """The matrix [64, K] of element bit patterns (dtype `bits`) that the fragments A of a warpgroup hold."""
    return _gather(registers, "a", K_BYTES // np.dtype(bits).itemsize, bits)
