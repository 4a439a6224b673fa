"""ldmatrix and stmatrix: every element of every tile is somewhere known."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.launch import Buffer

from .snippet import run_body

LANE = np.arange(32)
START = "mov.u32 %r0, %tid.x; mov.b32 %r1, smem; ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];"
EACH_WORD = """
mov.b32 %r9, 0;
LOOP: mad.lo.u32 %r3, %r9, 128, 0; mad.lo.u32 %r3, %r0, 4, %r3; cvt.u64.u32 %d2, %r3; add.u32 %r3, %r3, %r1;
MOVE
add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 4; @%p1 bra LOOP;
bar.sync 0; mad.lo.u32 %r2, %r0, 16, %r1;
"""
IN = "add.s64 %d2, %d2, %d0; ld.global.b32 %r4, [%d2]; st.shared.b32 [%r3], %r4;"
OUT = "add.s64 %d2, %d2, %d1; ld.shared.b32 %r4, [%r3]; st.global.b32 [%d2], %r4;"
COPY_IN, COPY_OUT = (EACH_WORD.replace("MOVE", move) for move in (IN, OUT))
REGISTERS = {1: "{%r10}", 2: "{%r10, %r11}", 4: "{%r10, %r11, %r12, %r13}"}


def word_of_lane(count: int, i: int, base: str) -> str:
    return f"mad.lo.u32 %r3, %r0, {4 * count}, {4 * i}; cvt.u64.u32 %d2, %r3; add.s64 %d2, %d2, {base};"


def store_registers(count: int) -> str:
    return "".join(word_of_lane(count, i, "%d1") + f"st.global.b32 [%d2], %r{10 + i};" for i in range(count))


def load_registers(count: int) -> str:
    return "".join(word_of_lane(count, i, "%d0") + f"ld.global.b32 %r{10 + i}, [%d2];" for i in range(count))


def run(body: str, source: np.ndarray, size: int) -> np.ndarray:
    result = np.zeros(size, np.uint8)
    run_body(START + body, params=(Buffer(source.view(np.uint8)), Buffer(result)), smem=1024)
    return result


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "trans"])
def test_ldmatrix_gives_each_lane_a_pair_of_every_tile(count, transposed):
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    trans = ".trans" if transposed else ""
    body = COPY_IN + f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {REGISTERS[count]}, [%r2];"
    found = run(body + store_registers(count), tiles.reshape(-1), 128 * count).view(np.uint16).reshape(32, count, 2)
    for lane in LANE:
        for i in range(count):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                expected = tiles[i, column, row] if transposed else tiles[i, row, column]
                assert found[lane, i, half] == expected


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "trans"])
def test_stmatrix_is_the_inverse(count, transposed):
    values = np.arange(64 * count, dtype=np.uint16)
    trans = ".trans" if transposed else ""
    code = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {REGISTERS[count]}; bar.sync 0;"
    zero = "st.shared.v4.b32 [%r2], {0, 0, 0, 0}; bar.sync 0;"
    body = load_registers(count) + "mad.lo.u32 %r2, %r0, 16, %r1;" + zero + code + COPY_OUT
    found = run(body, values, 512).view(np.uint16).reshape(4, 8, 8)
    registers = values.reshape(32, count, 2)
    for lane in LANE:
        for i in range(count):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                stored = found[i, column, row] if transposed else found[i, row, column]
                assert registers[lane, i, half] == stored


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_bytes_transposes_tiles_of_16_by_16(count):
    tiles = np.arange(512).astype(np.uint8).reshape(2, 16, 16)
    registers = REGISTERS[2 * count]
    body = COPY_IN + f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {registers}, [%r2];"
    found = run(body + store_registers(2 * count), tiles.reshape(-1), 256 * count).reshape(32, count, 2, 4)
    for lane in LANE:
        for i in range(count):
            for half in range(2):
                for byte in range(4):
                    assert found[lane, i, half, byte] == tiles[i, 4 * (lane % 4) + byte, lane // 4 + 8 * half]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes_transposes_tiles_of_16_by_8(count):
    values = np.arange(128 * count).astype(np.uint8)
    code = f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r2], {REGISTERS[count]}; bar.sync 0;"
    zero = "st.shared.v4.b32 [%r2], {0, 0, 0, 0}; bar.sync 0;"
    body = load_registers(count) + "mad.lo.u32 %r2, %r0, 16, %r1;" + zero + code + COPY_OUT
    found = run(body, values, 512).reshape(4, 8, 16)
    registers = values.reshape(32, count, 4)
    for lane in LANE:
        for i in range(count):
            for byte in range(4):
                assert registers[lane, i, byte] == found[i, 2 * (lane % 4) + byte % 2, lane // 4 + 8 * (byte // 2)]
