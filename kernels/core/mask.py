"""A mask on a tile of scores: what a query doesn't see becomes -inf, or another value."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .seqlen import Sequence

__all__ = ["Place", "hide", "hide_other_segments"]


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


def hide_other_segments(
    scores: cute.Tensor,
    place: Place,
    n_block_start: Int32,
    q_ids: tuple[Int32, ...],
    kv_ids: cute.Pointer,
    kv_len: Int32,
    *,
    ragged: bool,
    hidden: float = -Float32.inf,
) -> None:
    """Sets scores [rows, columns] of keys to `hidden` unless their segment id is that of the row.

    `q_ids` are those of place.rows, `kv_ids` holds `kv_len`; `ragged`: the block may pass the last key.
    """
    first = n_block_start + place.first_column
    for c, column in enumerate(place.columns):
        key = first + column
        if ragged:
            key = cutlass.min(key, kv_len - 1)
        kv_id = cute.make_tensor(kv_ids + key, cute.make_layout(1))[0]
        for r, q_id in enumerate(q_ids):
            scores[r, c] = Float32(cutlass.select_(kv_id == q_id, scores[r, c], Float32(hidden)))
