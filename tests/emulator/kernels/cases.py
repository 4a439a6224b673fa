"""Launches of the feature kernels: inputs from a seed, parameters, and the arrays they write. Needs numpy alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["CASES", "Case", "Map"]

SMEM_BYTES = {"sm_90a": 48 * 1024, "sm_100a": 96 * 1024}
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Map:
    """A tensor map of a whole contiguous array; `dims`, `strides` and `box` innermost first, strides in bytes.

    `order` lists the dimensions as memory has them, the fastest first, where that isn't their own order.
    """

    array: str
    dtype: str
    dims: tuple[int, ...]
    box: tuple[int, ...]
    order: tuple[int, ...] = ()
    swizzle: str = "none"
    fills_nan: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes, of all dimensions but the innermost."""
        size = {"u8": 1, "bf16": 2, "f16": 2, "f32": 4}[self.dtype]
        order = self.order or tuple(range(len(self.dims)))
        faster = [order[: order.index(i)] for i in range(1, len(self.dims))]
        return tuple(int(np.prod([self.dims[j] for j in dims])) * size for dims in faster)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One launch of what `build.py` makes of `kernel` and `options`.

    A parameter is a map, the address of an array (its name), or a 32-bit integer.
    """

    name: str
    arch: str = "sm_90a"
    kernel: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    make: Callable[[np.random.Generator], Arrays]
    params: tuple[Map | str | int, ...]
    outputs: tuple[str, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    threads: int = 128  # of a CTA
    dynamic_smem: int | None = None  # bytes of a CTA; None: as much as all feature kernels take
    relative_error: float = 0.0  # allowed by the instruction's documentation; 0: compared bit by bit
    absolute_error: float = 0.0
    is_refused: bool = False  # hardware stops with an error

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return SMEM_BYTES[self.arch] if self.dynamic_smem is None else self.dynamic_smem

    def arrays(self) -> Arrays:
        """Inputs and initial outputs, always the same."""
        return self.make(np.random.default_rng(sum(map(ord, self.name))))


def bits(rng: np.random.Generator, *shape: int, dtype: Any = np.uint32) -> np.ndarray:
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


# copies


def tma_copy(swizzle: int, dtype: str, *, fills_nan: bool = False, is_refused: bool = False, **options: Any) -> Case:
    """The kernel's options; `name` says what they are about."""
    about = options.pop("name", "nan" if fills_nan else "")
    size = {"bf16": 2, "u8": 1, "f32": 4}[dtype]
    columns = max(swizzle, 16) // size
    shape = (40, 2 * columns * size)

    def make(rng: np.random.Generator) -> Arrays:
        # finite floats: the low bits of each element are random, the high byte is not that of a NaN
        x = bits(rng, *shape, dtype=np.uint8)
        if size > 1:
            x[:, size - 1 :: size] &= 0x3F
        return {"x": x, "y": np.full(shape, 0xEE, np.uint8), "dump": np.zeros(24 * columns * size, np.uint32)}

    def described(array: str) -> Map:
        mode = f"{swizzle}B" if swizzle else "none"
        box = (columns, 24)
        return Map(array=array, dtype=dtype, dims=(2 * columns, 40), box=box, swizzle=mode, fills_nan=fills_nan)

    return Case(
        name=f"tma-{dtype}-{swizzle}" + (f"-{about}" if about else ""),
        kernel="TmaCopy",
        options={"swizzle": swizzle, "dtype": dtype, **options},
        make=make,
        params=(described("x"), described("y"), "dump"),
        outputs=("y", "dump"),
        grid=(2, 2, 1),
        is_refused=is_refused,
    )


def small_floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Integers: sums don't depend on the order of the additions."""
    return rng.integers(-99, 99, shape).astype(np.float32)


