"""A mask on a tile of scores: what a query doesn't see becomes -inf, or another value."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .seqlen import Sequence

__all__ = ["Place", "hide"]


class Place(NamedTuple):
    """Where a thread's scores lie: element (r, c) is query rows[r], key first_column + columns[c] of the block."""

    rows: tuple[Int32, ...]  # query indices
    first_column: Int32  # key index relative to the block's first key
    columns: tuple[int, ...]


def hide(
    scores: cute.Tensor,
    place: Place,
    n_block_start: Int32,
    seq: Sequence,
    *,
    right: bool,
    left: bool,
    hidden: float = -Float32.inf,
) -> None:
    """Sets scores [rows, columns] of keys that `seq` hides to `hidden`, looking only at the edges named."""
    origin = n_block_start + place.first_column  # key index of column offset 0
    for r, row in enumerate(place.rows):
        end = seq.right_end(row) - origin
        start = seq.left_start(row) - origin
        for c, column in enumerate(place.columns):
            score = scores[r, c]
            if right:
                score = Float32(cutlass.select_(end > column, score, Float32(hidden)))
            if left:
                score = Float32(cutlass.select_(start <= column, score, Float32(hidden)))
            scores[r, c] = score
