"""Which keys a thread's queries see by a mask array, as bits: read ahead of the scores, and kept in few registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from . import dense
from .inputs import Features
from .mask import Place

__all__ = ["Bits", "hide", "read"]

WORD = 32  # bits

Bits = tuple[tuple[Int32, ...], ...]  # of each row of scores; bit c % 32 of word c // 32: column c is seen


def read(
    features: Features, place: Place, n_block_start: Int32, kv_len: Int32, *, ragged: bool
) -> tuple[Bits, Features]:
    """Bits of the key block that starts at `n_block_start`, and what they don't say of it.

    They have segment ids in them, too; without a mask array there are none, and nothing is read. `ragged`: the block
    may reach beyond the last key of the array, `kv_len`.
    """
    if features.mask is None:
        return (), features
    words = [[Int32(0)] * -(-len(place.columns) // WORD) for _ in place.rows]
    for c, column in enumerate(place.columns):
        key = n_block_start + place.first_column + column
        if ragged:
            key = cutlass.min(key, kv_len - 1)
        for row, is_seen in zip(words, _seen(features, place, key), strict=True):
            word, bit = divmod(c, WORD)
            row[word] = row[word] | Int32(cutlass.select_(is_seen, Int32(dense.signed(1 << bit)), Int32(0)))
    return tuple(map(tuple, words)), features._replace(mask=None, q_ids=None)


def hide(scores: cute.Tensor, bits: Bits) -> None:
    """Scores [rows, columns] of keys that aren't seen become -inf."""
    for r, words in enumerate(bits):
        for c in range(cute.size(scores.shape[1])):
            word, bit = divmod(c, WORD)
            is_seen = words[word] & Int32(dense.signed(1 << bit)) != 0
            scores[r, c] = Float32(cutlass.select_(is_seen, scores[r, c], -Float32.inf))


def _seen(features: Features, place: Place, key: Int32) -> list[Boolean]:
    """Whether each row's query sees `key`."""
    seen = [Boolean(True)] * len(place.rows)
    if features.q_ids is not None:
        kv_id = cute.make_tensor(features.kv_ids + key, cute.make_layout(1))[0]
        seen = [kv_id == q_id for q_id in features.q_ids]
    if features.mask is not None:
        seen = [s & (dense.element(features.mask, r, key) != 0) for r, s in enumerate(seen)]
    return seen
