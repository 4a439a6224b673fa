"""One sequence's lengths and window, in coordinates that the mask and the block bounds share."""

from typing import NamedTuple, TypeAlias

import cutlass
from cutlass import Int32

__all__ = ["Index", "Sequence"]

Index: TypeAlias = int | Int32  # int in tests: these formulas are compared with written-out masks


class Sequence(NamedTuple):
    """Query i sees key j if i + diagonal - window_left <= j <= i + diagonal + window_right and 0 <= j < kv_len.

    A window side that a kernel was compiled without is None.
    The sums q_len + kv_len and |diagonal| + q_len + kv_len stay below 2^31.
    """

    q_len: Index
    kv_len: Index
    diagonal: Index  # index of the key that query 0 is aligned with
    window_left: Index | None
    window_right: Index | None

    @classmethod
    def bottom_right(
        cls, q_len: Index, kv_len: Index, window_left: Index | None, window_right: Index | None
    ) -> "Sequence":
        """The last query is aligned with the last key."""
        return cls.aligned(q_len, kv_len, kv_len - q_len, window_left, window_right)

    @classmethod
    def aligned(
        cls, q_len: Index, kv_len: Index, diagonal: Index, window_left: Index | None, window_right: Index | None
    ) -> "Sequence":
        """Windows up to 2^31 - 1 are cut to what already shows every key, so that no sum of them wraps."""
        if window_left is not None:
            window_left = cutlass.min(window_left, q_len + diagonal)
        if window_right is not None:
            window_right = cutlass.min(window_right, kv_len - diagonal)
        return cls(q_len, kv_len, diagonal, window_left, window_right)

    def transposed(self) -> "Sequence":
        """The same pairs with the roles of queries and keys exchanged."""
        return Sequence(self.kv_len, self.q_len, -self.diagonal, self.window_right, self.window_left)

    def right_end(self, row: Index) -> Index:
        """One past the last key visible to query `row`; not positive if there is none."""
        if self.window_right is None:
            return self.kv_len
        return cutlass.min(self.kv_len, row + self.diagonal + self.window_right + 1)

    def left_start(self, row: Index) -> Index:
        """First key visible to query `row`; not positive if it is the first of all."""
        if self.window_left is None:
            return 0
        return row + self.diagonal - self.window_left
