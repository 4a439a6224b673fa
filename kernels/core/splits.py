"""Splits of the key blocks that a tile of queries sees. They depend on the sequence alone, and so do their results."""

from __future__ import annotations

from typing import NamedTuple

import cutlass

from .bounds import Visit
from .divide import divide
from .seqlen import Index

__all__ = ["MAX_SPLITS", "Splits"]

MAX_SPLITS = 128


class Splits(NamedTuple):
    """Runs of `blocks` blocks from `first_block` on, upwards. Those that see keys come first."""

    first_block: Index
    blocks: Index

    @classmethod
    def of(cls, whole: Visit, min_blocks: Index) -> Splits:
        """Of all that `whole` visits: so many blocks each or, if that gives more splits, a MAX_SPLITSth of them."""
        blocks = cutlass.max(divide(whole.num_n_blocks + (MAX_SPLITS - 1), MAX_SPLITS), min_blocks)
        return cls(whole.first + 1 - whole.num_n_blocks, blocks)

    def within(self, split: Index) -> tuple[Index, Index]:
        """Blocks [begin, end) of one split; behind the last that sees keys they don't exist."""
        begin = self.first_block + split * self.blocks
        return begin, begin + self.blocks
