"""Memories: global, shared, local, parameters, and the generic address space.

Each checks bounds and alignment of what it is asked for.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.order import Clock, Clocks, Shadow

__all__ = [
    "DYNAMIC_SMEM_OFFSET",
    "LOCAL_WINDOW",
    "PARAM_WINDOW",
    "SHARED_WINDOW",
    "GlobalBuffer",
    "GlobalMemory",
    "LocalMemory",
    "SharedMemory",
]

DYNAMIC_SMEM_OFFSET = 0x400  # the first KB of a CTA's shared memory is the system's
SMEM_LIMIT = 227 * 1024  # dynamic bytes a CTA may have, sm_90 and sm_100
SHARED_WINDOW = 0x7A00_0000_0000  # generic address of shared address 0
LOCAL_WINDOW = 0x7B00_0000_0000
PARAM_WINDOW = 0x7C00_0000_0000
CELL_BYTES = 4  # of shadow memory
GLOBAL_BASE = 0x7F00_0000_0000
GLOBAL_GUARD = 1 << 20  # bytes between buffers that belong to none

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Addresses = npt.NDArray[np.uint64]


def check_alignment(addresses: npt.NDArray[Any], size: int, what: str) -> None:
    """All addresses are multiples of `size`."""
    bad = (addresses & addresses.dtype.type(size - 1)) != 0
    if bad.any():
        raise Fault("alignment", f"{what} needs addresses that are multiples of {size}", address=int(addresses[bad][0]))


def put(view: npt.NDArray[Any], words: npt.NDArray[np.int64], values: npt.NDArray[Any], what: str) -> None:
    """Write values [lanes, count] to words of a memory; lanes that write different values to one word are a race."""
    view[words] = values
    lost = view[words] != values
    if lost.any():
        lane, word = (int(i) for i in np.argwhere(lost)[0])
        message = f"lanes of the warp write different values to one place in the same {what}"
        raise Fault("race", message, address=int(words[lane, word]) * values.dtype.itemsize)


class GlobalBuffer:
    """One allocation of global memory: a copy of an array's bytes at virtual address `base`.

    An array that numpy may not write to is an input: the kernel may not either.
    """

    def __init__(self, array: npt.NDArray[Any], base: int):
        self.array = array
        self.base = base
        self.size = array.nbytes
        self.data = np.zeros(-(-self.size // 16) * 16, np.uint8)
        self.data[: self.size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.views = {size: self.data.view(dtype) for size, dtype in UNSIGNED.items()}

    def check(self, offset: int, size: int, what: str) -> None:
        """Bytes offset..offset+size lie inside."""
        if offset < 0 or offset + size > self.size:
            message = f"{what} of {size} bytes at byte {offset} of a buffer of {self.size} bytes"
            raise Fault("bounds", message, address=self.base + offset)

    def check_writable(self, what: str) -> None:
        """The kernel may write here."""
        if not self.array.flags.writeable:
            raise Fault("bounds", f"{what} writes to an input of the launch", address=self.base)

    def write_back(self) -> None:
        """Copy the bytes into the array that the buffer was made from."""
        self.array.reshape(-1).view(np.uint8)[...] = self.data[: self.size]


class GlobalMemory:
    """All buffers of a launch."""

    def __init__(self) -> None:
        self.buffers: list[GlobalBuffer] = []
        self._bases: list[int] = []
        self._of_array: dict[int, GlobalBuffer] = {}

    def add(self, array: npt.NDArray[Any]) -> GlobalBuffer:
        """Give an array an address; the same array object keeps its address."""
        if id(array) in self._of_array:
            return self._of_array[id(array)]
        if not array.flags.c_contiguous:
            raise ValueError("buffers must be C-contiguous arrays")
        end = self.buffers[-1].base + self.buffers[-1].size if self.buffers else GLOBAL_BASE
        base = -(-(end + GLOBAL_GUARD) // GLOBAL_GUARD) * GLOBAL_GUARD
        buffer = GlobalBuffer(array, base)
        self.buffers.append(buffer)
        self._bases.append(base)
        self._of_array[id(array)] = buffer
        return buffer

    def find(self, address: int, size: int, what: str) -> tuple[GlobalBuffer, int]:
        """The buffer that holds `size` bytes at `address`, and the offset in it."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0 or address + size > self.buffers[index].base + self.buffers[index].size:
            raise Fault("bounds", f"{what} of {size} bytes lies in no buffer", address=address)
        return self.buffers[index], address - self.buffers[index].base

    def _locate(self, addresses: Addresses, size: int, what: str) -> tuple[GlobalBuffer, npt.NDArray[np.int64]] | None:
        """The one buffer that holds all addresses, and offsets; None if they lie in several."""
        low, high = int(addresses.min()), int(addresses.max())
        buffer, _ = self.find(low, size, what)
        if high + size > buffer.base + buffer.size:
            for address in addresses:
                self.find(int(address), size, what)
            return None
        return buffer, (addresses - np.uint64(buffer.base)).astype(np.int64)

    def load(self, addresses: Addresses, size: int, count: int, what: str) -> npt.NDArray[Any]:
        """`count` words of `size` bytes at each address: unsigned [lanes, count]."""
        check_alignment(addresses, size * count, what)
        located = self._locate(addresses, size * count, what)
        if located is None:
            return np.concatenate([self.load(addresses[i : i + 1], size, count, what) for i in range(len(addresses))])
        buffer, offsets = located
        return buffer.views[size][(offsets // size)[:, None] + np.arange(count)]

    def store(self, addresses: Addresses, values: npt.NDArray[Any], what: str) -> None:
        """Write values [lanes, count]; lanes with the same address must agree."""
        size, count = values.dtype.itemsize, values.shape[1]
        check_alignment(addresses, size * count, what)
        located = self._locate(addresses, size * count, what)
        if located is None:
            for i in range(len(addresses)):
                self.store(addresses[i : i + 1], values[i : i + 1], what)
            return
        buffer, offsets = located
        buffer.check_writable(what)
        put(buffer.views[size], (offsets // size)[:, None] + np.arange(count), values, what)


class SharedMemory:
    """Shared memory of a CTA. Offsets are the low 24 bits of shared addresses; `shadow` cells are its 32-bit words."""

    def __init__(self, clocks: Clocks, rank: int, size: int, check_races: bool):
        self.rank = rank
        self.size = DYNAMIC_SMEM_OFFSET + size
        words = -(-self.size // 16) * 4
        self.data = np.full(4 * words, 0xFF, np.uint8)
        self.views = {size: self.data.view(dtype) for size, dtype in UNSIGNED.items()}
        self.shadow = Shadow(clocks, words, f"shared memory of CTA {rank}", lambda cell: rank << 24 | cell << 2)
        self.check_races = check_races

    def check_range(self, offset: int, size: int, align: int, what: str) -> None:
        """`size` bytes at `offset` lie inside and are aligned."""
        address = self.rank << 24 | offset
        if offset % align:
            raise Fault("alignment", f"{what} needs an address that is a multiple of {align}", address=address)
        if offset < DYNAMIC_SMEM_OFFSET or offset + size > self.size:
            message = f"{what} of {size} bytes lies outside of the CTA's {self.size - DYNAMIC_SMEM_OFFSET} bytes"
            raise Fault("bounds", message, address=address)

    def _check(self, offsets: npt.NDArray[np.int64], size: int, what: str) -> None:
        check_alignment(offsets, size, what)
        bad = (offsets < DYNAMIC_SMEM_OFFSET) | (offsets + size > self.size)
        if bad.any():
            message = f"{what} of {size} bytes lies outside of the CTA's {self.size - DYNAMIC_SMEM_OFFSET} bytes"
            raise Fault("bounds", message, address=self.rank << 24 | int(offsets[bad][0]))

    def _cells(self, offsets: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        return offsets >> 2 if size <= 4 else ((offsets >> 2)[:, None] + np.arange(size // 4)).reshape(-1)

    def load(
        self,
        offsets: npt.NDArray[np.int64],
        size: int,
        count: int,
        clock: Clock,
        what: str,
        *,
        for_atomic: bool = False,
    ) -> npt.NDArray[Any]:
        """`count` words of `size` bytes at each offset, by the generic proxy: unsigned [lanes, count].

        `for_atomic`: an atomic reads and then changes them.
        """
        self._check(offsets, size * count, what)
        if self.check_races and for_atomic:
            cells = self._cells(offsets, size * count)
            self.shadow.check_atomic(cells, clock.times, what=what)
            self.shadow.mark_atomic(cells, clock.agent, clock.epoch)
        elif self.check_races:
            cells = self._cells(offsets, size * count)
            self.shadow.check_read(cells, clock.times, by_async=False, what=what)
            self.shadow.mark_read(cells, clock.agent, clock.epoch)
        return self.views[size][(offsets // size)[:, None] + np.arange(count)]

    def store(
        self,
        offsets: npt.NDArray[np.int64],
        values: npt.NDArray[Any],
        clock: Clock,
        what: str,
        *,
        by_atomic: bool = False,
    ) -> None:
        """Write values [lanes, count] by the generic proxy; lanes with the same address must agree.

        `by_atomic`: one whose `load` was checked.
        """
        size, count = values.dtype.itemsize, values.shape[1]
        self._check(offsets, size * count, what)
        if self.check_races and not by_atomic:
            cells = self._cells(offsets, size * count)
            if size * count < CELL_BYTES:
                self.shadow.check_free(cells, what)  # other bytes of the cell may be anybody's
            else:
                self.shadow.check_write(cells, clock.times, what=what)
            self.shadow.mark_write(cells, clock.agent, clock.epoch)
        put(self.views[size], (offsets // size)[:, None] + np.arange(count), values, what)


class LocalMemory:
    """Local memory of one warp: bytes [lanes, size]."""

    def __init__(self, size: int):
        self.data = np.full((32, max(size, 16)), 0xFF, np.uint8)
        self.size = size

    def check(self, offsets: npt.NDArray[np.int64], size: int, what: str) -> None:
        """All offsets are inside and aligned."""
        check_alignment(offsets, size, what)
        bad = (offsets < 0) | (offsets + size > self.size)
        if bad.any():
            raise Fault("bounds", f"{what} lies outside of local memory", address=LOCAL_WINDOW + int(offsets[bad][0]))

    def load(self, lanes: npt.NDArray[Any], offsets: npt.NDArray[np.int64], size: int, count: int) -> npt.NDArray[Any]:
        """As `GlobalMemory.load`, of the lanes' own memories."""
        self.check(offsets, size * count, "ld.local")
        return self.data.view(UNSIGNED[size])[lanes[:, None], (offsets // size)[:, None] + np.arange(count)]

    def store(self, lanes: npt.NDArray[Any], offsets: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """As `GlobalMemory.store`, to the lanes' own memories."""
        size, count = values.dtype.itemsize, values.shape[1]
        self.check(offsets, size * count, "st.local")
        self.data.view(UNSIGNED[size])[lanes[:, None], (offsets // size)[:, None] + np.arange(count)] = values


def place(variables: Sequence[tuple[str, int, int]], start: int) -> tuple[dict[str, int], int]:
    """Offsets of variables (name, size, align) one after the other from `start`, and the end."""
    offsets = {}
    for name, size, align in variables:
        start = -(-start // align) * align
        offsets[name] = start
        start += size
    return offsets, start
