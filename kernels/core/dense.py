"""Arrays with an element for every query and key, read from global memory: a boolean mask, an additive bias.

They may have one element in place of all batch entries, heads or queries: the stride along such an axis is 0. Reads
never leave the array: what lies beyond its edges reads as its last row or column, and other masks hide it.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .mask import Place

__all__ = ["Dense", "Rows", "add", "hide_false", "rows_of"]


class Dense(NamedTuple):
    """One array [batch, q_heads, q_len, kv_len], keys contiguous; strides in elements."""

    pointer: cute.Pointer
    batch_stride: Int64
    head_stride: Int64
    row_stride: Int64


class Rows(NamedTuple):
    """The rows of one thread's queries."""

    pointers: tuple[cute.Pointer, ...]  # of key 0
    last_key: Int32  # kv_len - 1


def rows_of(array: Dense, place: Place, batch: Int32, q_head: Int32, q_len: Int32, kv_len: Int32) -> Rows:
    """The rows of queries place.rows of one head; lengths are those of the array."""
    head = array.pointer + (batch * array.batch_stride + q_head * array.head_stride)
    pointers = tuple(head + cutlass.min(row, q_len - 1) * array.row_stride for row in place.rows)
    return Rows(pointers, kv_len - 1)


def hide_false(scores: cute.Tensor, rows: Rows, place: Place, n_block_start: Int32, *, ragged: bool) -> None:
    """Scores [rows, columns] of keys whose mask byte is 0 become -inf; `ragged`: the block may pass the last key."""

    def hide(score: Float32, byte: cutlass.Uint8) -> Float32:
        return Float32(cutlass.select_(byte != 0, score, -Float32.inf))

    _combine(scores, rows, place, n_block_start, ragged, hide)


def add(scores: cute.Tensor, factor: Float32, rows: Rows, place: Place, n_block_start: Int32, *, ragged: bool) -> None:
    """Scores [rows, columns] become scores * factor + bias; `ragged`: the block may pass the last key."""

    def fma(score: Float32, bias: cutlass.Numeric) -> Float32:
        return cute.math.fma(score, factor, Float32(bias))

    _combine(scores, rows, place, n_block_start, ragged, fma)


def _combine(
    scores: cute.Tensor,
    rows: Rows,
    place: Place,
    n_block_start: Int32,
    ragged: bool,
    combine: Callable[[Float32, cutlass.Numeric], Float32],
) -> None:
    first = n_block_start + place.first_column
    for r, pointer in enumerate(rows.pointers):
        for c, column in enumerate(place.columns):
            key = first + column
            if ragged:
                key = cutlass.min(key, rows.last_key)
            element = cute.make_tensor(pointer + key, cute.make_layout(1))[0]
            scores[r, c] = combine(scores[r, c], element)
