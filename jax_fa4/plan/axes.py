"""Axes of the call's buffers by letter: what XLA sees, what memory holds, and strides as expressions over both.

k kv heads, t queries, p queries with padding, s keys, S keys with padding, g query heads of a kv head, d head dim of q
and k, e head dim of v, w d padded, m tiles of queries or keys, c the ends of two ranges, u parts of a tile of dq, f
the three parts of a fused array. Query heads in memory are kv heads and their groups side by side, so both together
count as one axis there. An array that no device splits has b for all its batch axes, n for all query heads, and x, y, z
where it has one element in place of b, n, t. Keys in pages have o pages of the pool and r rows of a page; such calls
have b for the batch in every array. l splits of a sequence or of a group, j pages that a sequence may have. i offsets
of packed sequences, a their lengths, v and h places in a schedule of tiles of queries and of keys, q what it says of
one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jax_fa4.plan.expr import Expr, ExprLike, dim, lead
from jax_fa4.spec import Layout

__all__ = [
    "FUSED",
    "FUSED_PARTS",
    "KEY_BLOCKS",
    "KEY_PARTS",
    "KEY_SUMS",
    "KV_IDS",
    "KV_SCHEDULE",
    "LSE",
    "OFFSETS",
    "PARTIAL_LSE",
    "PARTIAL_OUT",
    "PER_SEQUENCE",
    "QUERY_BLOCKS",
    "QUERY_COUNTS",
    "QUERY_SUMS",
    "QUERY_TURNS",
    "Q_IDS",
    "Q_SCHEDULE",
    "ROW_STATISTICS",
    "SCALAR",
    "SEQUENCE_LENGTHS",
    "SINKS",
    "SPLIT_COUNTS",
    "TILE_SUMS",
    "VALUE_PARTS",
    "Axes",
    "key_axes",
    "query_axes",
    "value_axes",
]


class Axes(NamedTuple):
    """Axes behind the batch axes: as the call sees them and, major to minor, as memory holds them."""

    logical: str  # "k" first, as XLA's batch partitioner wants it; empty for a scalar, which has no batch axes either
    memory: str
    batched: bool = True  # batch axes come before

    def layout(self, num_batch_axes: int) -> tuple[int, ...]:
        """XLA's layout, minor to major."""
        if not self.logical:
            return ()
        num_batch_axes *= self.batched
        order = [*range(num_batch_axes), *(num_batch_axes + self.logical.index(axis) for axis in self.memory)]
        return tuple(reversed(order))

    def size(self, buffer: int, axis: str) -> Expr:
        """Elements along one axis of a buffer that has these axes."""
        return dim(buffer, self.logical.index(axis) - len(self.logical))

    def batch(self, buffer: int) -> Expr:
        """Product of the batch axes."""
        return lead(buffer, len(self.logical))

    def stride(self, buffer: int, axis: str) -> ExprLike:
        """Elements from one index of `axis` to the next; the batch's stride is that of ""."""
        inner = self.memory[self.memory.index(axis) + 1 :] if axis else self.memory
        return math.prod(self.size(buffer, a) for a in inner)


SCALAR = Axes("", "")
LSE = Axes("kgt", "kgt")
ROW_STATISTICS = Axes("kgp", "kgp")  # p: queries, rounded up to whole tiles
QUERY_SUMS = Axes("kgpw", "kgpw")
QUERY_TURNS = Axes("kgmu", "kgmu")
QUERY_COUNTS = Axes("k", "k")
KEY_PARTS, VALUE_PARTS = Axes("klSd", "klSd"), Axes("klSe", "klSe")
SINKS = Axes("kg", "kg")
KEY_SUMS = Axes("kgs", "kgs")
TILE_SUMS = Axes("kgm", "kgm")
PER_SEQUENCE = Axes("k", "k")
Q_IDS = Axes("kt", "kt")
KV_IDS = Axes("ks", "ks")
KEY_BLOCKS = QUERY_BLOCKS = Axes("kmc", "kmc")
PARTIAL_OUT = Axes("kltge", "kltge")
PARTIAL_LSE = Axes("ktgl", "ktgl")
SPLIT_COUNTS = Axes("kt", "kt")
OFFSETS = {True: Axes("ki", "ki"), False: Axes("bi", "bi", batched=False)}  # by whether XLA may split the call
SEQUENCE_LENGTHS = {True: Axes("ka", "ka"), False: Axes("ba", "ba", batched=False)}
Q_SCHEDULE, KV_SCHEDULE = Axes("kvq", "kvq"), Axes("khq", "khq")
FUSED = Axes("kftgd", "tfkgd")
FUSED_PARTS = {"q": FUSED, "k": Axes("kfsgd", "sfkgd"), "v": Axes("kfsge", "sfkge")}  # each as its kernel knows it


def query_axes(layout: Layout, head_dim: str = "d") -> Axes:
    """Of q or, with "e", of out."""
    return Axes("ktg" + head_dim, {"BTNH": "tkg", "BNTH": "kgt"}[layout] + head_dim)


def key_axes(layout: Layout, head_dim: str = "d") -> Axes:
    """Of k."""
    return Axes("ks" + head_dim, {"BTNH": "sk", "BNTH": "ks"}[layout] + head_dim)


def value_axes(layout: Layout) -> Axes:
    """Of v."""
    return key_axes(layout, "e")
