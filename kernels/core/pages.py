"""Keys in pages: where a key of a sequence lies in the pool."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .divide import divide
from .inputs import read

__all__ = ["Pages"]


class Pages(NamedTuple):
    """Sizes of the pool and of a sequence's table."""

    page_table_head_stride: Int64  # 0 where all heads have one table
    page_slots: Int32
    num_pages: Int32

    def table_of(self, page_table: cute.Pointer, kv_head: Int32, batch: Int32) -> cute.Pointer:
        """The pages of a sequence, in order."""
        return page_table + (kv_head * self.page_table_head_stride + Int64(batch) * self.page_slots)

    def find(self, table: cute.Pointer, key: Int32, page_size: int) -> tuple[Int32, Int32]:
        """The page of a key, and its row there. An index outside the pool means its nearest page."""
        page_slot = divide(key, page_size)
        page = read(table + cutlass.min(page_slot, self.page_slots - 1))
        page = cutlass.max(cutlass.min(page, self.num_pages - 1), 0)
        return page, key - page_slot * page_size
