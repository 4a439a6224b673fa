"""Vector operands of 32-bit registers, moved as one array: a warp's registers of one width are rows of one block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.state import Warp

__all__ = ["RegisterVector"]


class RegisterVector:
    """The registers (slots of any 32-bit type) of an operand such as {%r1, %r2, ...}."""

    __slots__ = ("_rows", "_slots")

    def __init__(self, slots: Sequence[int]):
        self._slots = tuple(slots)
        self._rows: npt.NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def read(self, warp: Warp) -> npt.NDArray[np.uint32]:
        """Bit patterns [registers, lanes]; literals among the operands are fine."""
        block = self._block(warp)
        if block is None:
            return np.stack([warp.v[slot].view(np.uint32) for slot in self._slots])
        return block[self._rows]

    def write(self, warp: Warp, values: npt.NDArray[np.uint32]) -> None:
        """Set all lanes of all registers to bit patterns [registers, lanes]."""
        block = self._block(warp)
        assert block is not None  # destinations are registers
        block[self._rows] = values

    def _block(self, warp: Warp) -> npt.NDArray[np.uint32] | None:
        """The array that the registers are rows of; None if some are not registers but literals."""
        block = warp.v[self._slots[0]].base
        if self._rows is None:
            arrays = [warp.v[slot] for slot in self._slots]
            if block is None or any(array.base is not block for array in arrays):
                return None
            start, pitch = block.ctypes.data, block.strides[0]
            self._rows = np.array([(array.ctypes.data - start) // pitch for array in arrays])
        return block
