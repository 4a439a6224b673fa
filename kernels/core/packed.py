"""Tiles of packed sequences: how a schedule lists them, and how many it has at most.

The rows of a batch entry are cut into sequences by their offsets. What lies before the first and behind the last offset
counts as two more sequences, of no length. A sequence has all rows up to the next one, its room: results are written to
them all; only the first of them, its length, take part.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .divide import divide
from .seqlen import Index, Sequence

__all__ = [
    "FIELDS",
    "PackedTile",
    "SlotRows",
    "end_row",
    "first_slot",
    "num_slots",
    "num_tiles",
    "read_count",
    "read_longest",
    "read_tile",
    "slot_rows",
    "take_ticket",
]

FIELDS = 8  # int32 of a tile in a schedule: those of PackedTile


class PackedTile(NamedTuple):
    """Rows [first_row, end_row) of one sequence, which sees the rows of another side: queries see keys, or vice versa.

    A tile may lie beyond the room: it is empty then.
    """

    begin: Index  # of the sequence, among all rows of its batch entry
    room: Index
    length: Index
    end_row: Index
    other_begin: Index  # of keys in pages: the number of the sequence, and what `other_slot` is means nothing
    other_length: Index
    other_slot: Index  # of the first of the other side's tiles of the same sequence
    batch: Index

    def first_row(self, tile_m: int) -> Index:
        """Of the tile, in its sequence; one whose end is less than a tile away from the first row starts there."""
        return cutlass.max(self.end_row - tile_m, 0)

    def sequence(self, window_left: Index | None, window_right: Index | None) -> Sequence:
        """What the tile's rows see; the last of them stands at the other side's last."""
        diagonal = self.other_length - self.length
        return Sequence.aligned(self.length, self.other_length, diagonal, window_left, window_right)


class SlotRows(NamedTuple):
    """A tile's rows: those from `first` on of a sequence of `room` rows that begins at row `begin` of the array."""

    begin: Index
    room: Index
    length: Index  # rows of the sequence that take part
    first: Index


def num_tiles(room: Index, tile_m: int) -> Index:
    """Tiles of a sequence."""
    return divide(room + (tile_m - 1), tile_m)


def end_row(block: Index, room: Index, tile_m: int, row_step: int | None) -> Index:
    """One behind the last row of a sequence's tile `block`.

    With a `row_step`, a divisor of tile_m, it is the first tile that is not full, and all start at a multiple of it.
    """
    if row_step is None:
        return (block + 1) * tile_m
    return num_tiles(room, row_step) * row_step - (num_tiles(room, tile_m) - 1 - block) * tile_m


def first_slot(begin: Index, index: Index, tile_m: int) -> Index:
    """Where the tiles of a batch entry's sequence `index` go that each have a place of their own, without counting."""
    return divide(begin, tile_m) + index


def num_slots(rows: Index, sequences: Index, tile_m: int) -> Index:
    """Such places of a batch entry; its tiles are not more."""
    return first_slot(rows, sequences + 2, tile_m)


def read_count(schedule: cute.Pointer) -> Int32:
    """How many tiles a schedule has."""
    return cute.make_tensor(schedule, cute.make_layout(1))[0]


def read_longest(schedule: cute.Pointer) -> Int32:
    """How many rows of the other side the tiles of one sequence see at most."""
    return cute.make_tensor(schedule + 1, cute.make_layout(1))[0]


def take_ticket(schedule: cute.Pointer) -> Int32:
    """How many tickets of a call have been taken before: 0, 1, ..., each once."""
    return cute.arch.atomic_add(schedule + 2, Int32(1), sem="relaxed", scope="gpu")


def read_tile(schedule: cute.Pointer, position: Index) -> PackedTile:
    """The tile at a position of a schedule."""
    half = FIELDS // 2
    first = schedule + (position + 1) * FIELDS
    parts = [cute.make_tensor((first + half * i).align(16), cute.make_layout(half)).load() for i in range(2)]
    return PackedTile(*(part[i] for part in parts for i in range(half)))


def slot_rows(schedule: cute.Pointer, slot: Index, rows: Index, tile_m: int) -> SlotRows:
    """The rows of the tile at a place of its own, of an array of `rows`; a place may have none.

    Where offsets descend a schedule may hold anything: what is returned lies within the array.
    """
    tile = read_tile(schedule, slot)
    begin = cutlass.max(cutlass.min(tile.begin, rows), 0)
    room = cutlass.min(tile.room, rows - begin)
    return SlotRows(begin, room, cutlass.min(tile.length, room), cutlass.max(tile.first_row(tile_m), 0))
