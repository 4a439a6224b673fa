"""Grouped query heads: a tile's rows are queries of all heads that share a kv head, so that every key is read once."""

from __future__ import annotations

from typing import NamedTuple

from .divide import divide, divide_with_rest
from .seqlen import Index

__all__ = ["Rows"]


class Rows(NamedTuple):
    """Rows of a tile from `first` on, of one query head, where row r is query r.

    With `group` they are those of all heads of a kv head: row r is query r // group of head r % group.
    """

    first: Index
    group: Index | None = None

    def place(self, row: Index) -> tuple[Index, Index]:
        """Of the tile's `row`: its query, and its head, counted from the tile's first."""
        if self.group is None:
            return self.first + row, 0
        return divide_with_rest(self.first + row, self.group)

    def queries(self, num_rows: Index) -> tuple[Index, Index]:
        """The queries [first, end) of which the tile has a row."""
        if self.group is None:
            return self.first, self.first + num_rows
        return divide(self.first, self.group), divide(self.first + num_rows + (self.group - 1), self.group)
