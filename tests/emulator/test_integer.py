"""Integer and logic instructions, each against Python integers."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from .snippet import evaluate

RNG = np.random.default_rng(0)
EDGES = [
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFFFF,
    0x80000000,
]
WIDTHS = {"16": "h", "32": "r", "64": "d"}


def values(bits: int, seed: int = 0) -> np.ndarray:
    """32 values: edges and random ones, as unsigned patterns."""
    rng = np.random.default_rng(seed)
    edges = [edge & ((1 << bits) - 1) for edge in EDGES] + [(1 << bits) - 1, (1 << bits) - 2]
    found = [*edges, *(int(rng.integers(0, 1 << 62)) * 4 & ((1 << bits) - 1) for _ in range(32 - len(edges)))]
    return rng.permutation(np.array(found, np.uint64)).astype(f"u{bits // 8}")


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 & 1 else value


def as_python(array: np.ndarray, kind: str) -> list[int]:
    bits = int(kind[1:])
    return [signed(int(x), bits) if kind[0] == "s" else int(x) for x in array]


def check(opcode: str, kinds: tuple[str, ...], result: str, expected, third=None) -> None:
    """Run `opcode result, a, b, ...` with operands of `kinds` and compare with `expected(a, b, ...)`."""
    arrays = [values(int(kind[1:]), seed) for seed, kind in enumerate(kinds)]
    if third is not None:
        arrays[-1] = np.asarray(third, arrays[-1].dtype)
    names = [f"{WIDTHS[kind[1:]]}{1 + index}" for index, kind in enumerate(kinds)]
    bits = int(result[1:])
    output = f"{WIDTHS[result[1:]]}20"
    inputs = dict(zip(names, arrays, strict=True))
    found = evaluate(f"{opcode} %{output}, {', '.join('%' + name for name in names)};", inputs, output, f"u{bits // 8}")
    rows = zip(*(as_python(array, kind) for array, kind in zip(arrays, kinds, strict=True)), strict=True)
    assert [int(x) for x in found] == [expected(*row) & ((1 << bits) - 1) for row in rows]


KINDS = ["u16", "s16", "u32", "s32", "u64", "s64"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "function"),
    [("add", operator.add), ("sub", operator.sub), ("mul.lo", operator.mul), ("min", min), ("max", max)],
)
def test_two_operands_wrap_at_the_type(name, function, kind):
    check(f"{name}.{kind}", (kind, kind), kind, function)


@pytest.mark.parametrize("kind", KINDS)
def test_mad_adds_the_low_product(kind):
    check(f"mad.lo.{kind}", (kind, kind, kind), kind, lambda a, b, c: a * b + c)


@pytest.mark.parametrize("kind", KINDS)
def test_mul_hi_is_the_upper_half(kind):
    check(f"mul.hi.{kind}", (kind, kind), kind, lambda a, b: a * b >> int(kind[1:]))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mul_wide_is_the_whole_product(kind):
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    check(f"mul.wide.{kind}", (kind, kind), wide, operator.mul)
    check(f"mad.wide.{kind}", (kind, kind, wide), wide, lambda a, b, c: a * b + c)


@pytest.mark.parametrize("kind", KINDS)
def test_division_goes_towards_zero(kind):
    def quotient(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1

    check(f"div.{kind}", (kind, kind), kind, quotient)
    check(f"rem.{kind}", (kind, kind), kind, lambda a, b: a - quotient(a, b) * b if b else a)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_neg_and_abs(kind):
    check(f"neg.{kind}", (kind,), kind, operator.neg)
    check(f"abs.{kind}", (kind,), kind, abs)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp_their_amount(bits):
    amount = [*range(30), 64, 1 << 31]
    check(f"shl.b{bits}", (f"u{bits}", "u32"), f"u{bits}", lambda a, n: a << min(n, bits), amount)
    check(f"shr.u{bits}", (f"u{bits}", "u32"), f"u{bits}", lambda a, n: a >> min(n, bits), amount)
    check(f"shr.s{bits}", (f"s{bits}", "u32"), f"s{bits}", lambda a, n: a >> min(n, bits), amount)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    amount = [0, 1, 5, 31, 32, 33, 63, 64, *range(24)]

    def n(c):
        return c & 31 if mode == "wrap" else min(c, 32)

    check(f"shf.l.{mode}.b32", ("u32", "u32", "u32"), "u32", lambda a, b, c: (b << 32 | a) << n(c) >> 32, amount)
    check(f"shf.r.{mode}.b32", ("u32", "u32", "u32"), "u32", lambda a, b, c: (b << 32 | a) >> n(c), amount)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize(("name", "function"), [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)])
def test_logic(name, function, bits):
    check(f"{name}.b{bits}", (f"u{bits}", f"u{bits}"), f"u{bits}", function)
    check(f"not.b{bits}", (f"u{bits}",), f"u{bits}", operator.invert)
    check(f"cnot.b{bits}", (f"u{bits}",), f"u{bits}", lambda a: a == 0)


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits):
    check(f"popc.b{bits}", (f"u{bits}",), "u32", int.bit_count)
    check(f"clz.b{bits}", (f"u{bits}",), "u32", lambda a: bits - a.bit_length())
    check(f"brev.b{bits}", (f"u{bits}",), f"u{bits}", lambda a: int(f"{a:0{bits}b}"[::-1], 2))


def test_bfind_gives_the_highest_bit_that_is_not_sign():
    check("bfind.u32", ("u32",), "u32", lambda a: a.bit_length() - 1)
    check("bfind.s32", ("s32",), "u32", lambda a: (~a if a < 0 else a).bit_length() - 1)


def _extracted(a: int, position: int, length: int, bits: int, kind: str) -> int:
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    sign = a >> min(position + length - 1, bits - 1) & 1 if kind == "s" else 0
    pattern = a & ((1 << bits) - 1)
    result = 0
    for i in range(bits):
        inside = i < length and position + i < bits
        result |= (pattern >> position + i & 1 if inside else sign) << i
    return result


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe_extends_what_it_extracts(kind):
    bits = int(kind[1:])
    positions, lengths = RNG.integers(0, 70, 32).astype(np.uint32), RNG.integers(0, 40, 32).astype(np.uint32)
    a = values(bits)
    name = WIDTHS[kind[1:]]
    found = evaluate(
        f"bfe.{kind} %{name}20, %{name}1, %r2, %r3;",
        {f"{name}1": a, "r2": positions, "r3": lengths},
        f"{name}20",
        f"u{bits // 8}",
    )
    rows = zip(as_python(a, kind), positions, lengths, strict=True)
    assert [int(x) for x in found] == [_extracted(x, int(p), int(n), bits, kind[0]) for x, p, n in rows]


def test_bfi_inserts_the_low_bits():
    positions, lengths = RNG.integers(0, 40, 32).astype(np.uint32), RNG.integers(0, 40, 32).astype(np.uint32)
    a, b = values(32, 1), values(32, 2)
    found = evaluate(
        "bfi.b32 %r20, %r1, %r2, %r3, %r4;", {"r1": a, "r2": b, "r3": positions, "r4": lengths}, "r20", np.uint32
    )
    for x, y, p, n, result in zip(a, b, positions, lengths, found, strict=True):
        field = sum(1 << i for i in range(32) if p <= i < p + n)
        assert int(result) == int(y) & ~field | int(x) << int(p) & field


@pytest.mark.parametrize("table", [0x00, 0xFF, 0xF0, 0xCC, 0xAA, 0xE8, 0x96, 0x1B])
def test_lop3_looks_bits_up_in_its_table(table):
    def looked_up(a, b, c):
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    a, b, c = (values(32, seed) for seed in range(3))
    found = evaluate(f"lop3.b32 %r20, %r1, %r2, %r3, {table};", {"r1": a, "r2": b, "r3": c}, "r20", np.uint32)
    assert [int(x) for x in found] == [looked_up(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]


def _permuted(a: int, b: int, c: int) -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    picked = []
    for i in range(4):
        selector = c >> 4 * i & 15
        byte = data[selector & 7]
        picked.append((0xFF if byte & 0x80 else 0) if selector & 8 else byte)
    return int.from_bytes(bytes(picked), "little")


def test_prmt_picks_bytes_and_signs():
    check("prmt.b32", ("u32", "u32", "u32"), "u32", _permuted)


PRMT_MODES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes_are_tables_of_selectors(mode):
    check(
        f"prmt.b32.{mode}",
        ("u32", "u32", "u32"),
        "u32",
        lambda a, b, c: _permuted(a, b, int(PRMT_MODES[mode][c & 3], 16)),
    )


def test_packing_and_unpacking_start_with_the_lowest_part():
    a, b = values(32, 1), values(32, 2)
    packed = evaluate("mov.b64 %d20, {%r1, %r2};", {"r1": a, "r2": b}, "d20", np.uint64)
    assert np.array_equal(packed, a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32))
    high = evaluate("mov.b64 {%r20, %r21}, %d1;", {"d1": packed}, "r21", np.uint32)
    assert np.array_equal(high, b)
    halves = evaluate("mov.b32 {%h1, %h2}, %r1; mov.b32 %r20, {%h2, %h1};", {"r1": a}, "r20", np.uint32)
    assert np.array_equal(halves, a >> 16 | a << 16)
    wide = "mov.b64 %d3, {%r1, %r2}; mov.b128 %q1, {%d3, %d4}; mov.b128 {%d5, %d6}, %q1; mov.b64 {%r20, %r21}, %d6;"
    assert np.array_equal(evaluate("mov.b64 %d4, {%r2, %r1};" + wide, {"r1": a, "r2": b}, "r20", np.uint32), b)


def test_selection():
    a, b, p = values(32, 1), values(32, 2), np.arange(32) % 3 == 0
    found = evaluate("selp.b32 %r20, %r1, %r2, %p1;", {"r1": a, "r2": b, "p1": p}, "r20", np.uint32)
    assert np.array_equal(found, np.where(p, a, b))
    found = evaluate("slct.b32.s32 %r20, %r1, %r2, %r2;", {"r1": a, "r2": b}, "r20", np.uint32)
    assert np.array_equal(found, np.where(b.view(np.int32) >= 0, a, b))
