"""Splits of the key blocks that a tile of queries sees. They depend on the sequence alone, and so do their results."""

from __future__ import annotations

import cutlass

from .bounds import Visit
from .divide import divide
from .seqlen import Index

__all__ = ["MAX_SPLITS", "within"]

MAX_SPLITS = 128


def within(whole: Visit, split: Index, min_blocks: Index) -> tuple[Index, Index]:
    """Blocks [begin, end) of one split of those that `whole` visits.

    Splits have `min_blocks` or, if that gives more than MAX_SPLITS, a MAX_SPLITSth; those that see keys come first.
    """
    blocks = cutlass.max(divide(whole.num_n_blocks + (MAX_SPLITS - 1), MAX_SPLITS), min_blocks)
    begin = whole.first + 1 - whole.num_n_blocks + split * blocks
    return begin, begin + blocks
