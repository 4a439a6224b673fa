"""Kernel parameters of a launch: tensor maps, pointers, scalars and structs, bound to the call's buffers by number."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from jax_fa4.plan.expr import Expr, ExprLike, as_expr, check_buffer, set_exprs
from jax_fa4.plan.limits import (
    BOX_BYTES_MULTIPLE,
    BOX_LIMIT,
    DTYPES,
    MAX_PARAM_BYTES,
    MAX_PARAMS,
    TENSOR_RANK_LIMIT,
    check,
)

__all__ = ["Param", "Pointer", "Record", "RecordField", "Scalar", "ScalarType", "TensorMap"]

ScalarType = Literal["i32", "u32", "i64", "f32"]
SCALAR_BYTES: dict[str, int] = {"i32": 4, "u32": 4, "i64": 8, "f32": 4}
POINTER_BYTES, TENSOR_MAP_BYTES = 8, 128
ALIGNMENTS = tuple(2**n for n in range(9))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A CUtensorMap (128 bytes by value) over one buffer; all lists run from the innermost axis outwards.

    An empty map (a buffer without elements, or a zero among `dims`) is replaced by a valid one of a single element,
    which the kernel's own bounds keep it from touching.
    """

    buffer: int
    dtype: str
    dims: tuple[ExprLike, ...]  # elements, rank 1 to 5
    strides: tuple[ExprLike, ...] = ()  # bytes, of all axes but the innermost (dense); multiples of 16, < 2^40
    box: tuple[int, ...]  # elements that one copy moves
    swizzle: Literal[0, 32, 64, 128] = 0  # bytes of the pattern; the box's innermost extent must fit it
    l2_promotion: Literal[0, 64, 128, 256] = 128  # bytes an L2 miss fetches
    offset: ExprLike = 0  # bytes from the buffer's start; the address must be a multiple of 16

    def __post_init__(self) -> None:
        check_buffer(self.buffer)
        check(self.dtype in DTYPES and DTYPES[self.dtype].in_tensor_map, "dtype", "one that TMA copies", self.dtype)
        rank = len(self.dims)
        check(1 <= rank <= TENSOR_RANK_LIMIT, "rank", f"in [1, {TENSOR_RANK_LIMIT}]", rank)
        check(len(self.strides) == rank - 1, "len(strides)", f"rank - 1 = {rank - 1}", len(self.strides))
        check(len(self.box) == rank, "len(box)", f"rank = {rank}", len(self.box))
        check(all(1 <= b <= BOX_LIMIT for b in self.box), "box", f"in [1, {BOX_LIMIT}]", self.box)
        check(self.swizzle in (0, 32, 64, 128), "swizzle", "0, 32, 64 or 128", self.swizzle)
        check(self.l2_promotion in (0, 64, 128, 256), "l2_promotion", "0, 64, 128 or 256", self.l2_promotion)
        row = self.box[0] * DTYPES[self.dtype].itemsize
        check(row % BOX_BYTES_MULTIPLE == 0, "a row of the box", f"a multiple of {BOX_BYTES_MULTIPLE} bytes", row)
        check(row <= (self.swizzle or row), "a row of the box", f"<= {self.swizzle} bytes (swizzle)", row)
        set_exprs(self, "dims", "strides", "offset")

    @property
    def size(self) -> int:
        """Bytes of the kernel parameter."""
        return TENSOR_MAP_BYTES

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression in it."""
        return tuple(as_expr(e) for e in (*self.dims, *self.strides, self.offset))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pointer:
    """Address of a buffer's byte `offset`, 8 bytes."""

    buffer: int
    offset: ExprLike = 0  # bytes
    extent: ExprLike | None = None  # bytes that the kernel may touch from there on, checked against the buffer's size
    align: int = 1  # bytes, a power of two: what the kernel assumes of the address

    def __post_init__(self) -> None:
        check_buffer(self.buffer)
        check(self.align in ALIGNMENTS, "align", "a power of two up to 256", self.align)
        set_exprs(self, *(("offset",) if self.extent is None else ("offset", "extent")))

    @property
    def size(self) -> int:
        """Bytes of the kernel parameter."""
        return POINTER_BYTES

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression in it."""
        return tuple(as_expr(e) for e in (self.offset, self.extent) if e is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalar:
    """A number by value: an expression that must fit its integer type, or a float constant for f32."""

    dtype: ScalarType
    value: ExprLike | float

    def __post_init__(self) -> None:
        check(self.dtype in SCALAR_BYTES, "dtype", "i32, u32, i64 or f32", self.dtype)
        if self.dtype == "f32":
            check(isinstance(self.value, (int, float)), "an f32", "a number", self.value)
            object.__setattr__(self, "value", float(self.value))  # type: ignore[arg-type]  # checked one line above
        else:
            check(isinstance(self.value, (int, Expr)), f"an {self.dtype}", "an int or an expression", self.value)
            set_exprs(self, "value")

    @property
    def size(self) -> int:
        """Bytes of the kernel parameter."""
        return SCALAR_BYTES[self.dtype]

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression in it."""
        return (self.value,) if isinstance(self.value, Expr) else ()


class RecordField(NamedTuple):
    """A member of a struct parameter."""

    offset: int  # bytes
    value: Scalar | Pointer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A struct by value; bytes that no field covers are zero."""

    size: int  # bytes
    fields: tuple[RecordField | tuple[int, Scalar | Pointer], ...]  # in order of their offsets

    def __post_init__(self) -> None:
        check(1 <= self.size <= MAX_PARAM_BYTES, "size", f"in [1, {MAX_PARAM_BYTES}]", self.size)
        check(len(self.fields) <= MAX_PARAMS, "len(fields)", f"<= {MAX_PARAMS}", len(self.fields))
        object.__setattr__(self, "fields", tuple(RecordField(*f) for f in self.fields))
        end = 0
        for offset, value in self.fields:
            check(isinstance(value, (Scalar, Pointer)), "a field", "a scalar or a pointer", value)
            check(offset >= end, "a field's offset", f">= {end}, where the one before ends", offset)
            end = offset + value.size
        check(end <= self.size, "the last field's end", f"<= size = {self.size}", end)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every expression in it."""
        return tuple(e for _, value in self.fields for e in value.exprs)


Param = TensorMap | Pointer | Scalar | Record
