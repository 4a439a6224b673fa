"""What a kernel takes at launch, in order: the description from which a launch plan fills the parameters.

A compiled kernel's PTX has the same parameters in the same order and sizes; the cubin builder checks that it has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Extent", "KernelParam", "MapParam", "PointerParam", "ScalarParam"]

Extent = Literal[
    "head_dim",
    "head_dim_v",
    "q_len",
    "padded_q_len",  # q_len, rounded up to whole tiles of queries
    "kv_len",
    "q_heads",
    "kv_heads",
    "batch",
    "padded_kv_len",  # likewise kv_len
    "sum_columns",  # of a row of dq_sum: head_dim, padded
    "q_tiles",
    "kv_tiles",
    "range",
    "dq_parts",  # of a tile, summed apart from each other
    "dq_adders",  # that add to dq of a kv head's query heads
    "group",
    "head_splits",  # CTAs that share the query heads of a kv head
    "num_splits",
    "row_warps",  # that merge the splits of a query
    "q_batch_stride",  # elements from one batch entry to the next
    "q_row_stride",
    "q_head_stride",
    "out_batch_stride",
    "out_row_stride",
    "out_head_stride",
    "k_batch_stride",
    "k_row_stride",
    "k_head_stride",
    "v_batch_stride",
    "v_row_stride",
    "v_head_stride",
    "page_size",
    "num_pages",
    "page_slots",  # pages that a sequence may have
    "page_table_size",
    "page_table_head_stride",
    "sequences",  # packed in a batch entry
    "entry_step",  # entries of offsets and lengths from one batch entry to the next
    "offsets_size",
    "lengths_size",
    "q_places",  # of a schedule: its head, and as many tiles as there may be
    "kv_places",
    "q_slots",  # places of their own for the tiles of a batch entry
    "q_slot_rows",
    "dq_batch_stride",
    "dq_row_stride",
    "dq_head_stride",
    "dk_batch_stride",
    "dk_row_stride",
    "dk_head_stride",
    "dv_batch_stride",
    "dv_row_stride",
    "dv_head_stride",
    "fields",  # of a tile in a schedule
    "mask_size",
    "bias_size",
    "bias_batches",  # 1 in place of all of them, if the bias has one element for all
    "bias_heads",
    "query_shares",  # CTAs that share the queries of a tile of keys
    "kv_slots",  # places that a schedule has for the tiles of keys of a batch entry
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapParam:
    """A tiled CUtensorMap over one array, passed by value.

    Strides follow from the array's layout in memory: dims[0] is contiguous, the others are multiples of 16 bytes.
    Element strides are 1, interleave is none; elements outside read as zero (CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE).
    """

    name: str  # q, k, v, out or the gradient of one, with a d in front
    dtype: str  # numpy's name
    dims: tuple[Extent, ...]  # innermost first; batch is the product of all leading axes
    box: tuple[int, ...]  # elements a copy moves, innermost first
    swizzle: int  # bytes: 0, 32, 64 or 128
    l2_promotion: int = 128  # bytes: 0, 64, 128 or 256
    size: int = 128
    align: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointerParam:
    """The address of an array in device memory, which is row-major."""

    name: str  # lse, dlse, softmax_scale, window_left, window_right, or scratch: lse_log2, delta, dq_sum
    dtype: str  # float32 or int32
    dims: tuple[Extent, ...] = ()  # outermost first; none: one element
    pointee_align: int = 4  # bytes: what the kernel assumes of the address
    size: int = 8
    align: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalarParam:
    """A signed 32-bit integer: an extent of the call."""

    name: Extent
    dtype: Literal["int32", "int64"] = "int32"
    size: int = 4
    align: int = 4


KernelParam = MapParam | PointerParam | ScalarParam