TMA_REDUCE = Case(
    name="tma-reduce",
    kernel="TmaReduce",
    make=lambda rng: {"x": small_floats(rng, 3, 16, 32), "y": small_floats(rng, 20, 32)},
    params=(Map(array="y", dtype="f32", dims=(32, 20), box=(32, 16), swizzle="128B"), "x"),
    outputs=("y",),
    grid=(3, 1, 1),
)
REFUSED = [
    *(tma_copy(swizzle, "bf16", name="negative", shift=(1, 0), is_refused=True) for swizzle in (0, 64, 128)),
    tma_copy(128, "bf16", name="negative-row", shift=(2, 2), is_refused=True),
    tma_copy(128, "bf16", name="negative-column", shift=(4, 0), is_refused=True),
    tma_copy(0, "bf16", name="negative-row-unswizzled", shift=(2, 2), is_refused=True),
    tma_copy(64, "bf16", name="misaligned", offset=64, is_refused=True),
    dataclasses.replace(TMA_REDUCE, name="tma-reduce-negative-row", options={"row": -1}, is_refused=True),
]
BULK_REDUCE = Case(
    name="bulk-reduce",
    kernel="BulkReduce",
    make=lambda rng: {"x": small_floats(rng, 3, 512), "y": small_floats(rng, 512)},
    params=("x", "y"),
    outputs=("y",),
    grid=(3, 1, 1),
)
MULTICAST = Case(
    name="multicast",
    kernel="Multicast",
    make=lambda rng: {"x": bits(rng, 32, 64, dtype=np.uint16) & 0x3FFF, "dump": np.zeros(4 * 512, np.uint32)},
    params=(Map(array="x", dtype="bf16", dims=(64, 32), box=(64, 8), swizzle="128B"), "dump"),
    outputs=("dump",),
    grid=(4, 1, 1),
    cluster=(2, 1, 1),
)
DSMEM = Case(
    name="dsmem",
    kernel="Dsmem",
    make=lambda rng: {"out": np.zeros(4 * 256, np.uint32)},
    params=("out",),
    outputs=("out",),
    grid=(4, 1, 1),
    cluster=(4, 1, 1),
)
MATRICES = Case(
    name="matrices",
    kernel="Matrices",
    make=lambda rng: {
        "x": bits(rng, 4, 128),
        "dump": np.zeros(6 * 1024, np.uint32),
        "back": np.zeros(24 * 128, np.uint32),
    },
    params=("x", "dump", "back"),
    outputs=("dump", "back"),
)
NAMED_BARRIERS = Case(
    name="named-barriers",
    kernel="NamedBarriers",
    make=lambda rng: {"log": np.zeros(32, np.uint32)},
    params=("log",),
    outputs=("log",),
)

# products

MANTISSA = {"bf16": 7, "f16": 10, "e4m3": 3, "e5m2": 2}
EXPONENT = {"bf16": 8, "f16": 5, "e4m3": 4, "e5m2": 5}


