"""Logic on bits, PTX ISA 9.7.8 and `prmt`."""

import numpy as np

from jax_fa4.emulator.decode import Form, Pure, family, op
from jax_fa4.emulator.text.module import Pair

BITS = "{b16,b32,b64,pred}"

op(f"and.{BITS}", "$1 = $1 $1")(np.bitwise_and)
op(f"or.{BITS}", "$1 = $1 $1")(np.bitwise_or)
op(f"xor.{BITS}", "$1 = $1 $1")(np.bitwise_xor)
op(f"not.{BITS}", "$1 = $1")(np.bitwise_not)


@op("cnot.{b16,b32,b64}", "$1 = $1")
def cnot(a):
    return (a == 0).astype(a.dtype)


def lop3_value(a, b, c, table: int):
    """Bit by bit the entry a << 2 | b << 1 | c of an 8-bit truth table."""
    result = np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result


@family("lop3")
def lop3(form: Form) -> Pure:
    combine = form.take("or", "and", default="none")
    form.take("b32")
    form.end()
    if combine == "none":
        destination, sources = form.operands[0], [form.src(i, "b32") for i in (1, 2, 3)]
        table = form.immediate(4)
        return form.pure(lambda a, b, c: lop3_value(a, b, c, table), [(form.dst(destination, "b32"), "b32")], sources)
    pair = form.operands[0]
    if not isinstance(pair, Pair):
        raise form.unknown("needs two destinations")
    sources = [form.src(i, "b32") for i in (1, 2, 3)] + [form.src(5, "pred")]
    table = form.immediate(4)

    def with_predicate(a, b, c, q):
        value = lop3_value(a, b, c, table)
        return value, (value != 0) | q if combine == "or" else (value != 0) & q

    outputs = [(form.dst(pair.first, "b32"), "b32"), (form.dst(pair.second, "pred"), "pred")]
    return form.pure(with_predicate, outputs, sources)


_MODES = {
    "f4e": lambda n: [n, n + 1, n + 2, n + 3],
    "b4e": lambda n: [n, (n - 1) % 8, (n - 2) % 8, (n - 3) % 8],
    "rc8": lambda n: [n] * 4,
    "ecl": lambda n: [max(i, n) for i in range(4)],
    "ecr": lambda n: [min(i, n) for i in range(4)],
    "rc16": lambda n: [2 * (n & 1), 2 * (n & 1) + 1] * 2,
}
_MODE_SELECTORS = {
    mode: np.array([sum(byte << 4 * i for i, byte in enumerate(pick(n))) for n in range(4)], np.uint32)
    for mode, pick in _MODES.items()
}


@op("prmt.b32", "b32 = b32 b32 b32")
def prmt(a, b, selector):
    """Byte i of the result is byte c[4i+2:4i] of b:a; bit 4i+3 replicates its sign instead."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((nibble & 7) * 8).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
        byte = np.where(nibble & 8, np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0)), byte)
        result |= byte << np.uint32(8 * i)
    return result


def _register_prmt(mode: str) -> None:
    @op(f"prmt.b32.{mode}", "b32 = b32 b32 b32")
    def prmt_mode(a, b, c):
        return prmt(a, b, _MODE_SELECTORS[mode][c & 3])


for _mode in _MODES:
    _register_prmt(_mode)
