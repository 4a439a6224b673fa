"""Tensor copies of one block of rows between an array and a tile in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

__all__ = ["Corner", "fetch", "partition"]


class Corner(NamedTuple):
    """Where a block lies in an array."""

    row: Int32  # of its first query or key
    head: Int32
    batch: Int32
    column: Int32 | int = 0


def partition(
    atom: cute.CopyAtom, block: tuple[int, int], corner: Corner, smem_tile: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """(tile in smem, its coordinates in the array) of a block (rows, head_dim)."""
    # tensor maps count from the innermost extent: head_dim, seq, heads, batch
    every = cute.make_identity_tensor((block[1], block[0], 1, 1))
    shifted = cute.domain_offset((corner.column, corner.row, corner.head, corner.batch), every)
    coordinates = cute.make_tensor(shifted.iterator, cute.select(every.layout, [1, 0]))
    whole = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, whole, cute.group_modes(smem_tile, 0, 2), cute.group_modes(coordinates, 0, 2))


def fetch(atom: cute.CopyAtom, block: tuple[int, int], corner: Corner, smem_tile: cute.Tensor, slot: Any) -> None:
    """Starts the copy of one block into a slot."""
    destination, source = partition(atom, block, corner, smem_tile)
    cute.copy(atom, source, destination, tma_bar_ptr=slot.barrier)
