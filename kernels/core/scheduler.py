"""The order of tiles of queries, and which of them a CTA of a one-dimensional grid computes."""

import dataclasses
from typing import NamedTuple

import cutlass

from .divide import divide, divide_with_rest
from .packed import PackedTile
from .seqlen import Index

__all__ = ["Grid", "QueryTile", "Queue", "SingleTile", "Tile", "TileOrder", "Walk"]

L2_BUDGET = 50 * 1024 * 1024  # bytes of K and V that stay in the L2 of an H200 (50 MB) while their tiles run
WALK_BUDGET = 24 * 1024 * 1024  # likewise, beside the Q and O of CTAs that walk
TICKET_ROUNDS = 3  # of walking CTAs in a section from which tickets serve them better, however long tiles are
TICKET_KEYS = 1024  # of the longest sequence up to which they do anyway


class Grid(NamedTuple):
    """Extents of a call. q_heads is a multiple of kv_heads, and no extent but kv_len is 0 in a launched grid."""

    q_len: Index
    kv_len: Index
    q_heads: Index
    kv_heads: Index
    batch: Index


class Tile(NamedTuple):
    """Queries [m_block * tile_m, (m_block + 1) * tile_m) of one head."""

    m_block: Index
    q_head: Index
    kv_head: Index
    batch: Index


class QueryTile(NamedTuple):
    """Queries [first_row, end_row) of one head, of a packed sequence if there are any.

    end_row may lie beyond the last.
    """

    first_row: Index
    end_row: Index
    q_head: Index
    kv_head: Index
    batch: Index
    packed: PackedTile | None = None


class Walk(NamedTuple):
    """One CTA's way through the order of tiles: as many tiles at a time as there are CTAs, alternately up and down.

    CTA c of n takes indices c, 2n-1-c, 2n+c, 4n-1-c, ...: in an order of falling lengths, what the first CTAs get more
    in one round they get less in the next. With a CTA for each tile it ends after the first.
    """

    tile_index: Index
    step: Index  # to the next index; two neighbouring steps make 2 * ctas

    @classmethod
    def first(cls, cta: Index, ctas: Index) -> "Walk":
        """Where CTA `cta` of `ctas` starts."""
        return cls(cta, 2 * (ctas - cta) - 1)

    def next(self, ctas: Index) -> "Walk":
        """The index behind the last one may be reached or passed: the walk ends there."""
        return Walk(self.tile_index + self.step, 2 * ctas - self.step)


