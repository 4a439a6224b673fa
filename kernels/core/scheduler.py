"""Which tile of queries a CTA computes, from its index in a one-dimensional grid."""

import dataclasses
from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32

from .seqlen import Index

__all__ = ["Grid", "SingleTile", "Tile"]

L2_BUDGET = 50 * 1024 * 1024  # bytes of K and V that stay in the L2 of an H200 (50 MB) while their tiles run


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

    def tile(self, index: Index, grid: Grid) -> Tile:
        """The tile of CTA `index`."""
        group = _quotient(grid.q_heads, grid.kv_heads)
        m_blocks = _quotient(grid.q_len + (self.tile_m - 1), self.tile_m)
        if not self.longest_first:
            head, m_block = _divmod(index, m_blocks)
            return self._at(m_block, head, group, grid)

        section_heads = cutlass.max(_quotient(L2_BUDGET // self.kv_bytes, cutlass.max(grid.kv_len, 1)), 1)
        section_heads = cutlass.min(section_heads, grid.kv_heads * grid.batch)
        section, rest = _divmod(index, section_heads * group * m_blocks)
        first_head = section * section_heads
        heads_here = cutlass.min(section_heads, grid.kv_heads * grid.batch - first_head) * group
        step, head = _divmod(rest, heads_here)
        m_block = step if self.first_is_longest else m_blocks - 1 - step
        return self._at(m_block, first_head * group + head, group, grid)

    def _at(self, m_block: Index, head: Index, group: Index, grid: Grid) -> Tile:
        """`head` counts the query heads of all batch entries."""
        batch, q_head = _divmod(head, grid.q_heads)
        kv_head = _quotient(head, group) - batch * grid.kv_heads  # not of q_head: the two divisions run side by side
        return Tile(m_block, q_head, kv_head, batch)


def _quotient(a: Index, b: Index) -> Index:
    """a // b of numbers that are not negative: a kernel divides them unsigned, which is cheaper."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return Int32(Uint32(a) // Uint32(b))


def _divmod(a: Index, b: Index) -> tuple[Index, Index]:
    quotient = _quotient(a, b)
    return quotient, a - quotient * b
