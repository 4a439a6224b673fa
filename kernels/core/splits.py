"""Splits of the key blocks that a tile of queries sees. They depend on the sequence alone, and so do their results."""

from __future__ import annotations

from typing import NamedTuple

import cutlass

from .bounds import Visit
from .divide import divide
from .seqlen import Index

__all__ = ["MAX_SPLITS", "SplitKeys", "Splits"]

MAX_SPLITS = 128
FEW_SPLITS = 8


class SplitKeys(NamedTuple):
    """How many keys a split has: an eighth of all, but not fewer than `least` and not more than `most`."""

    least: Index
    most: Index

    @classmethod
    def of(cls, rows: Index, kv_heads: Index) -> SplitKeys:
        """For a kv head's so many rows, queries times heads of its group.

        The results of a split are float32 and have to be read again: with 512 keys at least that cost 3% of a call with
        8 to 64 sequences, head dim 128, on an H200. Long sequences of many heads keep all CTAs busy with longer splits,
        which are 1% faster. With more rows a split's results are larger, and so are the splits.
        """
        scale = cutlass.max(divide(rows + (ROWS - 1), ROWS), 1)
        most = cutlass.max(cutlass.min(512 * kv_heads, 4096), 1024)
        return cls(1024 * scale, most * scale)

    def blocks(self, whole: Index, tile_n: int, max_splits: Index) -> Index:
        """Blocks of a split where `whole` are seen."""
        blocks = divide(whole + (FEW_SPLITS - 1), FEW_SPLITS)
        blocks = cutlass.max(cutlass.min(blocks, divide(self.most, tile_n)), divide(self.least, tile_n))
        return cutlass.max(blocks, divide(whole + (max_splits - 1), max_splits))

    def most_splits(self, keys: int) -> int:
        """Of sequences with up to so many keys."""
        few, many = (-(-keys // split) for split in self)
        return min(max(min(few, FEW_SPLITS), many), MAX_SPLITS)


ROWS = 32


class Splits(NamedTuple):
    """Runs of `blocks` blocks from `first_block` on, upwards. Those that see keys come first."""

    first_block: Index
    blocks: Index

    @classmethod
    def of(cls, whole: Visit, keys: SplitKeys, tile_n: int, max_splits: Index) -> Splits:
        """Of all that `whole` visits."""
        return cls(whole.first + 1 - whole.num_n_blocks, keys.blocks(whole.num_n_blocks, tile_n, max_splits))

    def count(self, whole: Visit) -> Index:
        """How many see keys."""
        return divide(whole.num_n_blocks + (self.blocks - 1), self.blocks)

    def within(self, split: Index) -> tuple[Index, Index]:
        """Blocks [begin, end) of one split; behind the last that sees keys they don't exist."""
        begin = self.first_block + split * self.blocks
        return begin, begin + self.blocks
