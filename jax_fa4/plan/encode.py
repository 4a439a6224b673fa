"""Plans and cubin images as bytes: the two attributes of the custom call, which ffi/plan.cc and ffi/registry.cc read.

All numbers are little-endian. `str` is a u16 length and UTF-8; `list` is a u8 count and its items; `expr` is a list of
postfix operations. A change of the format needs a new VERSION.

    plan        "FA4P", u16 version, list of variants (one an architecture)
    variant     str arch, list of str symbols, u8 operands, u8 results, their buffers, list of launches
    buffer      str name, u8 dtype, u8 batched, list of axes: u8 0 (any) | u8 1, varint size | u8 2, u8 symbol
    launch      32 bytes key, str entry, 3 expr grid, u16 block, 3 u8 cluster, u32 smem_bytes, u8 programmatic,
                list of params: u8 kind (0 to 3, in the order below) and its fields
    tensor map  u8 buffer, u8 dtype, u8 rank, rank expr dims, rank - 1 expr strides, rank u16 box, u8 swizzle,
                u16 l2_promotion, expr offset
    pointer     u8 buffer, u16 align, expr offset, u8 has_extent, [expr extent]
    scalar      u8 type, expr or f32
    record      u16 size, list of fields: u16 offset, param (pointer or scalar)
    operation   u8 code, then: const varint | dim u8 buffer, u8 axis from the end | lead u8 buffer, u8 count | nothing
    images      "FA4I", u16 version, u16 count, each 32 bytes key, u32 size, the cubin

A varint is LEB128 of the zigzag code, so that small magnitudes of either sign take one byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_fa4.plan.expr import Binary, Const, Dim, Expr, ExprLike, Lead, Multiprocessors, as_expr, postfix
from jax_fa4.plan.limits import DTYPES
from jax_fa4.plan.params import Param, Pointer, Record, Scalar, TensorMap
from jax_fa4.plan.plan import BufferSpec, Launch, Plan

__all__ = ["encode", "encode_images"]

PLAN_MAGIC, IMAGES_MAGIC, VERSION = b"FA4P", b"FA4I", 1
MAX_VARIANTS = 8
OPERATORS = ("const", "dim", "lead", "add", "sub", "mul", "floor_div", "ceil_div", "min", "max", "multiprocessors")
OPCODES = {operator: code for code, operator in enumerate(OPERATORS)}
SCALAR_CODES = {"i32": 0, "u32": 1, "i64": 2, "f32": 3}
ANY_SIZE, EXACT_SIZE, NAMED_SIZE = range(3)
TENSOR_MAP, POINTER, SCALAR, RECORD = range(4)


def encode(plans: Plan | Sequence[Plan]) -> bytes:
    """The `plan` attribute: one plan, or one for each architecture, of which the library takes the device's.

    Raises:
      ValueError: no plan, too many, or two for one architecture.
    """
    variants = (plans,) if isinstance(plans, Plan) else tuple(plans)
    archs = [plan.arch for plan in variants]
    if not 1 <= len(variants) <= MAX_VARIANTS or len(set(archs)) != len(archs):
        raise ValueError(f"plans must be 1 to {MAX_VARIANTS} of different architectures, got {archs}")
    return PLAN_MAGIC + struct.pack("<H", VERSION) + _list(variants, _variant)


def encode_images(images: Mapping[str, bytes]) -> bytes:
    """The `images` attribute of an exported program: cubins by key, in the keys' order: equal sets give equal bytes."""

    def image(key: str) -> bytes:
        return bytes.fromhex(key) + struct.pack("<I", len(images[key])) + images[key]

    return IMAGES_MAGIC + struct.pack("<HH", VERSION, len(images)) + b"".join(map(image, sorted(images)))


def _list(items: Sequence[Any], encode_item: Callable[[Any], bytes]) -> bytes:
    return bytes((len(items),)) + b"".join(map(encode_item, items))


def _str(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<H", len(raw)) + raw


def _varint(value: int) -> bytes:
    code = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while code > 0x7F:
        out.append(code & 0x7F | 0x80)
        code >>= 7
    return bytes((*out, code))


def _expr(expr: ExprLike) -> bytes:
    return _list(tuple(postfix(as_expr(expr))), _operation)


def _operation(node: Expr) -> bytes:
    match node:
        case Const(value):
            return bytes((OPCODES["const"],)) + _varint(value)
        case Dim(buffer, axis):
            return bytes((OPCODES["dim"], buffer, -axis))
        case Lead(buffer, count):
            return bytes((OPCODES["lead"], buffer, count))
        case Multiprocessors():
            return bytes((OPCODES["multiprocessors"],))
        case Binary(operator, _, _):
            return bytes((OPCODES[operator],))
    raise TypeError(f"not an expression: {node!r}")


def _variant(plan: Plan) -> bytes:
    symbols = plan.symbols
    return b"".join(
        (
            _str(plan.arch),
            _list(symbols, _str),
            bytes((len(plan.operands), len(plan.results))),
            *(_buffer(spec, symbols) for spec in plan.buffers),
            _list(plan.launches, _launch),
        )
    )


def _buffer(spec: BufferSpec, symbols: Sequence[str]) -> bytes:
    def axis(size: int | str | None) -> bytes:
        if size is None:
            return bytes((ANY_SIZE,))
        if isinstance(size, str):
            return bytes((NAMED_SIZE, symbols.index(size)))
        return bytes((EXACT_SIZE,)) + _varint(size)

    return _str(spec.name) + bytes((DTYPES[spec.dtype].code, spec.batched)) + _list(spec.shape, axis)


def _launch(launch: Launch) -> bytes:
    return b"".join(
        (
            bytes.fromhex(launch.cubin),
            _str(launch.entry),
            *map(_expr, launch.grid),
            struct.pack("<H3BIB", launch.block, *launch.cluster, launch.smem_bytes, launch.programmatic),
            _list(launch.params, _param),
        )
    )


def _param(param: Param) -> bytes:
    match param:
        case TensorMap():
            return bytes((TENSOR_MAP,)) + _tensor_map(param)
        case Pointer():
            extent = b"\0" if param.extent is None else b"\1" + _expr(param.extent)
            return struct.pack("<BBH", POINTER, param.buffer, param.align) + _expr(param.offset) + extent
        case Scalar(dtype=dtype, value=value):
            number = struct.pack("<f", value) if isinstance(value, float) else _expr(value)
            return bytes((SCALAR, SCALAR_CODES[dtype])) + number
        case Record():
            fields = _list(param.fields, lambda field: struct.pack("<H", field[0]) + _param(field[1]))
            return struct.pack("<BH", RECORD, param.size) + fields
    raise TypeError(f"not a parameter: {param!r}")


def _tensor_map(param: TensorMap) -> bytes:
    return b"".join(
        (
            bytes((param.buffer, DTYPES[param.dtype].code, len(param.dims))),
            *map(_expr, (*param.dims, *param.strides)),
            struct.pack(f"<{len(param.box)}HBH", *param.box, param.swizzle, param.l2_promotion),
            _expr(param.offset),
        )
    )