class Queue(NamedTuple):
    """One CTA's way through the order where it may take what nobody has, as it gets there: two tiles ahead.

    Its first two tiles are those of a `Walk`; behind them it has tickets, which say how many others have been taken.
    """

    tile_index: Index
    following: Walk

    @classmethod
    def first(cls, cta: Index, ctas: Index) -> "Queue":
        """Where CTA `cta` of `ctas` starts."""
        return cls(cta, Walk.first(cta, ctas).next(ctas))

    def next(self, ticket: Index, ctas: Index) -> "Queue":
        """Behind the first tile, with a ticket for the tile after the following one, or -1 to walk on."""
        walk = self.following.next(ctas)
        taken = cutlass.min(ticket + 1, 1)  # 0 if there is no ticket
        return Queue(
            self.following.tile_index,
            walk._replace(tile_index=walk.tile_index + taken * (2 * ctas + ticket - walk.tile_index)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileOrder:
    """All tiles of a call by index.

    Plain order: blocks of rows run fastest, then the query heads of a kv head, kv heads, batch: CTAs that run together
    share K and V. Longest first: heads are cut into sections whose K and V fit in L2; within the last section the
    last, longest tiles of all its heads come first, and in the sections before it alternately first and last: lengths
    never jump, so CTAs that walk up and down get equal shares. The query heads of a kv head are neighbours.

    `ctas`, where they walk: a section is about what all of them go through in whole rounds, up and down, since parts of
    a round are unequal: one round at least, even where that is more than fits. Unless tiles are listed, sections are
    about equal where they can be, since a larger one may not fit. Heads that are left join the last.

    `partial_first`: the tile of a head that is not full is its first, which sees the fewest keys, not its last.
    """

    tile_m: int
    row_step: int  # with `partial_first` every tile starts at a multiple of it, a divisor of tile_m
    kv_bytes: int  # of one key and its value
    longest_first: bool
    partial_first: bool

    def count(self, grid: Grid) -> Index:
        """Tiles in all."""
        return self._m_blocks(grid) * grid.q_heads * grid.batch

    def tile(self, index: Index, grid: Grid, ctas: Index | None = None) -> QueryTile:
        """The tile at `index` of the order."""
        group = divide(grid.q_heads, grid.kv_heads)
        m_blocks = self._m_blocks(grid)
        if not self.longest_first:
            head, m_block = divide_with_rest(index, m_blocks)
            return self._at(m_block, head, group, grid)

        heads = self._section_heads(m_blocks * group, grid, ctas)
        if ctas is not None:
            heads = self._equal(heads, grid.kv_heads * grid.batch)
        return self._at(*self._in_sections(index, m_blocks, group, grid, heads), group, grid)

    def listed(self, index: Index, count: Index, grid: Grid, ctas: Index | None = None) -> tuple[Index, Index, Index]:
        """(position, q_head, kv_head) of the tile at `index`, where a list has `count` tiles of each head.

        The longest are the first of the list, which holds all batch entries.
        """
        group = divide(grid.q_heads, grid.kv_heads)
        whole = grid._replace(kv_len=grid.kv_len * grid.batch, batch=1)
        heads = self._section_heads(count * group, whole, ctas)
        block, head = self._in_sections(index, count, group, whole, heads)
        return count - 1 - block, head, divide(head, group)

    def wants_tickets(self, count: Index, longest: Index, grid: Grid, ctas: Index) -> Index:
        """1 where walking CTAs had better take the tiles of a list as they get to them, else 0.

        They do so two tiles ahead. Where a section has two tiles for each, that is too early: whoever starts first with
        the longest takes the longest of those that are left. Keys of the `longest` sequence tell how much that may be.
        """
        group = divide(grid.q_heads, grid.kv_heads)
        whole = grid._replace(kv_len=grid.kv_len * grid.batch, batch=1)
        tiles = self._section_heads(count * group, whole, ctas) * group * count
        are_many = cutlass.min(divide(tiles, TICKET_ROUNDS * ctas), 1)
        are_short = cutlass.min(divide(TICKET_KEYS, cutlass.max(longest, 1)), 1)
        return cutlass.max(are_many, are_short)

    def _in_sections(
        self, index: Index, m_blocks: Index, group: Index, grid: Grid, section_heads: Index
    ) -> tuple[Index, Index]:
        """Block and query head, counted over all batch entries, at `index`; the last blocks are the longest."""
        kv_heads, section_tiles = grid.kv_heads * grid.batch, section_heads * group * m_blocks
        last = divide(kv_heads, section_heads) - 1
        section = cutlass.min(divide(index, section_tiles), last)
        first_head, to_come = section * section_heads, last - section
        left = kv_heads - (last + 1) * section_heads
        heads_here = (section_heads + (1 - cutlass.min(to_come, 1)) * left) * group
        block, head = divide_with_rest(index - section * section_tiles, heads_here)
        upwards = to_come % 2
        m_block = (1 - upwards) * (m_blocks - 1 - 2 * block) + block
        return m_block, first_head * group + head

    def _section_heads(self, tiles: Index, grid: Grid, ctas: Index | None) -> Index:
        """KV heads of a section; each has so many `tiles`."""
        every = grid.kv_heads * grid.batch
        if ctas is None:
            return cutlass.min(_heads_that_fit(L2_BUDGET, self.kv_bytes, grid), every)
        fits = cutlass.min(_heads_that_fit(WALK_BUDGET, self.kv_bytes, grid), every)
        rounds = cutlass.max(divide(fits * tiles + ctas, 2 * ctas), 1)
        return cutlass.min(cutlass.max(divide(rounds * (2 * ctas) + tiles // 2, tiles), 1), every)

    def _equal(self, heads: Index, every: Index) -> Index:
        """KV heads of a section that make all equal, if there is a number near `heads` that does; else `heads`."""
        sections = cutlass.max(divide(every + heads // 2, heads), 1)
        equal = divide(every, sections)
        more_sections = cutlass.min(divide(every, equal) - sections, 1)  # 1 where so few would make more of them
        return equal + more_sections * (heads - equal)

    def _at(self, m_block: Index, head: Index, group: Index, grid: Grid) -> QueryTile:
        """`head` counts the query heads of all batch entries."""
        first_row = m_block * self.tile_m
        end_row = first_row + self.tile_m
        if self.partial_first:
            rows = divide(grid.q_len + (self.row_step - 1), self.row_step) * self.row_step
            end_row = rows - (self._m_blocks(grid) - 1 - m_block) * self.tile_m
            first_row = cutlass.max(end_row - self.tile_m, 0)
        return QueryTile(first_row, end_row, *_head(head, group, grid))

    def _m_blocks(self, grid: Grid) -> Index:
        return divide(grid.q_len + (self.tile_m - 1), self.tile_m)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleTile:
    """One tile a CTA; the grid's x extent is ceil(q_len / tile_m) * q_heads * batch, its y and z are 1.

    Plain order: m_block runs fastest, then the query heads of a kv head, kv heads, batch: CTAs that run together share
    K and V. Longest first: heads are cut into sections whose K and V fit in L2; within a section the longest m_blocks
    of all its heads come first, and the query heads of a kv head are neighbours. The longest m_blocks are the last ones
    unless `first_is_longest`.
    """

    tile_m: int
    kv_bytes: int  # of one key and its value
    longest_first: bool
    first_is_longest: bool = False
    even_sections: bool = False  # their heads are a power of two: few tiles in a last, short section end unevenly

    def tile(self, index: Index, grid: Grid) -> Tile:
        """The tile of CTA `index`."""
        group = divide(grid.q_heads, grid.kv_heads)
        m_blocks = divide(grid.q_len + (self.tile_m - 1), self.tile_m)
        if not self.longest_first:
            head, m_block = divide_with_rest(index, m_blocks)
            return self._at(m_block, head, group, grid)

        step, head = self._in_sections(index, m_blocks, group, grid)
        m_block = step if self.first_is_longest else m_blocks - 1 - step
        return self._at(m_block, head, group, grid)

    def listed(self, index: Index, count: Index, grid: Grid) -> tuple[Index, Index]:
        """(position, head) of the tile at `index`, where a list has `count` tiles of each head; q_heads are kv_heads.

        The longest are the first of the list, which holds all batch entries, so grid.batch is 1. Tiles of a sequence
        are side by side: grid.kv_len is that of the longest, which has to be in L2. Positions of a head never fall.
        """
        return self._in_sections(index, count, 1, grid)

    def _in_sections(self, index: Index, m_blocks: Index, group: Index, grid: Grid) -> tuple[Index, Index]:
        """Step, from the longest, and query head, counted over all batch entries, at `index`."""
        fits = _heads_that_fit(L2_BUDGET, self.kv_bytes, grid)
        if self.even_sections:
            fits = _power_of_two(fits)
        section_heads = cutlass.min(fits, grid.kv_heads * grid.batch)
        section, rest = divide_with_rest(index, section_heads * group * m_blocks)
        first_head = section * section_heads
        heads_here = cutlass.min(section_heads, grid.kv_heads * grid.batch - first_head) * group
        step, head = divide_with_rest(rest, heads_here)
        return step, first_head * group + head

    def _at(self, m_block: Index, head: Index, group: Index, grid: Grid) -> Tile:
        """`head` counts the query heads of all batch entries."""
        return Tile(m_block, *_head(head, group, grid))


def _heads_that_fit(budget: int, kv_bytes: int, grid: Grid) -> Index:
    """KV heads whose K and V fit in `budget` bytes of L2 together, one at least."""
    return cutlass.max(divide(budget // kv_bytes, cutlass.max(grid.kv_len, 1)), 1)


def _power_of_two(n: Index) -> Index:
    """The largest one up to n, which is positive."""
    below = n  # becomes all ones
    for shift in (1, 2, 4, 8, 16):
        below = below | (below >> shift)
    return below - (below >> 1)


def _head(head: Index, group: Index, grid: Grid) -> tuple[Index, Index, Index]:
    """(q_head, kv_head, batch) of query head `head`, counted over all batch entries."""
    batch, q_head = divide_with_rest(head, grid.q_heads)
    kv_head = divide(head, group) - batch * grid.kv_heads  # not of q_head: the two divisions run side by side
    return q_head, kv_head, batch
