"""Arrays in global memory that are read or written row by row, without TMA."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

__all__ = ["GlobalRows"]


class GlobalRows(NamedTuple):
    """An array of rows, head_dim contiguous. Strides are in elements."""

    start: cute.Pointer
    batch_stride: Int64  # of keys in pages: from one page to the next
    row_stride: Int64
    head_stride: Int64

    def row(self, batch: Int32, row: Int32, head: Int32) -> cute.Pointer:
        """Where a row begins."""
        return self.start + (batch * self.batch_stride + row * self.row_stride + head * self.head_stride)
