"""What a forward call has beside q, k and v, and what a tile of queries makes of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from . import dense, softcap
from . import mask as masks
from .bounds import SegmentBlocks, Span
from .dense import Dense
from .mask import Place
from .scheduler import Grid
from .seqlen import Index, Sequence
from .softmax import scale_log2

__all__ = [
    "BOTH_SIGNS",
    "Features",
    "Inputs",
    "Logits",
    "Window",
    "key_blocks",
    "logits",
    "prepare",
    "read",
    "sequence",
    "window",
]

BOTH_SIGNS = -0x7FFF8000  # 0x80008000: the sign bits of two 16-bit floats, where Q changes its own
DIAGONAL_LIMIT = 1 << 30  # offsets are cut to it, so that no sum with lengths wraps


class Lengths(Protocol):
    """What of a call's extents its sequences depend on."""

    @property
    def q_len(self) -> Index: ...
    @property
    def kv_len(self) -> Index: ...
    @property
    def kv_heads(self) -> Index: ...


class KvHead(Protocol):
    """What of a tile its sequence depends on."""

    @property
    def kv_head(self) -> Index: ...
    @property
    def batch(self) -> Index: ...


class QueryHead(KvHead, Protocol):
    """What of a tile its bias and its mask depend on."""

    @property
    def q_head(self) -> Index: ...


class Inputs(NamedTuple):
    """Addresses of what a call has beside q, k and v; None: compiled without."""

    softmax_scale: cute.Pointer
    window_left: cute.Pointer | None
    window_right: cute.Pointer | None
    softcap: cute.Pointer | None
    q_offset: cute.Pointer | None
    q_lengths: cute.Pointer | None
    kv_lengths: cute.Pointer | None
    sinks: cute.Pointer | None
    q_segment_ids: cute.Pointer | None
    kv_segment_ids: cute.Pointer | None
    key_blocks: cute.Pointer | None
    mask: cute.Pointer | None
    bias: cute.Pointer | None
    mask_strides: tuple[Int64, Int64, Int64] | None  # elements from one batch entry, head and row to the next
    bias_strides: tuple[Int64, Int64, Int64] | None


class Logits(NamedTuple):
    """How scores become logits; None: compiled without. One step takes the scale, whatever its sign."""

    capped: Float32 | None  # softcap: s becomes tanh(capped * s)
    biased: Float32 | None  # bias: then biased * s + bias
    scale_log2: Float32  # then softmax multiplies by it
    negative: Boolean | None  # neither cap nor bias: Q has to change its sign before


class Window(NamedTuple):
    """How far a query sees; None: compiled without that edge."""

    left: Int32 | None
    right: Int32 | None


class Features(NamedTuple):
    """What a thread knows of a call's extras for its rows; None: compiled without."""

    q_ids: tuple[Int32, ...] | None = None  # segment ids of its rows
    kv_ids: cute.Pointer | None = None  # of all keys
    mask: dense.Rows | None = None
    bias: dense.Rows | None = None

    def in_span(self, span: Span) -> Features:
        """Those that a block of the span asks for."""
        return self if span.segments else self._replace(q_ids=None, kv_ids=None)

    @classmethod
    def of(
        cls, inputs: Inputs, grid: Grid, tile: QueryHead, place: Place, without_keys: cute.Pointer | None = None
    ) -> Features:
        """Those of the calling thread, whose scores lie at `place`.

        A kernel that weighs a block even where there are no keys gives another address, `without_keys`, that is read
        then: what comes from there is hidden.
        """
        q_ids = kv_ids = None
        kv_len = grid.kv_len if without_keys is None else cutlass.max(grid.kv_len, 1)

        def readable(pointer: cute.Pointer) -> cute.Pointer:
            if without_keys is None:
                return pointer
            address = cutlass.select_(grid.kv_len > 0, pointer.toint(), without_keys.toint())
            return cute.make_ptr(pointer.dtype, address, pointer.memspace, assumed_align=pointer.alignment)

        if inputs.q_segment_ids is not None:
            entry = Int64(tile.batch * grid.kv_heads + tile.kv_head)
            ids = inputs.q_segment_ids + entry * grid.q_len
            q_ids = tuple(read(ids + cutlass.min(row, grid.q_len - 1)) for row in place.rows)
            kv_ids = readable(inputs.kv_segment_ids + entry * grid.kv_len)

        def rows_of(pointer: cute.Pointer | None, steps: tuple[Int64, Int64, Int64] | None) -> dense.Rows | None:
            if pointer is None or steps is None:
                return None
            array = Dense(pointer, *steps)
            rows = dense.rows_of(array, place, tile.batch, tile.q_head, grid.q_len, kv_len)
            return rows._replace(pointers=tuple(readable(row) for row in rows.pointers))

        return cls(q_ids, kv_ids, rows_of(inputs.mask, inputs.mask_strides), rows_of(inputs.bias, inputs.bias_strides))


