"""Arrays with an element for every query and key, read from global memory: a boolean mask, an additive bias.

They may have one element in place of all batch entries, heads or queries: the stride along such an axis is 0. Reads
never leave the array: what lies beyond its edges reads as its last row or column, and other masks hide it.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .mask import Place

__all__ = [
    "Dense",
    "Rows",
    "add",
    "bits",
    "columns_of",
    "element",
    "hide_false",
    "hide_unset",
    "present",
    "rows_of",
    "signed",
]

WORD = 32  # bits


class Dense(NamedTuple):
    """One array [batch, q_heads, q_len, kv_len], keys contiguous; strides in elements."""

    pointer: cute.Pointer
    batch_stride: Int64
    head_stride: Int64
    row_stride: Int64


class Rows(NamedTuple):
    """The rows of one thread's queries, or, where rows of scores are keys, the columns of its keys."""

    pointers: tuple[cute.Pointer, ...]  # of key 0, or query 0
    last: Int32  # key, or query
    step: Int64 | None = None  # elements from one to the next; None: 1


def present(pointer: cute.Pointer | None, strides: tuple[Int64, Int64, Int64] | None) -> Dense | None:
    """The array at `pointer`, or None where a kernel is compiled without."""
    return None if pointer is None or strides is None else Dense(pointer, *strides)


def rows_of(array: Dense, place: Place, batch: Int32, q_head: Int32, q_len: Int32, kv_len: Int32) -> Rows:
    """The rows of queries place.rows of one head; lengths are those of the array."""
    head = array.pointer + (batch * array.batch_stride + q_head * array.head_stride)
    pointers = tuple(head + cutlass.min(row, q_len - 1) * array.row_stride for row in place.rows)
    return Rows(pointers, kv_len - 1)


def columns_of(array: Dense, place: Place, batch: Int32, q_head: Int32, q_len: Int32, kv_len: Int32) -> Rows:
    """The columns of keys place.rows of one head; lengths are those of the array."""
    head = array.pointer + (batch * array.batch_stride + q_head * array.head_stride)
    pointers = tuple(head + cutlass.min(row, kv_len - 1) for row in place.rows)
    return Rows(pointers, q_len - 1, array.row_stride)


def hide_false(scores: cute.Tensor, rows: Rows, place: Place, n_block_start: Int32, *, ragged: bool) -> None:
    """Scores [rows, columns] of keys whose mask byte is 0 become -inf; `ragged`: the block may pass the last key."""

    def hide(score: Float32, byte: cutlass.Uint8) -> Float32:
        return Float32(cutlass.select_(byte != 0, score, -Float32.inf))

    _combine(scores, rows, place, n_block_start, ragged, hide)


def bits(rows: Rows, place: Place, n_block_start: Int32, *, ragged: bool) -> tuple[Int32, ...]:
    """A bit for each of [rows, columns], set where the mask byte is not 0, to be looked at later by `hide_unset`.

    Element (r, c) is bit i % 32 of word i // 32, i = 2 c + r.
    """
    words = [Int32(0)] * -(-2 * len(place.columns) // WORD)
    for r in range(len(place.rows)):
        for c, column in enumerate(place.columns):
            word, bit = divmod(2 * c + r, WORD)
            byte = _element(rows, r, n_block_start + place.first_column + column, ragged)
            words[word] = words[word] | Int32(cutlass.select_(byte != 0, Int32(signed(1 << bit)), Int32(0)))
    return tuple(words)


def hide_unset(scores: cute.Tensor, words: tuple[Int32, ...], first: int, *, hidden: float) -> None:
    """Scores [rows, columns] whose bit is not set become `hidden`; column 0 is column `first` of the bits."""
    rows, columns = scores.shape
    for r in range(cute.size(rows)):
        for c in range(cute.size(columns)):
            word, bit = divmod(2 * (first + c) + r, WORD)
            is_set = words[word] & Int32(signed(1 << bit)) != 0
            scores[r, c] = Float32(cutlass.select_(is_set, scores[r, c], Float32(hidden)))


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
    for r in range(len(rows.pointers)):
        for c, column in enumerate(place.columns):
            scores[r, c] = combine(scores[r, c], _element(rows, r, first + column, ragged))


def _element(rows: Rows, row: int, index: Int32, ragged: bool) -> cutlass.Numeric:
    return element(rows, row, cutlass.min(index, rows.last) if ragged else index)


def element(rows: Rows, row: int, index: Int32) -> cutlass.Numeric:
    """Of one row, at key (or query) `index`, which exists."""
    if rows.step is None:
        return cute.make_tensor(rows.pointers[row] + index, cute.make_layout(1))[0]
    return ptx.ld_global(rows.pointers[row], index, rows.step)


def signed(word: int) -> int:
    """The same 32 bits as a signed number."""
    return word - (1 << WORD) if word >> (WORD - 1) else word