def operand(rng: np.random.Generator, name: str, shape: tuple[int, int], spread: str) -> np.ndarray:
    """Bit patterns: "near" 1, over the "whole" finite range with zeros, or with "special" values among them."""
    if name in ("s8", "u8"):
        return bits(rng, *shape, dtype=np.uint8)
    dtype = np.uint16 if name in ("bf16", "f16") else np.uint8
    mantissa, width = MANTISSA[name], EXPONENT[name]
    top = (1 << width) - 1
    if spread == "near":
        exponent = np.clip(top // 2 - rng.geometric(0.5, shape) + 2, 1, top - 1)
    else:
        exponent = rng.integers(0, top, shape)
    value = rng.integers(0, 1 << mantissa, shape) | exponent << mantissa | rng.integers(0, 2, shape) << mantissa + width
    if spread != "near":
        value = np.where(rng.random(shape) < 0.2, value & 1 << mantissa + width, value)
    if spread == "special":
        nan = top << mantissa | (1 << mantissa) - 1
        value = np.where(rng.random(shape) < 0.02, top << mantissa if name != "e4m3" else nan, value)
        value = np.where(rng.random(shape) < 0.01, nan, value)
    return value.astype(dtype)


def fragment_a(a: np.ndarray) -> np.ndarray:
    """Matrix A [64, k] as registers of 128 threads, [k * bytes / 8, 128] words: four registers per 32 bytes of k."""
    size = a.itemsize
    thread = np.arange(128)
    row, quad = 16 * (thread // 32) + thread % 32 // 4, thread % 4
    words = []
    for block in range(a.shape[1] * size // 32):
        for register in range(4):
            first = 32 // size * block + 4 // size * (quad + 4 * (register >> 1))
            parts = [a[row + 8 * (register & 1), first + i].astype(np.uint32) << 8 * size * i for i in range(4 // size)]
            words.append(np.bitwise_or.reduce(parts))
    return np.stack(words).astype(np.uint32)


def wgmma(a: str, b: str, accumulator: str, *, n: int = 32, k: int = 64, spread: str = "near", **options: Any) -> Case:
    variant = "-".join(str(value) for value in options.values())
    in_registers = options.get("a_in_registers", False)

    def make(rng: np.random.Generator) -> Arrays:
        a_bits, b_bits = operand(rng, a, (64, k), spread), operand(rng, b, (n, k), spread)
        scale = 1 if spread == "near" else 2.0 ** rng.integers(-20, 20, (n // 2, 128))
        d = {
            "f32": lambda: (rng.standard_normal((n // 2, 128)) * scale).astype(np.float32).view(np.uint32),
            "f16": lambda: rng.standard_normal((n // 2, 128)).astype(np.float16).view(np.uint32),
            "s32": lambda: bits(rng, n // 2, 128),
        }[accumulator]()
        return {"a": fragment_a(a_bits) if in_registers else a_bits, "b": b_bits, "d": d}

    return Case(
        name=f"wgmma-{a}-{b}-{accumulator}-{spread}" + (f"-{variant}" if variant else ""),
        kernel="Wgmma",
        options={"a": a, "b": b, "accumulator": accumulator, "n": n, "k": k, **options},
        make=make,
        params=("a", "b", "d"),
        outputs=("d",),
    )


WGMMA = [
    *(wgmma("bf16", "bf16", "f32", swizzle=s, majors="kk") for s in (0, 32, 64, 128)),
    *(wgmma("bf16", "bf16", "f32", swizzle=s, majors="mm", n=64) for s in (32, 64, 128)),
    wgmma("bf16", "bf16", "f32", swizzle=128, majors="km", n=128),
    wgmma("bf16", "bf16", "f32", swizzle=64, majors="mk"),
    wgmma("bf16", "bf16", "f32", swizzle=128, majors="km", n=64, a_in_registers=True),
    wgmma("f16", "f16", "f32", a_in_registers=True),
    wgmma("f16", "f16", "f16"),
    wgmma("e4m3", "e4m3", "f32", swizzle=64),
    wgmma("e5m2", "e4m3", "f32", swizzle=64, a_in_registers=True),
    wgmma("e4m3", "e5m2", "f16", swizzle=64),
    wgmma("s8", "s8", "s32", swizzle=64),
    wgmma("u8", "s8", "s32", swizzle=64),
    *(wgmma(t, t, "f32", spread=s, swizzle=64) for t in MANTISSA for s in ("whole", "special")),
]

# scalars

SPECIAL = np.array(
    [
        *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F800001),  # zeros and ones
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001),  # infinities and NaN
        *(0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000),  # subnormals and the smallest normal numbers
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x4B000000, 0x4F000000, 0xCF000000),  # the largest, and where integers begin and end
        *(0x42FC0000, 0xC2FC0000, 0xC3160000, 0x43800000, 0xC1200000),  # arguments at the ends of exp2
        *(0x477FE000, 0x477FF000, 0x43E00000, 0x33800000, 0x3F000000, 0x40490FDB),  # limits of 16- and 8-bit floats
    ],
    np.uint32,
)


def floats(rng: np.random.Generator, number: int) -> np.ndarray:
    """1024 float32 bit patterns: specials, any bits, and values around 1, in an order that depends on `number`."""
    values = [np.tile(SPECIAL, 8), bits(rng, 384), (rng.standard_normal(384) * 8).astype(np.float32).view(np.uint32)]
    return rng.permutation(np.concatenate(values)) if number else np.concatenate(values)


def scalar(name: str, instruction: str, inputs: str, output: str, **errors: float) -> Case:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = {letter: np.zeros(1024, np.uint32) for letter in "abc"}
        for i, (letter, kind) in enumerate(zip("abc", inputs.split(), strict=False)):
            if kind == "f32":
                arrays[letter] = floats(rng, i)
            elif kind == "lane":
                arrays[letter] = np.arange(1024, dtype=np.uint32) % 32
            else:
                arrays[letter] = bits(rng, 1024, dtype=np.uint16 if kind == "b16" else np.uint32)
        return arrays | {"d": np.zeros(1024, np.uint16 if output == "b16" else np.uint32)}

    return Case(
        name=f"scalar-{name}",
        kernel="Scalar",
        options={"instruction": instruction, "inputs": inputs, "output": output},
        make=make,
        params=("a", "b", "c", "d"),
        outputs=("d",),
        grid=(8, 1, 1),
        **errors,
    )


def unary(opcode: str, **errors: float) -> Case:
    return scalar(opcode, f"{opcode} {{d}}, {{a}};", "f32", "f32", **errors)


def warp_wide(opcode: str, operands: str) -> Case:
    """An instruction whose lanes see each other; the mask is the last operand."""
    return scalar(opcode, f"{opcode} {{d}}, {operands}, 0xFFFFFFFF;", "b32 b32", "b32")


ULP = 2.0**-23
APPROXIMATIONS = {  # (relative, absolute) error of the hardware's function, doubled: the emulator has one, too
    "ex2.approx.f32": (4 * ULP, 0),
    "ex2.approx.ftz.f32": (4 * ULP, 0),
    "rcp.approx.f32": (2 * ULP, 0),
    "rcp.approx.ftz.f32": (2 * ULP, 0),
    "rsqrt.approx.f32": (2 * 2.0**-22.9, 0),
    "rsqrt.approx.ftz.f32": (2 * 2.0**-22.9, 0),
    "lg2.approx.f32": (2.0**-21, 2.0**-21),
    "lg2.approx.ftz.f32": (2.0**-21, 2.0**-21),
    "tanh.approx.f32": (2.0**-10, 0),
}


SCALARS = [
    *(unary(op, relative_error=r, absolute_error=a) for op, (r, a) in APPROXIMATIONS.items()),
    *(unary(op) for op in ("sqrt.rn.f32", "rcp.rn.f32", "cvt.rni.f32.f32", "cvt.rzi.f32.f32", "cvt.rna.tf32.f32")),
    *(unary(f"cvt.{r}.f32.f32") for r in ("rmi", "rpi")),
    *(
        scalar(f"fma.{r}.f32", f"fma.{r}.f32 {{d}}, {{a}}, {{b}}, {{c}};", "f32 f32 f32", "f32")
        for r in ("rn", "rz", "rm", "rp", "rn.ftz", "rn.sat")
    ),
    *(
        scalar(f"{op}.f32", f"{op}.f32 {{d}}, {{a}}, {{b}};", "f32 f32", "f32")
        for op in (
            "add.rn",
            "add.rm",
            "add.rz",
            "sub.rn",
            "mul.rn",
            "mul.rn.ftz",
            "div.rn",
            "min",
            "max",
            "max.NaN",
            "copysign",
        )
    ),
    *(
        scalar(f"cvt.{form}.f32", f"cvt.{form}.f32 {{d}}, {{a}}, {{b}};", "f32 f32", out)
        for form, out in (
            ("rn.bf16x2", "b32"),
            ("rn.f16x2", "b32"),
            ("rz.bf16x2", "b32"),
            ("rn.relu.bf16x2", "b32"),
            ("rn.satfinite.e4m3x2", "b16"),
            ("rn.satfinite.e5m2x2", "b16"),
        )
    ),
    scalar("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e4m3x2 {d}, {a};", "b16", "b32"),
    scalar("cvt.rn.f16x2.e5m2x2", "cvt.rn.f16x2.e5m2x2 {d}, {a};", "b16", "b32"),
    *(scalar(f"cvt.{r}.s32.f32", f"cvt.{r}.s32.f32 {{d}}, {{a}};", "f32", "b32") for r in ("rni", "rzi", "rmi", "rpi")),
    scalar("cvt.rn.f32.s32", "cvt.rn.f32.s32 {d}, {a};", "b32", "f32"),
    scalar("cvt.rn.f32.u32", "cvt.rn.f32.u32 {d}, {a};", "b32", "f32"),
    *(
        scalar(
            f"setp.{c}.f32",
            f"{{ .reg .pred p; setp.{c}.f32 p, {{a}}, {{b}}; selp.b32 {{d}}, 1, 0, p; }}",
            "f32 f32",
            "b32",
        )
        for c in ("eq", "ne", "lt", "gtu", "neu", "num", "nan")
    ),
    scalar("prmt.b32", "prmt.b32 {d}, {a}, {b}, {c};", "b32 b32 b32", "b32"),
    scalar("lop3.b32", "lop3.b32 {d}, {a}, {b}, {c}, 0xD8;", "b32 b32 b32", "b32"),
    scalar("shf.l.wrap.b32", "shf.l.wrap.b32 {d}, {a}, {b}, {c};", "b32 b32 b32", "b32"),
    scalar("shf.r.clamp.b32", "shf.r.clamp.b32 {d}, {a}, {b}, {c};", "b32 b32 b32", "b32"),
    scalar("mul.hi.s32", "mul.hi.s32 {d}, {a}, {b};", "b32 b32", "b32"),
    scalar("bfe.s32", "bfe.s32 {d}, {a}, {b}, {c};", "b32 b32 b32", "b32"),
    scalar("bfi.b32", "bfi.b32 {d}, {a}, {b}, 5, 9;", "b32 b32", "b32"),
    warp_wide("shfl.sync.bfly.b32", "{a}, 5, 31"),
    warp_wide("shfl.sync.up.b32", "{a}, 3, 0"),
    warp_wide("shfl.sync.down.b32", "{a}, 3, 31"),
    warp_wide("shfl.sync.idx.b32", "{a}, {b}, 31"),
    scalar("shfl.sync.idx-in-eights", "shfl.sync.idx.b32 {d}, {a}, {b}, 0x1807, 0xFFFFFFFF;", "b32 b32", "b32"),
    *(warp_wide(f"redux.sync.{op}", "{a}") for op in ("add.s32", "min.s32", "max.u32", "xor.b32")),
    scalar(
        "vote.sync.ballot",
        "{ .reg .pred p; setp.lt.s32 p, {a}, 0; vote.sync.ballot.b32 {d}, p, 0xFFFFFFFF; }",
        "b32",
        "b32",
    ),
    scalar(
        "match.any.sync",
        "{ .reg .b32 v; and.b32 v, {a}, 7; match.any.sync.b32 {d}, v, 0xFFFFFFFF; }",
        "b32",
        "b32",
    ),
    scalar("elect.sync", "{ .reg .pred p; elect.sync {d}|p, 0xFFFFFFFF; }", "b32", "b32"),
    scalar(
        "elect.sync-upper-lanes",
        "{ .reg .pred p, q; mov.b32 {d}, 99; setp.ge.u32 p, {a}, 5; @p elect.sync {d}|q, 0xFFFFFFE0; }",
        "lane",
        "b32",
    ),
]

# our forward kernel, as it was when hardware ran it


def forward(
    name: str, dtype: str, dim: int, q_len: int, kv_len: int, *, heads: int = 1, kv_heads: int = 1, causal: bool = False
) -> Case:
    """Attention [1, length, heads, dim]; `out` has 16-bit patterns."""
    tile_m, tile_n = {64: 192, 128: 128}[dim], 128

    def make(rng: np.random.Generator) -> Arrays:
        def normal(length: int, count: int) -> np.ndarray:
            values = rng.standard_normal((1, length, count, dim)).astype(np.float32)
            is_half = dtype == "f16"
            return values.astype(np.float16).view(np.uint16) if is_half else (values.view(np.uint32) >> 16).astype("u2")

        return {
            "q": normal(q_len, heads),
            "k": normal(kv_len, kv_heads),
            "v": normal(kv_len, kv_heads),
            "out": np.full((1, q_len, heads, dim), 0xFFFF, np.uint16),
            "lse": np.full((1, heads, q_len), np.nan, np.float32),
            "softmax_scale": np.array([dim**-0.5], np.float32),
            "window_right": np.zeros(1, np.int32),
        }

    def described(array: str, length: int, count: int, rows: int) -> Map:
        dims, box = (dim, length, count, 1), (64, rows, 1, 1)
        return Map(array=array, dtype=dtype, dims=dims, box=box, order=(0, 2, 1, 3), swizzle="128B")

    return Case(
        name=f"forward-{name}",
        kernel="forward",
        options={"dtype": dtype, "dim": dim, "causal": causal},
        make=make,
        params=(
            described("q", q_len, heads, 64),
            described("k", kv_len, kv_heads, tile_n),
            described("v", kv_len, kv_heads, tile_n),
            described("out", q_len, heads, 64),
            *("lse", "softmax_scale", *(("window_right",) if causal else ())),
            *(q_len, kv_len, heads, kv_heads, 1),
        ),
        outputs=("out", "lse"),
        grid=(-(-q_len // tile_m) * heads, 1, 1),
        threads=128 + 2 * tile_m,
        dynamic_smem=2 * dim * (tile_m + 4 * tile_n) + 80,
    )


FORWARD = [
    forward("d64-ragged", "bf16", 64, 70, 130),
    forward("d64-causal-grouped", "bf16", 64, 50, 150, heads=2, causal=True),
    forward("d64-causal-unseen", "f16", 64, 200, 77, causal=True),
    forward("d128-ragged", "f16", 128, 65, 200),
    forward("d128-causal-grouped", "bf16", 128, 33, 270, heads=4, kv_heads=2, causal=True),
    forward("d128-causal", "bf16", 128, 140, 140, causal=True),
]

# Blackwell's products

INTEGERS = {"e4m3": (0x00, 0x38, 0x40, 0x44, 0x48), "e5m2": (0x00, 0x3C, 0x40, 0x42, 0x44)}  # 0 to 4 in 8-bit floats


def integer_matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Small integers: products are exact in every type."""
    return rng.integers(-4, 5, (rows, columns)).astype(np.float32)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """Bit patterns of small integers."""
    if name in INTEGERS:
        return (np.array(INTEGERS[name])[np.abs(values).astype(int)] | (values < 0) << 7).astype(np.uint8)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else values.view(np.uint32)


def umma(a: str, b: str, m: int = 128, n: int = 64, k: int = 64, **options: Any) -> Case:
    variant = "-".join(str(value) for value in options.values())

    def make(rng: np.random.Generator) -> Arrays:
        a_values, b_values = integer_matrix(rng, m, k), integer_matrix(rng, n, k)
        return {
            "a": encode(a_values, a),
            "b": encode(b_values, b),
            "d": np.full((m, n), np.nan, np.float32),
            "expected": a_values @ b_values.T,
        }

    ctas = options.get("ctas", 1)
    return Case(
        name=f"umma-{a}-{b}-{m}x{n}x{k}" + (f"-{variant}" if variant else ""),
        arch="sm_100a",
        kernel="Umma",
        options={"a": a, "b": b, "m": m, "n": n, "k": k, **options},
        make=make,
        params=("a", "b", "d"),
        outputs=("d",),
        grid=(ctas, 1, 1),
        cluster=(ctas, 1, 1),
    )


UMMA = [
    *(umma("bf16", "bf16", majors="kk", swizzle=swizzle) for swizzle in (0, 32, 64, 128)),
    *(umma("bf16", "bf16", majors="mm", swizzle=swizzle) for swizzle in (0, 32, 64, 128)),
    umma("f16", "f16", majors="km"),
    umma("f16", "f16", majors="mk"),
    umma("f16", "f16", m=64, load="16x256b", repeat=4),
    umma("tf32", "tf32", n=32, k=32),
    umma("e4m3", "e5m2", n=32, k=128),
    umma("e4m3", "e4m3", n=128, k=128, majors="mm"),
    umma("bf16", "bf16", load="32x32b", repeat=64),
    umma("bf16", "bf16", load="16x64b", repeat=16),
    umma("bf16", "bf16", load="16x128b", repeat=8),
    umma("bf16", "bf16", load="16x256b", repeat=4),
    umma("bf16", "bf16", load="16x32bx2", repeat=8),
    umma("bf16", "bf16", store="32x32b", repeat=8),
    umma("bf16", "bf16", store="16x128b", repeat=2),
    umma("bf16", "bf16", store="16x256b", load="16x256b", repeat=1),
    umma("f16", "f16", m=64, store="16x128b", load="16x256b", repeat=2),
    umma("tf32", "tf32", k=32, store="32x32b", repeat=8),
    umma("e4m3", "e4m3", store="32x32b", swizzle=64, repeat=8),
    umma("bf16", "bf16", m=256, ctas=2),
    umma("bf16", "bf16", m=128, ctas=2),
    umma("bf16", "bf16", m=256, n=128, ctas=2, majors="mm"),
    umma("bf16", "bf16", m=256, ctas=2, store="32x32b", repeat=8),
]

CASES = {
    case.name: case
    for case in (
        *(tma_copy(swizzle, "bf16") for swizzle in (0, 32, 64, 128)),
        tma_copy(128, "f32"),
        tma_copy(64, "u8"),
        *(tma_copy(128, dtype, fills_nan=True) for dtype in ("bf16", "f32")),
        *(tma_copy(128, dtype, name="behind", offset=384) for dtype in ("bf16", "f32")),
        tma_copy(32, "bf16", name="behind", offset=128),
        TMA_REDUCE,
        *REFUSED,
        BULK_REDUCE,
        MULTICAST,
        DSMEM,
        MATRICES,
        NAMED_BARRIERS,
        *WGMMA,
        *SCALARS,
        *FORWARD,
        *UMMA,
    )
}
