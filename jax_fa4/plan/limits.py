"""What a plan may hold: the driver's limits, the library's, and the element types that both know."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BLOCK_LIMIT",
    "BOX_BYTES_MULTIPLE",
    "BOX_LIMIT",
    "CLUSTER_LIMIT",
    "DTYPES",
    "INT64_MAX",
    "INT64_MIN",
    "MAX_BUFFERS",
    "MAX_ENTRY",
    "MAX_EXPR_DEPTH",
    "MAX_EXPR_OPS",
    "MAX_LAUNCHES",
    "MAX_NAME",
    "MAX_PARAMS",
    "MAX_PARAM_BYTES",
    "MAX_TAIL",
    "MAX_TENSOR_MAPS",
    "SMEM_LIMIT",
    "TENSOR_RANK_LIMIT",
    "Dtype",
    "check",
]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
SMEM_LIMIT = 227 * 1024  # bytes a CTA may opt into, sm_90 and sm_100
BLOCK_LIMIT = 1024  # threads a CTA, CUDA programming guide
CLUSTER_LIMIT = 16  # CTAs a cluster; more than 8 is allowed kernel by kernel ("non-portable")
TENSOR_RANK_LIMIT = 5  # cuTensorMapEncodeTiled
BOX_LIMIT = 256  # elements of a box along one axis, cuTensorMapEncodeTiled
BOX_BYTES_MULTIPLE = 16  # of a box's innermost extent, cuTensorMapEncodeTiled
# Sizes of the library's storage, fixed so that a launch allocates nothing: ffi/limits.h has the same numbers.
MAX_BUFFERS, MAX_LAUNCHES, MAX_PARAMS, MAX_TENSOR_MAPS, MAX_PARAM_BYTES = 64, 8, 64, 16, 4096
MAX_EXPR_OPS, MAX_EXPR_DEPTH, MAX_TAIL = 255, 16, 8
MAX_ENTRY, MAX_NAME = 4095, 255  # bytes of a kernel's entry and of a buffer's name


class Dtype(NamedTuple):
    """A buffer's element type as XLA numbers it."""

    code: int  # xla.PrimitiveType
    itemsize: int  # bytes
    in_tensor_map: bool  # TMA copies it; one-byte types travel as uint8


DTYPES = {
    "bool": Dtype(1, 1, True),
    "int8": Dtype(2, 1, True),
    "int16": Dtype(3, 2, False),
    "int32": Dtype(4, 4, True),
    "int64": Dtype(5, 8, True),
    "uint8": Dtype(6, 1, True),
    "uint16": Dtype(7, 2, True),
    "uint32": Dtype(8, 4, True),
    "uint64": Dtype(9, 8, True),
    "float16": Dtype(10, 2, True),
    "float32": Dtype(11, 4, True),
    "float64": Dtype(12, 8, True),
    "bfloat16": Dtype(16, 2, True),
    "float8_e5m2": Dtype(19, 1, True),
    "float8_e4m3fn": Dtype(20, 1, True),
}


def check(ok: bool, what: str, expected: str, got: object) -> None:
    """Raises ValueError in the package's one form: what must be what, and what it is."""
    if not ok:
        raise ValueError(f"{what} must be {expected}, got {got!r}")
