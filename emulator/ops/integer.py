"""Integer arithmetic and shifts, PTX ISA 9.7.1 and 9.7.8.

Operands are arrays of 32 lanes; masking and write-back belong to the loop.
"""

import numpy as np

from jax_fa4.emulator.decode import op

ALL = "{u16,s16,u32,s32,u64,s64}"
SIGNED = "{s16,s32,s64}"
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
DTYPE = {"u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}

op(f"add.{ALL}", "$1 = $1 $1")(np.add)
op(f"sub.{ALL}", "$1 = $1 $1")(np.subtract)
op(f"mul.lo.{ALL}", "$1 = $1 $1")(np.multiply)
op(f"min.{ALL}", "$1 = $1 $1")(np.minimum)
op(f"max.{ALL}", "$1 = $1 $1")(np.maximum)
op(f"neg.{SIGNED}", "$1 = $1")(np.negative)
op(f"abs.{SIGNED}", "$1 = $1")(np.absolute)


@op("min.relu.s32", "s32 = s32 s32")
def min_relu(a, b):
    return np.maximum(np.minimum(a, b), 0)


@op("max.relu.s32", "s32 = s32 s32")
def max_relu(a, b):
    return np.maximum(np.maximum(a, b), 0)


@op(f"mad.lo.{ALL}", "$1 = $1 $1 $1")
def mad_lo(a, b, c):
    return a * b + c


def _mul_high(a, b):
    """High half of the double-width product."""
    bits = a.dtype.itemsize * 8
    wide = [(int(x) * int(y)) >> bits for x, y in zip(a, b, strict=True)]
    return np.array([value & ((1 << bits) - 1) for value in wide], f"u{bits // 8}").view(a.dtype)


@op("mul.hi.{u32,s32,u16,s16}", "$1 = $1 $1")
def mul_hi(a, b):
    wide = np.uint64 if a.dtype.kind == "u" else np.int64
    return (a.astype(wide) * b.astype(wide) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)


op("mul.hi.{u64,s64}", "$1 = $1 $1")(_mul_high)


@op("mad.hi.{u32,s32}", "$1 = $1 $1 $1")
def mad_hi(a, b, c):
    return mul_hi(a, b) + c


def _register_wide(narrow: str, wide: str) -> None:
    dtype = DTYPE[wide]

    @op(f"mul.wide.{narrow}", f"{wide} = {narrow} {narrow}")
    def mul_wide(a, b):
        return np.multiply(a, b, dtype=dtype)

    @op(f"mad.wide.{narrow}", f"{wide} = {narrow} {narrow} {wide}")
    def mad_wide(a, b, c):
        return np.multiply(a, b, dtype=dtype) + c


for _narrow, _wide in WIDER.items():
    _register_wide(_narrow, _wide)


@op(f"div.{ALL}", "$1 = $1 $1")
def div(a, b):
    """Towards zero; by zero the result is unspecified, as on hardware all ones."""
    safe = np.where(b == 0, np.ones_like(b), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * safe != a))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


@op(f"rem.{ALL}", "$1 = $1 $1")
def rem(a, b):
    return np.where(b == 0, a, a - div(a, b) * b)


@op("sad.{u32,s32}", "$1 = $1 $1 $1")
def sad(a, b, c):
    return c + np.where(a > b, a - b, b - a)


@op("shl.{b16,b32,b64}", "$1 = $1 u32")
def shl(a, amount):
    bits = 8 * a.dtype.itemsize
    return np.where(amount < bits, a << (amount & (bits - 1)).astype(a.dtype), a.dtype.type(0))


@op("shr.{b16,b32,b64,u16,u32,u64}", "$1 = $1 u32")
def shr(a, amount):
    bits = 8 * a.dtype.itemsize
    return np.where(amount < bits, a >> (amount & (bits - 1)).astype(a.dtype), a.dtype.type(0))


@op("shr.{s16,s32,s64}", "$1 = $1 u32")
def shr_signed(a, amount):
    return a >> np.minimum(amount, 8 * a.dtype.itemsize - 1).astype(a.dtype)


def _funnel_amount(c, mode):
    return (c & 31 if mode == "wrap" else np.minimum(c, 32)).astype(np.uint64)


def _register_funnel(mode: str) -> None:
    @op(f"shf.l.{mode}.b32", "b32 = b32 b32 u32")
    def shf_l(a, b, c):
        """High word of (b:a) << c."""
        both = b.astype(np.uint64) << np.uint64(32) | a
        return ((both << _funnel_amount(c, mode)) >> np.uint64(32)).astype(np.uint32)

    @op(f"shf.r.{mode}.b32", "b32 = b32 b32 u32")
    def shf_r(a, b, c):
        """Low word of (b:a) >> c."""
        both = b.astype(np.uint64) << np.uint64(32) | a
        return (both >> _funnel_amount(c, mode)).astype(np.uint32)


for _mode in ("wrap", "clamp"):
    _register_funnel(_mode)


@op("bfind.{u32,s32}", "u32 = $1")
def bfind(a):
    """Position of the highest bit that differs from the sign; all ones if there is none."""
    bits = np.where(a < 0, ~a, a).astype(np.uint32)
    return np.where(bits == 0, np.uint32(0xFFFFFFFF), np.floor(np.log2(np.maximum(bits, 1))).astype(np.uint32))


@op("popc.{b32,b64}", "u32 = $1")
def popc(a):
    return np.bitwise_count(a).astype(np.uint32)


@op("clz.{b32,b64}", "u32 = $1")
def clz(a):
    bits = 8 * a.dtype.itemsize
    return np.array([bits - int(x).bit_length() for x in a], np.uint32)


@op("brev.{b32,b64}", "$1 = $1")
def brev(a):
    bits = 8 * a.dtype.itemsize
    return np.array([int(f"{int(x):0{bits}b}"[::-1], 2) for x in a], a.dtype)


def _field(position, length):
    return position & np.uint32(0xFF), length & np.uint32(0xFF)


@op("bfe.{u32,u64,s32,s64}", "$1 = $1 u32 u32")
def bfe(a, position, length):
    """Bits position .. position + length - 1, zero- or sign-extended; beyond the top the sign (or 0) fills."""
    bits = 8 * a.dtype.itemsize
    pos, count = _field(position, length)
    result = []
    for x, p, n in zip(a, pos, count, strict=True):
        value = int(x)  # a Python integer: sign bits go on for ever
        wanted = (value >> int(p)) & ((1 << int(n)) - 1)
        if a.dtype.kind == "i" and n:
            sign = value >> min(int(p) + int(n) - 1, bits - 1) & 1
            top = max(min(int(n), bits - int(p)), 0)
            wanted = (wanted & ((1 << top) - 1)) - (sign << top)
        result.append(wanted & ((1 << bits) - 1))
    return np.array(result, f"u{bits // 8}").view(a.dtype)


@op("bfi.{b32,b64}", "$1 = $1 $1 u32 u32")
def bfi(a, b, position, length):
    """The low `length` bits of a, put into b at `position`."""
    bits = 8 * a.dtype.itemsize
    pos, count = _field(position, length)
    field = [((1 << int(n)) - 1) << int(p) & ((1 << bits) - 1) for p, n in zip(pos, count, strict=True)]
    moved = [int(x) << int(p) & ((1 << bits) - 1) for x, p in zip(a, pos, strict=True)]
    mask = np.array(field, a.dtype)
    return np.array(moved, a.dtype) & mask | b & ~mask
