"""The PTX front end: scopes, literals, parameters, variables, and errors that name their line."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import PtxSyntaxError
from jax_fa4.emulator.launch import Buffer
from jax_fa4.emulator.text.lexer import tokens
from jax_fa4.emulator.text.module import Address, Immediate, Pair, Register, Sink, Special, Symbol, Vector
from jax_fa4.emulator.text.parser import parse

from .snippet import module_text, run_body


def entry_of(body: str, params=()):
    return parse(module_text(body, params)).entries["snippet"]


def operands_of(instruction: str):
    return entry_of(f"{instruction};").instructions[0].operands


def stored(body: str, count: int = 1) -> list[int]:
    """Run `body`, which leaves a value in %r1; the value that lane 0 stores."""
    result = np.zeros(32, np.uint32)
    run_body(f"{body} ld.param.b64 %d100, [p0]; st.global.b32 [%d100], %r1;", params=(Buffer(result),))
    return result.tolist()[:count]


@pytest.mark.parametrize(
    ("text", "kind", "bits"),
    [
        ("-16777217", "int", -16777217),
        ("0x40004040", "int", 0x40004040),
        ("0x5410U", "int", 0x5410),
        ("4611686293305360384", "int", 4611686293305360384),
        ("0f3F800000", "f32", 0x3F800000),
        ("0d3FF0000000000000", "f64", 0x3FF0000000000000),
    ],
)
def test_literals(text, kind, bits):
    assert operands_of(f"mov.b64 %d1, {text}")[1] == Immediate(bits, kind)


def test_operands():
    destination, source = operands_of("mov.b64 %d1, {%r1, 0x10}")
    assert isinstance(destination, Register)
    assert destination.width == 64
    assert isinstance(source, Vector)
    assert source.items[1] == Immediate(16)
    assert operands_of("mov.u32 %r1, %tid.x")[1] == Special("tid.x")
    assert operands_of("mov.b32 %r1, smem")[1] == Symbol("smem")
    elected = operands_of("elect.sync _|%p1, -1")[0]
    assert isinstance(elected, Pair)
    assert isinstance(elected.first, Sink)


@pytest.mark.parametrize("text", ["[%d1+16]", "[%d1 + 0x10]", "[%d1+8+8]", "[%d1 - -16]"])
def test_addresses_add_their_offsets(text):
    address = operands_of(f"ld.global.b32 %r1, {text}")[1]
    assert isinstance(address, Address)
    assert address.offset == 16
    assert operands_of("ld.global.b32 %r1, [%d1-4]")[1].offset == -4


def test_tensor_coordinates():
    address = operands_of("cp.async.bulk.tensor.2d.shared::cta.global [%r1], [%d1, {%r2, 5}], [%r3]")[1]
    assert address.coordinates.items[1] == Immediate(5)


def test_inner_scopes_shadow_registers_and_labels():
    body = """
    mov.b32 %r1, 1;
    { .reg .b32 %r1; .reg .pred p; mov.b32 %r1, 7; setp.eq.b32 p, %r1, 7; @p bra DONE; trap; DONE: mov.b32 %r3, 5; }
    { .reg .pred p; setp.eq.b32 p, %r1, 1; @p bra.uni DONE; mov.b32 %r3, 6; DONE: add.u32 %r1, %r1, %r3; }
    """
    assert stored(body) == [6]


def test_branches_leave_scopes():
    body = "mov.b32 %r1, 3; { .reg .pred p; setp.eq.b32 p, %r1, 3; @p bra OUT; } trap; OUT: add.u32 %r1, %r1, 10;"
    assert stored(body) == [13]


def test_registers_may_be_declared_in_the_middle_and_in_families():
    assert stored(".reg .b32 a, b; .reg .b32 name_<4>; mov.b32 name_3, 5; mov.b32 a, name_3; add.u32 %r1, a, 1;") == [6]


def test_comments_and_pragmas_are_skipped():
    assert stored('/* one\n two */ .pragma "nounroll"; mov.b32 %r1, 2; // three\n') == [2]


def test_lines_are_counted_through_comments():
    lines = [token.line for token in tokens("a /* x\ny */ b\n// c\nd")]
    assert lines == [1, 2, 4]


def test_parameters_are_aligned_like_c():
    text = module_text("ret;", ()).replace(
        "snippet()",
        "snippet(.param .u32 a, .param .u64 .ptr .global .align 16 b, .param .align 64 .b8 c[128], .param .b8 d)",
    )
    found = {p.name: (p.offset, p.size, p.align) for p in parse(text).entries["snippet"].parameters}
    assert found == {"a": (0, 4, 4), "b": (8, 8, 8), "c": (64, 128, 64), "d": (192, 1, 1)}


def test_launch_bounds():
    text = module_text("ret;", ()).replace("{\n.reg", ".reqntid 128, 2, 1\n.minnctapersm 1\n{\n.reg", 1)
    assert parse(text).entries["snippet"].required_threads == (128, 2, 1)


def test_module_variables():
    text = module_text("ret;", ()).replace(".visible", ".const .align 4 .b8 t[4] = {1, 2, 3, 255};\n.visible", 1)
    module = parse(text)
    assert module.version == (9, 4)
    assert module.target == "sm_90a"
    assert {v.name: (v.space, v.size, v.align, v.initial) for v in module.variables} == {
        "smem": ("shared", 0, 1024, None),
        "t": ("const", 4, 4, b"\x01\x02\x03\xff"),
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, %nothing;", "unknown register %nothing"),
        ("bra NOWHERE;", "unknown label NOWHERE"),
        ("mov.b32 %r1 %r2;", "expected ';'"),
        ("mov.b32 %r1, #;", "unexpected '#'"),
        (".reg .q7 x;", "unknown register type"),
        ("mov.b32 %r1, 1.5;", "decimal fractions"),
        ("mov.b32 %r1, %r9999;", "unknown register %r9999"),
    ],
)
def test_errors_name_what_and_where(body, message):
    with pytest.raises(PtxSyntaxError, match=r"in line 13") as caught:
        entry_of(body)
    assert message in str(caught.value)
