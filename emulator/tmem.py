"""Tensor memory of a CTA: cells, who may touch them, and the allocator. PTX ISA 9.7.16.1 to 9.7.16.7."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.layout.tensor_memory import COLUMNS, LANES, WARP_LANES
from jax_fa4.emulator.order import Clocks, Shadow, Times

__all__ = ["MIN_ALLOCATION", "TensorMemory", "shadow_cells"]

MIN_ALLOCATION = 32  # columns
GROUP_LANES = 16  # of a shadow cell: no access orders fewer lanes than that

Indices = npt.NDArray[np.int64]


@functools.lru_cache(maxsize=512)
def shadow_cells(groups: tuple[int, ...], column: int, count: int) -> Indices:
    """Shadow cells of `count` columns of some groups of 16 lanes."""
    columns = np.arange(column, column + count)
    cells = (np.array(groups)[:, None] * COLUMNS + columns).reshape(-1)
    cells.flags.writeable = False
    return cells


class TensorMemory:
    """128 lanes x 512 columns of 32-bit cells.

    `written` is exact; `shadow` orders accesses in cells of 16 lanes x 1 column, which all instructions touch as a
    whole but for masked-out lanes.
    """

    def __init__(self, clocks: Clocks, rank: int, *, check_races: bool):
        self.rank = rank
        self.cells = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)  # NaN to whoever reads it unwritten
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.shadow = Shadow(
            clocks,
            LANES // GROUP_LANES * COLUMNS,
            f"tensor memory of CTA {rank}",
            lambda cell: cell // COLUMNS * GROUP_LANES << 16 | cell % COLUMNS,
        )
        self.check_races = check_races
        self.cta_group: int | None = None
        self._is_allocated = np.zeros(COLUMNS, bool)  # may be accessed
        self._is_taken = np.zeros(COLUMNS, bool)  # ... or this CTA has given it back, but its pair's other has not
        self._allocations: dict[int, int] = {}
        self._largest_legal = COLUMNS
        self._may_allocate = True

    # allocation

    def check_request(self, columns: int) -> None:
        """An allocation of this size is legal now, if not necessarily possible."""
        if columns not in (32, 64, 128, 256, 512):
            raise Fault("tensor memory", f"allocation of {columns} columns, a power of two from 32 to 512 is legal")
        if not self._may_allocate:
            raise Fault("tensor memory", "allocation after relinquish_alloc_permit")
        if columns > self._largest_legal:
            message = f"allocation of {columns} columns after one of {self._largest_legal}: sizes must not grow"
            raise Fault("tensor memory", message)
        self._largest_legal = columns

    def find_free(self, columns: int) -> int | None:
        """The first column where an allocation fits; None if there is none."""
        for column in range(0, COLUMNS - columns + 1, MIN_ALLOCATION):
            if not self._is_taken[column : column + columns].any():
                return column
        return None

    def allocate(self, columns: int, agent: int, epoch: int) -> int:
        """Take columns that `find_free` found; what was in them is undefined from now on. Returns the address."""
        column = self.find_free(columns)
        assert column is not None  # the caller has waited for room
        self._is_allocated[column : column + columns] = True
        self._is_taken[column : column + columns] = True
        self._allocations[column] = columns
        self.written[:, column : column + columns] = False
        cells = shadow_cells(tuple(range(LANES // GROUP_LANES)), column, columns)
        self.shadow.mark_write(cells, agent, epoch)  # accesses must be ordered behind the allocation
        return column

    def give_back(self, address: int, columns: int, times: Times) -> None:
        """End an allocation: it must exist, and all its accesses must have happened."""
        if self._allocations.get(address) != columns:
            found = ", ".join(f"{n} columns at {column:#x}" for column, n in self._allocations.items()) or "none"
            raise Fault("tensor memory", f"dealloc of {columns} columns at {address:#x}; allocated: {found}")
        if self.check_races:
            cells = shadow_cells(tuple(range(LANES // GROUP_LANES)), address, columns)
            self.shadow.check_write(cells, times, what="tcgen05.dealloc")
        del self._allocations[address]
        self._is_allocated[address : address + columns] = False

    def free(self, address: int, columns: int) -> None:
        """Columns that all CTAs concerned have given back may be allocated again."""
        self._is_taken[address : address + columns] = False

    def relinquish(self) -> None:
        """No allocation may follow."""
        self._may_allocate = False

    def check_exit(self) -> None:
        """All columns must be free when the CTA ends."""
        if self._allocations:
            held = ", ".join(f"{n} columns at {column:#x}" for column, n in self._allocations.items())
            raise Fault("tensor memory", f"the CTA ends without dealloc of {held}")

    # access

    def use_group(self, cta_group: int) -> None:
        """All instructions of a kernel must name one cta_group."""
        if self.cta_group is None:
            self.cta_group = cta_group
        if self.cta_group != cta_group:
            raise Fault("tcgen05", f"cta_group::{cta_group} in a kernel that has used cta_group::{self.cta_group}")

    def check_columns(self, column: int, count: int, what: str) -> None:
        """Columns exist and are allocated."""
        if column + count > COLUMNS:
            message = f"{what} reaches column {column + count - 1} of {COLUMNS}"
            raise Fault("tensor memory", message, address=column)
        missing = np.flatnonzero(~self._is_allocated[column : column + count])
        if len(missing):
            first = column + int(missing[0])
            raise Fault("tensor memory", f"{what} touches column {first}, which is not allocated", address=first)

    def check_quarter(self, lane: int, lanes: int, warp: int, what: str) -> None:
        """A warp reaches the 32 lanes of its number modulo 4, all of them or either half."""
        first = WARP_LANES * (warp % 4)
        legal = (first,) if lanes == WARP_LANES else (first, first + GROUP_LANES)
        if lane not in legal:
            message = f"{what} starts at lane {lane}, warp {warp} may use {' or '.join(map(str, legal))}"
            raise Fault("tensor memory", message, address=lane << 16)

    def check_written(self, written: npt.NDArray[np.bool_], what: str) -> None:
        """`written`, picked from the field of that name, holds everywhere."""
        if not written.all():
            raise Fault("uninitialised", f"{what} reads tensor memory that nothing wrote")
