"""Loads, stores and atomics: what they move, and which addresses they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import ExecutionError
from jax_fa4.emulator.launch import Buffer, Options

from .snippet import run_body

RNG = np.random.default_rng(0)
START = "mov.u32 %r0, %tid.x; ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1]; mov.b32 %r1, smem;"


def run(body: str, source: np.ndarray, result: np.ndarray, **options) -> np.ndarray:
    run_body(START + body, params=(Buffer(source), Buffer(result)), **options)
    return result


@pytest.mark.parametrize(
    ("form", "registers", "bytes_a_lane"),
    [
        ("b32", "%r10", 4),
        ("v2.b32", "{%r10, %r11}", 8),
        ("v4.b32", "{%r10, %r11, %r12, %r13}", 16),
        ("b64", "%d10", 8),
        ("v2.b64", "{%d10, %d11}", 16),
        ("v4.b64", "{%d10, %d11, %d12, %d13}", 32),
        ("b16", "%h1", 2),
        ("b8", "%h1", 1),
        ("v2.b8", "{%h1, %h2}", 2),
    ],
)
@pytest.mark.parametrize("through", ["global", "shared", "generic shared", "local"])
def test_what_is_stored_is_loaded(form, registers, bytes_a_lane, through):
    source = RNG.integers(0, 255, 32 * bytes_a_lane).astype(np.uint8)
    address = f"mad.wide.u32 %d2, %r0, {bytes_a_lane}, %d0; mad.wide.u32 %d3, %r0, {bytes_a_lane}, %d1;"
    there = f"ld.global.{form} {registers}, [%d2]; st.global.{form} [%d3], {registers};"
    if "shared" in through:
        to = f"mad.lo.u32 %r2, %r0, {bytes_a_lane}, %r1; cvt.u64.u32 %d4, %r2; cvta.shared.u64 %d4, %d4;"
        space, where = ("", "%d4") if "generic" in through else (".shared", "%r2")
    elif through == "local":
        to, space, where = ".local .align 32 .b8 stack[64]; mov.b64 %d4, stack;", ".local", "%d4+32"
    else:
        to, space, where = "", "", ""
    if to:
        bounce = f"{to} st{space}.{form} [{where}], {registers}; ld{space}.{form} {registers}, [{where}];"
        there = there.replace("; st.global", f"; {bounce} st.global")
    result = run(address + there, source, np.zeros_like(source), smem=2048)
    assert np.array_equal(result, source)


def test_small_loads_extend_by_their_type():
    source = np.array([200, 100, 0xFF00, 0x1234], np.uint16)
    result = np.zeros(4, np.uint32)
    body = """
    ld.global.s8 %h1, [%d0]; cvt.s32.s16 %r2, %h1; st.global.b32 [%d1], %r2;
    ld.global.u8 %h1, [%d0]; cvt.s32.s16 %r2, %h1; st.global.b32 [%d1+4], %r2;
    ld.global.s16 %r2, [%d0+4]; st.global.b32 [%d1+8], %r2;
    ld.global.u16 %r2, [%d0+4]; st.global.b32 [%d1+12], %r2;
    """
    run(body, source, result)
    assert result.view(np.int32).tolist() == [200 - 256, 200, -256, 0xFF00]


def test_lanes_may_read_different_buffers():
    source, result = np.arange(32, dtype=np.uint32), np.full(64, 7, np.uint32)
    body = """
    setp.lt.u32 %p1, %r0, 16; selp.b64 %d2, %d0, %d1, %p1; mad.wide.u32 %d2, %r0, 4, %d2;
    ld.global.b32 %r2, [%d2]; mad.wide.u32 %d3, %r0, 4, %d1; st.global.b32 [%d3+128], %r2;
    """
    assert run(body, source, result)[32:].tolist() == [i if i < 16 else 7 for i in range(32)]


def test_constants_of_the_module_can_be_read():
    result = np.zeros(1, np.uint32)
    body = ".const .align 4 .b8 t[8] = {1, 0, 0, 0, 42, 0, 0, 0}; ld.const.b32 %r2, [t+4]; st.global.b32 [%d1], %r2;"
    assert run(body, np.zeros(1, np.uint32), result).tolist() == [42]


@pytest.mark.parametrize(
    ("form", "old", "operands", "expected"),
    [
        ("add.u32", 5, [3], 5 + 32 * 3),
        ("min.s32", 5, [-3], -3),
        ("max.u32", 5, [9], 9),
        ("and.b32", 0xFF, [0x3C], 0x3C),
        ("or.b32", 1, [0x30], 0x31),
        ("xor.b32", 1, [2], 1),
        ("exch.b32", 1, [7], 7),
        ("inc.u32", 3, [5], 5),  # 32 steps in a cycle of six
        ("dec.u32", 3, [5], 1),
        ("cas.b32", 1, [1, 9], 9),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_happen_lane_by_lane(form, old, operands, expected, space):
    result = np.array([old, 0], np.int64).astype(np.int32)
    where = "%d1" if space == "global" else "%r1"
    values = ", ".join(map(str, operands))
    fill = "" if space == "global" else f"st.shared.b32 [%r1], {old}; bar.warp.sync -1;"
    tail = "" if space == "global" else "ld.shared.b32 %r3, [%r1]; st.global.b32 [%d1], %r3;"
    body = f"{fill} atom.{space}.{form} %r2, [{where}], {values}; {tail}"
    run(body, np.zeros(1, np.int32), result, smem=64)
    assert int(result[0]) == expected


@pytest.mark.parametrize(
    ("form", "operands", "expected"),
    [
        ("add.u32", "100", lambda old: old + 100),
        ("exch.b32", "%r0", lambda old: np.arange(32)),
        ("cas.b32", "5, 77", lambda old: np.where(old == 5, 77, old)),
        ("inc.u32", "6", lambda old: np.where(old >= 6, 0, old + 1)),
    ],
)
@pytest.mark.parametrize("odd", [False, True])
def test_atomics_of_different_words_return_what_was_there(form, operands, expected, odd):
    old = RNG.integers(0, 9, 32).astype(np.uint32)
    result = np.concatenate([old, np.zeros(32, np.uint32)])
    guard = "and.b32 %r3, %r0, 1; setp.eq.u32 %p1, %r3, 1; @%p1" if odd else ""
    body = f"mad.wide.u32 %d2, %r0, 4, %d1; mov.u32 %r2, 99; {guard} atom.global.{form} %r2, [%d2], {operands};"
    run(body + "st.global.b32 [%d2+128], %r2;", np.zeros(1, np.uint32), result)
    acts = np.arange(32) % 2 == 1 if odd else np.ones(32, bool)
    assert (result[:32] == np.where(acts, expected(old), old)).all()
    assert (result[32:] == np.where(acts, old, 99)).all()


def test_float_additions_flush_subnormals_in_global_memory_only():
    result = np.array([1e-40, 0], np.float32)
    body = """
    setp.eq.u32 %p1, %r0, 0;
    @%p1 red.global.add.f32 [%d1], 0f00000001;
    @%p1 red.global.add.f32 [%d1+4], 0f3F800000;
    """
    assert run(body, np.zeros(1, np.float32), result).tolist() == [0, 1]


def test_vector_reductions_of_halves():
    result = np.zeros(4, np.float16)
    body = "mov.b32 %r2, 0x3C003C00; red.global.add.noftz.v2.f16x2 [%d1], {%r2, %r2};"
    assert run(body, np.zeros(1, np.float32), result).tolist() == [32] * 4


@pytest.mark.parametrize(
    ("body", "check", "message"),
    [
        ("ld.global.b32 %r2, [%d0+128];", "bounds", "lies in no buffer"),
        ("ld.global.b32 %r2, [%d0-4];", "bounds", "lies in no buffer"),
        ("st.global.v4.b32 [%d0+120], {%r0, %r0, %r0, %r0};", "alignment", "multiples of 16"),
        ("ld.global.b32 %r2, [%d0+2];", "alignment", "multiples of 4"),
        ("st.shared.b32 [%r1+64], %r0;", "bounds", "outside of the CTA's 64 bytes"),
        ("st.shared.b32 [%r1-4], %r0;", "bounds", "outside of the CTA's 64 bytes"),
        ("st.shared.b64 [%r1+4], %d0;", "alignment", "multiples of 8"),
        ("ld.shared.b32 %r2, [%r1];", "uninitialised", "that nothing wrote"),
        ("ld.param.b64 %d2, [p1+8];", "bounds", "outside of the parameters"),
        ("mov.b32 %r2, 0x5000400; st.shared::cluster.b32 [%r2], %r0;", "bounds", "CTA 5 of 1"),
        (".local .align 4 .b8 s[8]; mov.b64 %d2, s; ld.local.b32 %r2, [%d2+8];", "bounds", "local memory"),
    ],
)
def test_wrong_accesses_are_errors(body, check, message):
    with pytest.raises(ExecutionError, match="address 0x") as caught:
        run(body, np.zeros(32, np.uint32), np.zeros(32, np.uint32), smem=64)
    assert caught.value.check == check
    assert message in str(caught.value)


RACE = """
setp.ge.u32 %p1, %r0, 32; @%p1 bra READER;
st.shared.b32 [%r1], 5;
{first}
bra DONE;
READER: {second}
ld.shared.b32 %r2, [%r1];
DONE: mov.b32 %r3, 0;
"""


def race(first: str, second: str, options: Options | None = None) -> None:
    source, result = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    run(RACE.format(first=first, second=second), source, result, threads=64, smem=64, options=options)


def test_warps_must_synchronise_between_write_and_read():
    race("bar.arrive 1, 64;", "bar.sync 1, 64;")
    with pytest.raises(ExecutionError, match="not ordered") as caught:
        race("", "")
    assert caught.value.check == "race"


def test_waiting_on_another_barrier_does_not_order():
    with pytest.raises(ExecutionError) as caught:
        race("bar.arrive 1, 64;", "nanosleep.u32 1; bar.sync 2, 32;")
    assert caught.value.check == "race"


def test_overwriting_what_another_warp_may_still_read_is_a_race():
    body = """
    setp.ge.u32 %p1, %r0, 32;
    @!%p1 st.shared.b32 [%r1], 5;
    bar.sync 0;
    @%p1 ld.shared.b32 %r2, [%r1];
    {barrier}
    @!%p1 st.shared.b32 [%r1], 5;
    """
    zero = np.zeros(1, np.uint32)
    run(body.format(barrier="bar.sync 0;"), zero, zero.copy(), threads=64, smem=64)
    with pytest.raises(ExecutionError, match="may still read") as caught:
        run(body.format(barrier=""), zero, zero.copy(), threads=64, smem=64, options=Options(order="random", seed=3))
    assert caught.value.check == "race"


def test_warps_may_write_different_halves_of_a_word():
    body = """
    shr.u32 %r2, %r0, 5; mad.lo.u32 %r2, %r2, 2, %r1; setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r0, 32;
    or.pred %p1, %p1, %p2; cvt.u16.u32 %h1, %r0;
    @%p1 st.shared.b16 [%r2], %h1;
    bar.sync 0;
    ld.shared.b32 %r3, [%r1]; st.global.b32 [%d1], %r3;
    """
    zero = np.zeros(1, np.uint32)
    assert run(body, zero, zero.copy(), threads=64, smem=64).tolist() == [32 << 16]


@pytest.mark.parametrize("where", ["shared.b32 [%r1]", "global.b32 [%d1]"])
def test_lanes_that_write_different_values_to_one_place_are_a_race(where):
    zero = np.zeros(1, np.uint32)
    run(f"st.{where}, 7;", zero, zero.copy(), smem=64)
    with pytest.raises(ExecutionError, match="different values to one place") as caught:
        run(f"st.{where}, %r0;", zero, zero.copy(), smem=64)
    assert caught.value.check == "race"


@pytest.mark.parametrize("store", ["st.global.b32 [%d0], 7;", "red.global.add.u32 [%d0], 7;"])
def test_an_array_that_numpy_may_not_write_to_is_an_input(store):
    source = np.zeros(1, np.uint32)
    source.flags.writeable = False
    run("ld.global.b32 %r2, [%d0];", source, np.zeros(1, np.uint32))
    with pytest.raises(ExecutionError, match="writes to an input") as caught:
        run(store, source, np.zeros(1, np.uint32))
    assert caught.value.check == "bounds"


def test_race_checks_can_be_turned_off():
    race("", "", Options(check_races=False))