def read(pointer: cute.Pointer) -> Float32 | Int32:
    """The one element at `pointer`."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def logits(inputs: Inputs) -> Logits:
    """Cap and scale of the call, as the steps from a score to a weight use them."""
    scale = read(inputs.softmax_scale)
    capped = biased = negative = None
    if inputs.softcap is not None:
        cap = read(inputs.softcap)
        capped, scale = scale / cap, cap
    if inputs.bias is not None:
        biased, scale = scale, Float32(1.0)
    if capped is None and biased is None:
        negative = scale < 0.0
    return Logits(capped, biased, scale_log2(scale), negative)


def window(inputs: Inputs) -> Window:
    """The window of the call."""
    left = read(inputs.window_left) if inputs.window_left is not None else None
    right = read(inputs.window_right) if inputs.window_right is not None else None
    return Window(left, right)


def sequence(inputs: Inputs, grid: Lengths, tile: KvHead, window: Window) -> Sequence:
    """The tile's sequence: lengths of the arrays and ends aligned, but where the call says otherwise."""
    entry = tile.batch * grid.kv_heads + tile.kv_head
    q_len, kv_len = grid.q_len, grid.kv_len
    if inputs.q_lengths is not None:
        q_len = cutlass.max(cutlass.min(read(inputs.q_lengths + entry), q_len), 0)
    if inputs.kv_lengths is not None:
        kv_len = cutlass.max(cutlass.min(read(inputs.kv_lengths + entry), kv_len), 0)
    diagonal = kv_len - q_len
    if inputs.q_offset is not None:
        offset = read(inputs.q_offset + entry)
        diagonal = cutlass.max(cutlass.min(offset, DIAGONAL_LIMIT), -DIAGONAL_LIMIT)
    return Sequence.aligned(q_len, kv_len, diagonal, window.left, window.right)


def key_blocks(inputs: Inputs, grid: Grid, tile: KvHead, m_block: Int32, tile_m: int) -> SegmentBlocks | None:
    """The key blocks of the tile's segments, those of block `m_block` of rows; None without segments."""
    if inputs.key_blocks is None:
        return None
    q_tiles = (grid.q_len + (tile_m - 1)) // tile_m
    entry = Int64(tile.batch * grid.kv_heads + tile.kv_head)
    element = (entry * q_tiles + m_block) * len(SegmentBlocks._fields)
    return SegmentBlocks(*(read(inputs.key_blocks + (element + i)) for i in range(len(SegmentBlocks._fields))))


def prepare(
    scores: cute.Tensor,
    logits: Logits,
    features: Features,
    place: Place,
    start: Int32,
    seq: Sequence,
    kv_len: Int32,
    *,
    right: bool,
    left: bool,
    ragged: bool = False,
) -> None:
    """Cap, bias and masks: scores [rows, columns] of the key block that starts at `start` become logits.

    `ragged`: the block may reach beyond the last key of the array, `kv_len`.
    """
    if logits.capped is not None:
        softcap.cap(scores, logits.capped)
    if features.bias is not None:
        dense.add(scores, logits.biased, features.bias, place, start, ragged=ragged)
    if right or left:
        masks.hide(scores, place, start, seq, right=right, left=left)
    if features.q_ids is not None:
        masks.hide_other_segments(scores, place, start, features.q_ids, features.kv_ids, kv_len, ragged=ragged)
    if features.mask is not None:
        dense.hide_false(scores, features.mask, place, start, ragged=ragged)
