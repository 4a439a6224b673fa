"""Which key blocks a tile of queries visits: the one function that every role asks, so that none can disagree."""

import dataclasses
from typing import NamedTuple

import cutlass

from .seqlen import Index, Sequence

__all__ = ["Bounds", "SegmentBlocks", "Span", "Visit"]


class Span(NamedTuple):
    """A run of key blocks with one kind of mask, visited from `first` downwards."""

    first: Index
    num_n_blocks: Index  # not positive: the span is empty
    right: bool  # some query of the tile may not see the block's last keys
    left: bool  # ... its first keys
    segments: bool = True  # ... keys of another segment, if the call has segments


class Visit(NamedTuple):
    """Key blocks in the order of visiting: descending from `first`, `num_n_blocks` in all (0: no query sees a key).

    Block `first` may be cut by any edge; `spans` are what follows it: right edge, middle, left edge. With segments the
    middle is the run of blocks that need no mask at all, and its neighbours have what else there is.
    """

    first: Index
    num_n_blocks: Index
    spans: tuple[Span, ...]

    def never_empty(self, beyond: Index) -> "Visit":
        """The same, but block `beyond` where no query sees a key: one that the mask hides whole."""
        empty = 1 - cutlass.min(self.num_n_blocks, 1)
        return Visit(self.first + empty * (beyond - self.first), self.num_n_blocks + empty, self.spans)


class SegmentBlocks(NamedTuple):
    """Key blocks of a tile by segment ids: [begin, end) hold all keys of its segments.

    In blocks [one_begin, one_end), if any, every key has the one id that all of the tile's queries have.
    """

    begin: Index
    end: Index
    one_begin: Index
    one_end: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Block bounds of tiles of `tile_m` queries and `tile_n` keys, with the mask's edges that exist."""

    tile_m: int
    tile_n: int
    has_left: bool
    has_right: bool
    has_padding: bool = False  # tiles may lie beyond the last query, and see nothing
    has_segments: bool = False  # spans tell where keys are of the tile's one segment; else none is said to be

    def visit(self, m_block: Index, seq: Sequence, within: SegmentBlocks | tuple[Index, Index] | None = None) -> Visit:
        """`visit_rows` of queries [m_block * tile_m, (m_block + 1) * tile_m)."""
        first_row = m_block * self.tile_m
        return self.visit_rows(first_row, first_row + self.tile_m, seq, within)

    def visit_rows(
        self,
        first_row: Index,
        end_row: Index,
        seq: Sequence,
        within: SegmentBlocks | tuple[Index, Index] | None = None,
    ) -> Visit:
        """Blocks that queries [first_row, end_row) of `seq` see: of those in `within`, [begin, end), if given.

        Without `has_padding` the first of them exists.
        """
        last_row = cutlass.min(end_row, seq.q_len) - 1

        end = self._blocks_up(seq.right_end(last_row))
        if self.has_padding:
            end = end * cutlass.min(cutlass.max(seq.q_len - first_row, 0), 1)
        begin = self._blocks_down(seq.left_start(first_row))
        if within is not None:
            begin, end = cutlass.max(begin, within[0]), cutlass.min(end, within[1])
        begin = cutlass.min(begin, end)
        first = end - 1

        # [middle_begin, middle_end) is seen whole by every query of the tile, but for `first`
        middle_end = first
        if self.has_right:
            middle_end = cutlass.max(cutlass.min(self._blocks_down(seq.right_end(first_row)), first), begin)
        middle_begin = begin
        if self.has_left:
            middle_begin = cutlass.min(cutlass.max(self._blocks_up(seq.left_start(last_row)), begin), middle_end)
        if self.has_segments:
            assert isinstance(within, SegmentBlocks), "a call with segments knows its blocks"
            middle_begin, middle_end = _overlap((middle_begin, middle_end), (within.one_begin, within.one_end), begin)
            high = Span(first - 1, first - middle_end, right=self.has_right, left=self.has_left)
            middle = Span(middle_end - 1, middle_end - middle_begin, right=False, left=False, segments=False)
            low = Span(middle_begin - 1, middle_begin - begin, right=False, left=self.has_left)
            return Visit(first, end - begin, (high, middle, low))

        spans = [Span(middle_end - 1, middle_end - middle_begin, right=False, left=False)]
        if self.has_right:
            spans.insert(0, Span(first - 1, first - middle_end, right=True, left=self.has_left))
        if self.has_left:
            spans.append(Span(middle_begin - 1, middle_begin - begin, right=False, left=True))
        return Visit(first, end - begin, tuple(spans))

    def _blocks_down(self, keys: Index) -> Index:
        """Whole blocks in `keys` keys."""
        return cutlass.max(keys, 0) // self.tile_n

    def _blocks_up(self, keys: Index) -> Index:
        """Blocks that hold `keys` keys."""
        return (cutlass.max(keys, 0) + (self.tile_n - 1)) // self.tile_n


def _overlap(one: tuple[Index, Index], other: tuple[Index, Index], empty: Index) -> tuple[Index, Index]:
    """What two runs [begin, end) have in common, or [empty, empty)."""
    begin = cutlass.max(one[0], other[0])
    size = cutlass.max(cutlass.min(one[1], other[1]) - begin, 0)
    begin = empty + cutlass.min(size, 1) * (begin - empty)
    return begin, begin + size
