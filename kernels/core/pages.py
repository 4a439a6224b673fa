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
    """A call's table, [page_slots] a sequence, and its pool."""

    table: cute.Pointer
    head_stride: Int64  # of the table: 0 where all heads have one
    page_slots: Int32
    num_pages: Int32

    def find(self, key: Int32, page_size: int, kv_head: Int32, batch: Int32) -> tuple[Int32, Int32]:
        """The page of a key, and its row there. An index outside the pool means its nearest page."""
        slot = divide(key, page_size)
        pages = self.table + (kv_head * self.head_stride + Int64(batch) * self.page_slots)
        page = read(pages + cutlass.min(slot, self.page_slots - 1))
        return cutlass.max(cutlass.min(page, self.num_pages - 1), 0), key - slot * page_size
