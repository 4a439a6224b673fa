"""Blackwell's matrix products: descriptors of operands in shared memory, and batches of tcgen05.mma on a whole tile.

A tile in shared memory is cut into slabs, one behind the other, whose rows are as wide as its swizzle: 128, 64 or 32
bytes. Within 8 rows, 16-byte pieces trade places by their row.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64, Numeric
from cutlass.cute.nvgpu import tcgen05

from ..core.divide import divide, divide_with_rest
from ..core.ptx import asm
from ..core.seqlen import Index

__all__ = ["Instruction", "Operand", "by_columns", "by_rows", "issue", "layout", "piece"]

M = 128  # rows of a product in each CTA, a lane of tensor memory each
K_EXTENT = 16  # of one instruction with 16-bit operands
ATOM_ROWS = 8
PIECE = 8  # 16-bit elements that stay together
SWIZZLE_CODES = {128: 2, 64: 4, 32: 6}  # descriptor bits 61-63
NEGATE_A = 1 << 13  # of an instruction descriptor


def swizzle_width(columns: int) -> int:
    """Bytes of a slab's row: the widest pattern that divides a row of 16-bit elements."""
    return next(width for width in SWIZZLE_CODES if columns * 2 % width == 0)


def layout(dtype: type[Numeric], rows: int, columns: int) -> cute.ComposedLayout:
    """(rows, columns) of a tile as tensor copies write and read it."""
    kind = getattr(tcgen05.SmemLayoutAtomKind, f"K_SW{swizzle_width(columns)}")
    return cute.tile_to_shape(tcgen05.make_smem_layout_atom(kind, dtype), (rows, columns), order=(0, 1))


def piece(row: Int32, column: Index, rows: int, columns: int) -> Int32:
    """Element, from the start of a tile, of the 16-byte piece at (row, column)."""
    width = swizzle_width(columns)
    slab, rest = divide_with_rest(column, width // 2)
    within = divide(rest, PIECE)
    pattern = row // (ATOM_ROWS * 16 // width) % (width // 16)
    return slab * (rows * width // 2) + row * (width // 2) + (pattern ^ within) * PIECE


class Operand(NamedTuple):
    """A matrix in shared memory as tcgen05.mma reads it: the constant part of descriptors, and steps between them."""

    constant: int  # descriptor with address 0
    steps: tuple[int, ...]  # of each instruction's part along K, in bytes from the start

    def descriptor(self, tile: cute.Pointer) -> Int64:
        """The descriptor of the first instruction's part of a tile."""
        return Int64(self.constant) + Int64(tile.toint() >> 4)


def by_rows(rows: int, columns: int) -> Operand:
    """A tile whose columns are the contracted index: Q, K."""
    width = swizzle_width(columns)
    steps = tuple(k // width * rows * width + k % width for k in range(0, columns * 2, K_EXTENT * 2))
    return Operand(_descriptor(width, leading=16), steps)


def by_columns(rows: int, columns: int) -> Operand:
    """A tile whose rows are the contracted index: V."""
    width = swizzle_width(columns)
    steps = tuple(k * width for k in range(0, rows, K_EXTENT))
    return Operand(_descriptor(width, leading=rows * width), steps)


def _descriptor(width: int, leading: int) -> int:
    """`leading`: bytes from one slab to the next, where the contracted index runs along rows."""
    version = 1 << 46
    constant = leading >> 4 << 16 | ATOM_ROWS * width >> 4 << 32 | version | SWIZZLE_CODES[width] << 61
    return constant - (1 << 64) if constant >> 63 else constant


class Instruction(NamedTuple):
    """D[m, n] (+)= A B, float32; the descriptor's fields are those of the PTX ISA, tcgen05.mma kind::f16.

    Of a pair of CTAs (`cta_group=2`) each has 128 of 256 rows of A and D, and half of B: rows or columns.
    """

    dtype: type[Numeric]
    n: int
    b_by_columns: bool
    cta_group: int

    @property
    def descriptor(self) -> int:
        """As 32 bits."""
        kind = 1 if self.dtype is BFloat16 else 0
        accumulator = 1  # float32
        bits = accumulator << 4 | kind << 7 | kind << 10 | self.b_by_columns << 16
        return bits | self.n >> 3 << 17 | M * self.cta_group >> 4 << 24


def issue(
    instruction: Int32,
    d: Int32,
    a: Int32 | Int64,
    b: Int64,
    steps: tuple[tuple[int, int], ...],
    *,
    cta_group: int,
    accumulate: bool | Boolean,
) -> None:
    """Issues D (+)= A B over `steps` of K, from one lane; the whole warp calls it.

    `d`: address in tensor memory; `a` the same, or a descriptor, as `b` is. `steps`: where each instruction's parts of
    A and B start, in columns of tensor memory or bytes of shared memory. The first one overwrites D unless
    `accumulate`.
    """
    a_in_tmem = isinstance(a, Int32)
    lines = [
        "{",
        ".reg .pred leader, sum;",
        ".reg .b64 a_desc, b_desc;",
        "elect.sync _|leader, -1;",
        "setp.ne.b32 sum, $4, 0;",
    ]
    for i, (a_step, b_step) in enumerate(steps):
        if a_in_tmem:
            part = f"[$1 + {a_step}]"
        else:
            lines.append(f"add.s64 a_desc, $1, {a_step >> 4};")
            part = "a_desc"
        lines.append(f"add.s64 b_desc, $2, {b_step >> 4};")
        enable = "sum" if i == 0 else "1"
        lines.append(f"@leader tcgen05.mma.cta_group::{cta_group}.kind::f16 [$0], {part}, b_desc, $3, {enable};")
    lines.append("}")
    asm("\n".join(lines), [d, a, b, instruction, Int32(accumulate)])
