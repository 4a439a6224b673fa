"""tcgen05: products, transfers and copies of every shape against numpy, and the rules that order them."""

import dataclasses
import re

import numpy as np
import pytest

from jax_fa4.emulator.errors import ExecutionError, UnknownInstruction
from jax_fa4.emulator.launch import Buffer, Options
from jax_fa4.emulator.layout import matrix, number, swizzle
from jax_fa4.emulator.layout import tensor_memory as tm

from .snippet import run_body

BASE = 0x400  # address of smem
B_AT = 0x4000  # offset of B's tile; A's is at 0
BARRIER, ADDRESS = 0x8000, 0x8010  # offsets of the mbarrier and of the allocated address
SMEM = 0x8020
THREADS = 128
COLUMNS = 128  # allocated unless a test says otherwise
V = 100  # the first %r of transferred registers
CODES = {swizzle.NONE: 0, swizzle.B128_ATOM_32B: 1, swizzle.B128: 2, swizzle.B64: 4, swizzle.B32: 6}
KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4"}
TYPE_CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}


def encode_fp8(values, name):
    table = number.FORMATS[name].decode(np.arange(256, dtype=np.uint8))
    return np.array([np.flatnonzero(table == value)[0] for value in values.ravel()], np.uint8).reshape(values.shape)


ENCODE = {
    "e4m3": lambda values: encode_fp8(values, "e4m3"),
    "e5m2": lambda values: encode_fp8(values, "e5m2"),
    "bf16": number.encode_bf16,
    "f16": lambda values: values.astype(np.float16).view(np.uint16),
    "tf32": lambda values: values.view(np.uint32),
}  # bit patterns of small integers in float32


@dataclasses.dataclass(frozen=True)
class Tile:
    """An operand in shared memory: rows x 32 bytes of K, laid out for one descriptor."""

    values: np.ndarray
    name: str
    at: int
    mode: swizzle.Swizzle = swizzle.B32
    mn_major: bool = False

    @property
    def bits(self):
        size, rows, span = number.FORMATS[self.name].element_bytes, len(self.values), self.mode.span_bytes
        if self.mode is swizzle.NONE:
            leading, stride = (128 * (rows * size // 16) if self.mn_major else 16 * rows), 128
        elif self.mn_major:
            leading, stride = span * 32 // size, (4 if self.mode is swizzle.B128_ATOM_32B else 8) * span
        else:
            leading, stride = 16, 8 * span
        start = BASE + self.at
        return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | CODES[self.mode] << 61

    @property
    def offsets(self):
        """Where each element lies in smem."""
        descriptor, size = matrix.decode_tcgen05(self.bits), number.FORMATS[self.name].element_bytes
        rows = len(self.values)
        return matrix.element_addresses(descriptor, rows=rows, element_bytes=size, mn_major=self.mn_major) - BASE

    def place(self, smem):
        f = number.FORMATS[self.name]
        assert len(np.unique(self.offsets)) == self.values.size
        smem.view(f.bits_dtype)[self.offsets // f.element_bytes] = ENCODE[self.name](self.values)


def integers(seed, shape, low=-4, high=5):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def image(*tiles):
    smem = np.zeros((SMEM + 511) // 512 * 512, np.uint8)
    for tile in tiles:
        tile.place(smem)
    return smem


# pieces of programs: %r20 tensor memory address, %r1 thread, %r6 warp, %d1 image, %d2 values in, %d3 values out

START = f"""
mov.u32 %r1, %tid.x;
shr.u32 %r6, %r1, 5;
mov.b32 %r2, smem;
add.s32 %r3, %r2, {BARRIER};
shl.b32 %r4, %r1, 2;
add.s32 %r5, %r2, %r4;
setp.ne.b32 %p1, %r1, 0;
setp.ne.b32 %p2, %r6, 0;
ld.param.b64 %d1, [p0];
ld.param.b64 %d2, [p1];
ld.param.b64 %d3, [p2];
mul.wide.u32 %d4, %r1, 4;
add.s64 %d1, %d1, %d4;
add.s64 %d2, %d2, %d4;
add.s64 %d3, %d3, %d4;
"""
INIT = """
@%p1 bra INITIALISED;
mbarrier.init.shared.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
bar.sync 0;
"""
VISIBLE = "\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;\n"
WAIT_ST = "tcgen05.wait::st.sync.aligned;\n"
SYNC = "bar.sync 0;\n"


def alloc(columns=COLUMNS, group=1):
    return f"""
@%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r2+{ADDRESS}], {columns};
ALLOCATED:
bar.sync 0;
ld.shared.b32 %r20, [%r2+{ADDRESS}];
"""


def dealloc(columns=COLUMNS, group=1):
    return f"""
bar.sync 0;
@%p2 bra FREED;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r20, {columns};
FREED:
"""


def fill(*tiles):
    """All threads copy the parts of the image that hold tiles to shared memory."""
    blocks = sorted({int(block) for tile in tiles for block in np.unique(tile.offsets // 512)})
    moves = (f"ld.global.b32 %r9, [%d1+{512 * i}];\nst.shared.b32 [%r5+{512 * i}], %r9;\n" for i in blocks)
    return "".join(moves)


def vector(count, first=V):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def load(count, row=0):
    return "\n".join(f"ld.global.b32 %r{V + i}, [%d2+{512 * (row + i)}];" for i in range(count)) + "\n"


def save(count, row=0):
    return "\n".join(f"st.global.b32 [%d3+{512 * (row + i)}], %r{V + i};" for i in range(count)) + "\n"


def quarter(extra=0):
    """%r21: the warp's own lanes, `extra` further."""
    return f"shl.b32 %r21, %r6, 21;\nadd.s32 %r21, %r21, %r20;\nadd.s32 %r21, %r21, {extra};\n"


def st(shape, repeat, count, pack="", split=""):
    return f"tcgen05.st.sync.aligned.{shape}.x{repeat}{pack}.b32 [%r21], {split}{vector(count)};\n"


def ld(shape, repeat, count, pack="", split=""):
    return f"tcgen05.ld.sync.aligned.{shape}.x{repeat}{pack}.b32 {vector(count)}, [%r21]{split};\n"


def run(body, smem=None, values=None, *, out_rows=128, options=None, **how):
    """Returns what `save` stored: uint32 [out_rows, 128]."""
    smem = np.zeros(512, np.uint8) if smem is None else smem
    values = np.zeros((1, THREADS), np.uint32) if values is None else np.ascontiguousarray(values, np.uint32)
    out = np.zeros((out_rows, THREADS), np.uint32)
    params = (Buffer(smem), Buffer(values), Buffer(out))
    run_body(START + body, params=params, threads=THREADS, smem=SMEM, options=options, target="sm_100a", **how)
    return out


def random_words(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32 - 1, (rows, THREADS), dtype=np.uint32)


# transfers

SHAPES = [("32x32b", 1), ("32x32b", 32), ("16x64b", 4), ("16x128b", 8), ("16x256b", 4), ("16x32bx2", 8)]


def count_of(shape, repeat):
    return tm.SHAPES[shape].registers * repeat


@pytest.mark.parametrize(("shape", "repeat"), SHAPES)
@pytest.mark.parametrize("completion", ["early", "late", "random"])
def test_what_a_warp_stores_it_loads_again(shape, repeat, completion):
    count = count_of(shape, repeat)
    split = ("16, ", ", 16") if shape == "16x32bx2" else ("", "")
    values = random_words(count)
    body = alloc() + load(count) + quarter() + st(shape, repeat, count, split=split[0]) + WAIT_ST
    body += "".join(f"mov.b32 %r{V + i}, 0;\n" for i in range(count))
    body += ld(shape, repeat, count, split=split[1]) + WAIT_LD + save(count) + dealloc()
    assert (run(body, values=values, options=Options(completion=completion))[:count] == values).all()


@pytest.mark.parametrize(("shape", "repeat"), SHAPES)
@pytest.mark.parametrize("upper", [False, True], ids=["lanes0", "lanes16"])
def test_every_shape_addresses_its_cells(shape, repeat, upper):
    """Stored as 32x32b, loaded in another shape from column 3 on, from either half of the warp's lanes."""
    if shape == "32x32b" and upper:
        upper = False
    count, values = count_of(shape, repeat), random_words(64)
    split = ", 16" if shape == "16x32bx2" else ""
    body = alloc() + load(64) + quarter() + st("32x32b", 64, 64) + WAIT_ST
    body += quarter(3 + (16 << 16 if upper else 0)) + ld(shape, repeat, count, split=split) + WAIT_LD + save(count)
    got = run(body + dealloc(), values=values)
    memory = values.T  # [lane, column]
    cells = tm.register_cells(shape, repeat, split=16)
    for warp in range(4):
        lanes = 32 * warp + 16 * upper + cells.lane
        assert (got[:count, 32 * warp : 32 * warp + 32] == memory[lanes, 3 + cells.column]).all()


@pytest.mark.parametrize("shape", ["32x32b", "16x256b"])
def test_packed_loads_take_the_low_halves_of_two_columns(shape):
    repeat, values = 4, random_words(64)
    count = count_of(shape, repeat)
    body = alloc() + load(64) + quarter() + st("32x32b", 64, 64) + WAIT_ST
    body += ld(shape, repeat, count, ".pack::16b") + WAIT_LD + save(count) + dealloc()
    got, memory = run(body, values=values), values.T & 0xFFFF
    cells = tm.register_cells(shape, repeat)
    expected = memory[cells.lane, 2 * cells.column] | memory[cells.lane, 2 * cells.column + 1] << 16
    assert (got[:count, :32] == expected).all()


def test_unpacked_stores_are_the_inverse():
    values = random_words(8)
    body = alloc() + load(8) + quarter() + st("32x32b", 8, 8, ".unpack::16b") + WAIT_ST
    packed = body + ld("32x32b", 8, 8, ".pack::16b") + WAIT_LD + save(8) + dealloc()
    assert (run(packed, values=values)[:8] == values).all()
    plain = body + ld("32x32b", 16, 16) + WAIT_LD + save(16) + dealloc()
    got = run(plain, values=values)
    assert (got[0:16:2] & 0xFFFF == values & 0xFFFF).all()
    assert (got[1:16:2] & 0xFFFF == values >> 16).all()


def test_a_used_result_needs_no_wait():
    values = random_words(4)
    body = alloc() + load(4) + quarter() + st("32x32b", 4, 4) + WAIT_ST + ld("32x32b", 4, 4) + save(4) + dealloc()
    assert (run(body, values=values, options=Options(completion="late"))[:4] == values).all()


# products


def idesc(m, n, a, b, *, half=False, a_mn=False, b_mn=False, negate_a=False, negate_b=False):
    bits = (0 if half else 1) << 4 | TYPE_CODES[a] << 7 | TYPE_CODES[b] << 10 | (n >> 3) << 17 | (m >> 4) << 24
    return bits | negate_a << 13 | negate_b << 14 | a_mn << 15 | b_mn << 16


def mma(kind, *, group=1, a="%d10", d="%r20", enable="1", tail="", collector=""):
    return f"tcgen05.mma.cta_group::{group}.kind::{kind}{collector} [{d}], {a}, %d11, %r10{tail}, {enable};\n"


def one_thread(text, label="ISSUED"):
    return f"@%p1 bra {label};\n{text}{label}:\n"


COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];\n"


def wait(parity=0, label="DONE"):
    return f"""
POLL{label}:
mbarrier.try_wait.parity.shared.b64 %p5, [%r3], {parity};
@%p5 bra {label};
bra POLL{label};
{label}:
"""


def operands(a, b, bits):
    return f"mov.b64 %d10, {a.bits if a else 0};\nmov.b64 %d11, {b.bits};\nmov.b32 %r10, {bits};\n"


def chunks(n):
    """Transfers of n columns, 64 at a time: (first column, columns)."""
    return [(first, min(64, n - first)) for first in range(0, n, 64)]


def store_matrix(n, column, row=0):
    """A [128 lanes, n] matrix from rows row .. row+n of the input, to columns column and up."""
    text = ""
    for first, count in chunks(n):
        text += load(count, row + first) + quarter(column + first) + st_any(count)
    return text + WAIT_ST + SYNC


def st_any(count):
    """32x32b stores of any number of columns."""
    text, first = "", 0
    while first < count:
        repeat = 1 << (count - first).bit_length() - 1
        text += f"tcgen05.st.sync.aligned.32x32b.x{repeat}.b32 [%r21+{first}], {vector(repeat, V + first)};\n"
        first += repeat
    return text


def load_matrix(n, column):
    text = ""
    for first, count in chunks(n):
        text += quarter(column + first)
        done = 0
        while done < count:
            repeat = 1 << (count - done).bit_length() - 1
            text += f"tcgen05.ld.sync.aligned.32x32b.x{repeat}.b32 {vector(repeat, V + done)}, [%r21+{done}];\n"
            done += repeat
        text += WAIT_LD + save(count, first)
    return text


def multiply(a, b, d, *, m, n, name=("bf16", "bf16"), enable="1", options=None, lane=0, tail="", **fields):
    """D (+)= A B^T of one CTA; A is a tile, or [128 lanes, K] for tensor memory. D is [128 lanes, n] of cells."""
    in_memory = not isinstance(a, Tile)
    kind, columns = KINDS[name[0]], 512
    values = np.ascontiguousarray(d.T)
    body = INIT + alloc(columns) + store_matrix(n, 0)
    if in_memory:
        words = np.ascontiguousarray(ENCODE[name[0]](a)).view(np.uint32)  # [128, 8]
        values = np.concatenate([values, words.T])
        body += store_matrix(8, 256, row=n)
    body += fill(*([b] if in_memory else [a, b])) + VISIBLE
    body += operands(None if in_memory else a, b, idesc(m, n, *name, **fields))
    body += f"add.s32 %r22, %r20, {lane << 16};\nadd.s32 %r23, %r20, {256 + (lane << 16)};\n"
    operand = "[%r23]" if in_memory else "%d10"
    body += one_thread(mma(kind, a=operand, d="%r22", enable=enable, tail=tail) + COMMIT) + wait()
    body += load_matrix(n, 0) + dealloc(columns)
    smem = image(*([b] if in_memory else [a, b]))
    return run(body, smem, values, out_rows=max(n, 64), options=options)[:n].T


def tiles(m, n, name, seed=0, **layout):
    k = 32 // number.FORMATS[name[0]].element_bytes
    a = Tile(integers(seed, (m, k)), name[0], 0, **layout)
    return a, Tile(integers(seed + 1, (n, k)), name[1], B_AT, **layout)


TYPES = [("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), ("e4m3", "e4m3"), ("e5m2", "e4m3")]


@pytest.mark.parametrize("name", TYPES, ids="-".join)
@pytest.mark.parametrize("n", [16, 64, 128])
@pytest.mark.parametrize("is_exact", [False, True], ids=["fast", "exact"])
def test_products_of_every_type(name, n, is_exact):
    a, b = tiles(128, n, name)
    d = integers(9, (128, n), -99, 100)
    got = multiply(a, b, d.view(np.uint32), m=128, n=n, name=name, options=Options(exact_mma=is_exact))
    assert (got.view(np.float32) == d + a.values @ b.values.T).all()


@pytest.mark.parametrize(
    "mode", [swizzle.NONE, swizzle.B32, swizzle.B64, swizzle.B128], ids=["none", "32B", "64B", "128B"]
)
@pytest.mark.parametrize("majors", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["k-k", "k-mn", "mn-k", "mn-mn"])
def test_operands_of_every_layout(mode, majors):
    name = ("bf16", "bf16")
    a = Tile(integers(0, (128, 16)), "bf16", 0, mode, bool(majors[0]))
    b = Tile(integers(1, (64, 16)), "bf16", B_AT, mode, bool(majors[1]))
    d = np.zeros((128, 64), np.uint32)
    got = multiply(a, b, d, m=128, n=64, name=name, a_mn=majors[0], b_mn=majors[1])
    assert (got.view(np.float32) == a.values @ b.values.T).all()


def test_words_may_be_mn_major_in_32_byte_atoms():
    a = Tile(integers(0, (128, 8)), "tf32", 0, swizzle.B128_ATOM_32B, True)
    b = Tile(integers(1, (64, 8)), "tf32", B_AT, swizzle.B128_ATOM_32B, True)
    d = np.zeros((128, 64), np.uint32)
    got = multiply(a, b, d, m=128, n=64, name=("tf32", "tf32"), a_mn=1, b_mn=1)
    assert (got.view(np.float32) == a.values @ b.values.T).all()


@pytest.mark.parametrize("name", TYPES, ids="-".join)
def test_a_may_lie_in_tensor_memory(name):
    a, b = tiles(128, 32, name)
    d = np.zeros((128, 32), np.uint32)
    got = multiply(a.values, b, d, m=128, n=32, name=name)
    assert (got.view(np.float32) == a.values @ b.values.T).all()


@pytest.mark.parametrize("lane", [0, 16])
@pytest.mark.parametrize("source", ["shared", "tensor"])
def test_64_rows_use_half_the_lanes_and_leave_the_others(lane, source):
    a, b = tiles(64, 24, ("f16", "f16"))
    rows = np.arange(64)
    lanes = 32 * (rows // 16) + rows % 16 + lane
    d = integers(3, (128, 24), -9, 9)
    operand = a
    if source == "tensor":
        operand = np.zeros((128, 16), np.float32)
        operand[lanes] = a.values
    got = multiply(operand, b, d.view(np.uint32), m=64, n=24, name=("f16", "f16"), lane=lane).view(np.float32)
    expected = d.copy()
    expected[lanes] += a.values @ b.values.T
    assert (got == expected).all()


def test_float16_accumulators_sit_in_the_low_halves():
    a, b = tiles(128, 16, ("f16", "f16"))
    d = integers(3, (128, 16), -9, 9)
    bits = d.astype(np.float16).view(np.uint16).astype(np.uint32)
    got = multiply(a, b, bits, m=128, n=16, name=("f16", "f16"), half=True)
    assert ((got & 0xFFFF).astype(np.uint16).view(np.float16) == d + a.values @ b.values.T).all()


@pytest.mark.parametrize("signs", [(True, False), (False, True), (True, True)])
def test_operands_may_be_negated(signs):
    a, b = tiles(128, 16, ("bf16", "bf16"))
    got = multiply(a, b, np.zeros((128, 16), np.uint32), m=128, n=16, negate_a=signs[0], negate_b=signs[1])
    sign = -1 if signs[0] != signs[1] else 1
    assert (got.view(np.float32) == sign * (a.values @ b.values.T)).all()


def test_without_enable_input_the_old_accumulator_is_ignored():
    a, b = tiles(128, 16, ("bf16", "bf16"))
    got = multiply(a, b, np.full((128, 16), 0x7FC00000), m=128, n=16, enable="0")
    assert (got.view(np.float32) == a.values @ b.values.T).all()


def test_the_old_accumulator_may_be_scaled_down():
    a, b = tiles(128, 16, ("bf16", "bf16"))
    d = integers(3, (128, 16), -9, 9)
    got = multiply(a, b, d.view(np.uint32), m=128, n=16, enable="1, 3")
    assert (got.view(np.float32) == d / 8 + a.values @ b.values.T).all()


def test_masked_lanes_keep_their_values():
    a, b = tiles(128, 16, ("bf16", "bf16"))
    d, masks = integers(3, (128, 16), -9, 9), (0x1, 0xFFFF0000, 0, 0x80000001)
    tail = ", {" + ", ".join(map(str, masks)) + "}"
    got = multiply(a, b, d.view(np.uint32), m=128, n=16, tail=tail).view(np.float32)
    is_masked = np.array([bool(masks[lane // 32] >> lane % 32 & 1) for lane in range(128)])
    expected = np.where(is_masked[:, None], d, d + a.values @ b.values.T)
    assert (got == expected).all()


# pairs of CTAs

PAIR_START = "mov.u32 %r30, %cluster_ctarank;\n"
CLUSTER_SYNC = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
COMMIT_PAIR = (
    "mov.b16 %h1, 3;\n"
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r3], %h1;\n"
)


def per_cta(smem_bytes, in_rows, out_rows):
    """Each CTA reads and writes its own part of the buffers."""
    lines = [PAIR_START]
    for register, size in (("%d1", smem_bytes), ("%d2", 512 * in_rows), ("%d3", 512 * out_rows)):
        lines.append(f"mul.wide.u32 %d20, %r30, {size};\nadd.s64 {register}, {register}, %d20;\n")
    return "".join(lines)


@pytest.mark.parametrize(("m", "source"), [(256, "shared"), (256, "tensor"), (128, "shared"), (128, "tensor")])
def test_a_pair_multiplies_with_halves_of_the_operands(m, source):
    n, half = 64, m // 2
    a_values, b_values = integers(0, (m, 16)), integers(1, (n, 16))
    d = np.zeros((2, 128, 64), np.float32)
    images = []
    a_words = np.zeros((2, 128, 8), np.uint32)
    for cta in range(2):
        a = Tile(a_values[half * cta : half * (cta + 1)], "bf16", 0)
        b = Tile(b_values[n // 2 * cta : n // 2 * (cta + 1)], "bf16", B_AT)
        images.append(image(a, b))
        words = np.ascontiguousarray(number.encode_bf16(a.values)).view(np.uint32)
        a_words[cta] = words if m == 256 else np.concatenate([words, words])  # both halves of the lanes need it
    columns = n if m == 256 else n // 2
    operand = "[%r23]" if source == "tensor" else "%d10"
    body = per_cta(images[0].nbytes, 72, 128) + INIT + alloc(512, 2) + store_matrix(64, 0)
    body += store_matrix(8, 256, row=64) + fill(a, b) + VISIBLE + operands(a, b, idesc(m, n, "bf16", "bf16"))
    body += "add.s32 %r23, %r20, 256;\n" + CLUSTER_SYNC + "setp.ne.b32 %p6, %r30, 0;\nor.pred %p7, %p6, %p1;\n"
    issue = mma("f16", group=2, a=operand) + COMMIT_PAIR
    body += f"@%p7 bra ISSUED;\n{issue}ISSUED:\n" + wait() + load_matrix(columns, 0) + dealloc(512, 2) + CLUSTER_SYNC
    values = np.concatenate([np.moveaxis(d.view(np.uint32), 2, 1), np.moveaxis(a_words, 2, 1)], axis=1)
    out = run(body, np.stack(images), values.reshape(-1, THREADS), out_rows=256, grid=(2, 1, 1), cluster=(2, 1, 1))
    got = np.moveaxis(out.reshape(2, 128, THREADS)[:, :columns], 1, 2).view(np.float32)  # [cta, lane, column]
    expected = a_values @ b_values.T
    for cta in range(2):
        rows = expected[half * cta : half * (cta + 1)]
        if m == 256:
            assert (got[cta] == rows).all()
        else:
            assert (got[cta, :64] == rows[:, : n // 2]).all()
            assert (got[cta, 64:] == rows[:, n // 2 :]).all()


def test_both_ctas_of_a_pair_know_of_an_allocation():
    """The instruction is theirs together: a relaxed barrier behind it is enough to write the other's columns."""
    a, b = tiles(128, 32, ("bf16", "bf16"))
    body = per_cta(image(a, b).nbytes, 1, 64) + INIT + fill(a, b) + VISIBLE + CLUSTER_SYNC + alloc(512, 2)
    body += CLUSTER_SYNC.replace("arrive", "arrive.relaxed") + operands(a, b, idesc(256, 64, "bf16", "bf16"))
    body += "setp.ne.b32 %p6, %r30, 0;\nor.pred %p7, %p6, %p1;\n@%p7 bra ISSUED;\n"
    body += mma("f16", group=2, enable="0") + COMMIT_PAIR + "ISSUED:\n" + wait() + load_matrix(64, 0)
    images = np.stack([image(a, b)] * 2)
    out = run(body + dealloc(512, 2) + CLUSTER_SYNC, images, out_rows=128, grid=(2, 1, 1), cluster=(2, 1, 1))
    product = a.values @ np.concatenate([b.values, b.values]).T
    for rows in np.split(out.view(np.float32), 2):
        assert (product == rows.T).all()


# copies


@pytest.mark.parametrize("shape", tm.COPY_SHAPES)
def test_rows_are_copied_to_their_lanes(shape):
    copy = tm.COPY_SHAPES[shape]
    columns = copy.row_bytes // 4
    source = Tile(integers(0, (len(copy.lanes), 8), 1, 100), "tf32", 0, swizzle.B128)
    body = INIT + alloc() + store_matrix(16, 0) + fill(source) + VISIBLE + f"mov.b64 %d10, {source.bits};\n"
    body += one_thread(f"tcgen05.cp.cta_group::1.{shape} [%r20+1], %d10;\n" + COMMIT) + wait()
    before = random_words(16)
    got = run(body + load_matrix(16, 0) + dealloc(), image(source), before)[:16].T
    expected = before.T.copy()
    for row, lanes in enumerate(copy.lanes):
        expected[lanes, 1 : 1 + columns] = source.values[row, :columns].view(np.uint32)
    assert (got == expected).all()


# order

A_TILE, B_TILE = tiles(128, 16, ("bf16", "bf16"))
PRODUCT = A_TILE.values @ B_TILE.values.T
READY = INIT + alloc() + fill(A_TILE, B_TILE) + VISIBLE + operands(A_TILE, B_TILE, idesc(128, 16, "bf16", "bf16"))
MMA = mma("f16", enable="0")
READ = quarter() + ld("32x32b", 16, 16) + WAIT_LD + save(16)


def result(body, **how):
    return run(body, image(A_TILE, B_TILE), random_words(32), **how)[:16].T.view(np.float32)


def fails(body, message, check, **how):
    with pytest.raises(ExecutionError, match=message) as caught:
        result(body, **how)
    assert caught.value.check == check


@pytest.mark.parametrize("completion", ["early", "late", "random"])
@pytest.mark.parametrize("order", ["round_robin", "random"])
def test_a_chain_of_products_is_read_after_its_commit(completion, order):
    again = mma("f16")
    body = READY + one_thread(MMA + again + again + COMMIT) + wait() + READ + dealloc()
    assert (result(body, options=Options(completion=completion, order=order, seed=2)) == 3 * PRODUCT).all()


def test_a_commit_with_nothing_pending_arrives_at_once():
    assert (
        result(
            READY
            + one_thread(MMA + COMMIT)
            + wait()
            + one_thread(COMMIT, "AGAIN")
            + wait(1, "DONE2")
            + READ
            + dealloc()
        )
        == PRODUCT
    ).all()


def test_reading_an_accumulator_without_the_commit_is_reported():
    fails(READY + one_thread(MMA) + SYNC + READ + dealloc(), "not ordered", "race")


def test_a_commit_by_another_thread_covers_nothing():
    """Thread 32 commits what thread 0 has issued."""
    other = "setp.ne.b32 %p8, %r1, 32;\n@%p8 bra COMMITTED;\n" + COMMIT + "COMMITTED:\n"
    fails(READY + one_thread(MMA) + SYNC + other + wait() + READ + dealloc(), "not ordered", "race")


def test_operands_must_be_fenced():
    body = READY.replace("fence.proxy.async.shared::cta;", "") + one_thread(MMA + COMMIT) + wait() + READ + dealloc()
    fails(body, "without fence", "proxy fence")


def test_overwriting_an_operand_before_the_commit_is_reported():
    fails(READY + one_thread(MMA) + SYNC + "st.shared.b32 [%r5], %r1;\n" + dealloc(), "may still read", "race")


def test_an_operand_may_be_overwritten_after_the_commit():
    body = READY + one_thread(MMA + COMMIT) + wait() + "st.shared.b32 [%r5], %r1;\n" + READ + dealloc()
    assert (result(body) == PRODUCT).all()


STORED = load(16) + quarter() + st("32x32b", 16, 16)
ACCUMULATE = one_thread(mma("f16") + COMMIT) + wait() + READ + dealloc()


def test_a_stored_accumulator_needs_its_wait():
    fails(READY + STORED + SYNC + ACCUMULATE, "not ordered", "race")


def test_a_stored_accumulator_needs_a_barrier():
    fails(READY + STORED + WAIT_ST + ACCUMULATE, "not ordered", "race")


def test_loading_what_was_stored_needs_the_wait():
    fails(READY + STORED + READ + dealloc(), "not ordered", "race")


def test_overwriting_what_is_being_loaded_needs_the_wait():
    body = READY + STORED + WAIT_ST + quarter() + ld("32x32b", 16, 16) + SYNC + one_thread(MMA + COMMIT) + wait()
    fails(body + dealloc(), "may still read", "race")


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
STRICT = Options(strict=True)


def fenced(body):
    """Fences wherever threads synchronise."""
    body = body.replace("bar.sync 0;", BEFORE + "bar.sync 0;\n" + AFTER)
    return re.sub(r"(bra POLL\w+;\n\w+:\n)", rf"\1{AFTER}", body)


def test_strict_mode_takes_a_kernel_with_all_fences():
    assert (result(fenced(READY + STORED + WAIT_ST + SYNC + ACCUMULATE), options=STRICT) != 0).any()


@pytest.mark.parametrize("missing", [BEFORE, AFTER])
def test_strict_mode_wants_fences_on_both_sides_of_a_barrier(missing):
    body = READY + STORED + WAIT_ST + SYNC + ACCUMULATE
    result(body)
    fails(fenced(body).replace(missing, ""), "not ordered|may still read", "race", options=STRICT)


def test_strict_mode_wants_a_fence_after_the_wait_for_a_commit():
    body = READY + one_thread(MMA + COMMIT) + wait() + READ + dealloc()
    result(body)
    assert (result(fenced(body), options=STRICT) == PRODUCT).all()
    fails(fenced(body).replace(AFTER + "shl", "shl"), "not ordered", "race", options=STRICT)


def relaxed(before="", after=""):
    """All threads meet at an mbarrier of their own, without release or acquire."""
    second = f"{BARRIER - 8}"
    return f"""
    @%p1 bra MADE;
    mbarrier.init.shared.b64 [%r2+{second}], {THREADS};
    MADE: bar.sync 0;
    {{store}}
    {before}
    mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+{second}];
    MEET: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p9, [%r2+{second}], 0;
    @!%p9 bra MEET;
    {after}
    """


@pytest.mark.parametrize(
    ("before", "after"), [(BEFORE, AFTER), ("fence.acq_rel.cta;", "fence.acq_rel.cta;"), (BEFORE, "fence.sc.cta;")]
)
def test_fences_make_relaxed_synchronisation_order_tensor_memory(before, after):
    result(READY + relaxed(before, after).format(store=STORED + WAIT_ST) + ACCUMULATE)


@pytest.mark.parametrize(("before", "after"), [("", ""), (BEFORE, ""), ("", AFTER), (AFTER, BEFORE)])
def test_relaxed_synchronisation_orders_no_tensor_memory_by_itself(before, after):
    fails(READY + relaxed(before, after).format(store=STORED + WAIT_ST) + ACCUMULATE, "not ordered", "race")


def test_the_fences_order_tensor_memory_only():
    store = "st.shared.b32 [%r5+512], %r1;\n"
    other = "xor.b32 %r9, %r4, 128; add.s32 %r9, %r2, %r9; ld.shared.b32 %r9, [%r9+512];"
    fails(READY + relaxed(BEFORE, AFTER).format(store=store) + other + dealloc(), "not ordered", "race")


def test_strict_mode_knows_no_end_of_a_load_but_its_wait():
    body = READY + STORED + WAIT_ST + quarter() + ld("32x32b", 16, 16) + save(16) + SYNC
    body = fenced(body + one_thread(MMA + COMMIT) + wait() + READ + dealloc())
    fails(body, "may still read", "race", options=STRICT)


def test_a_used_load_is_over():
    """Using one result waits for the whole instruction; known kernels rely on it."""
    body = READY + STORED + WAIT_ST + quarter() + ld("32x32b", 16, 16) + save(16) + SYNC
    assert (result(body + one_thread(MMA + COMMIT) + wait() + READ + dealloc()) == PRODUCT).all()


def test_an_unused_load_before_a_used_one_is_not_over():
    other = f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r{V + 40}}}, [%r21];\n"
    body = READY + STORED + WAIT_ST + quarter() + other + ld("32x32b", 16, 16) + save(16) + SYNC
    fails(body + one_thread(MMA + COMMIT) + wait() + dealloc(), "may still read", "race")


def test_reading_unwritten_tensor_memory_is_reported():
    fails(READY + quarter() + ld("32x32b", 16, 16) + WAIT_LD + dealloc(), "nothing wrote", "uninitialised")
    fails(READY + one_thread(mma("f16") + COMMIT) + wait() + dealloc(), "nothing wrote", "uninitialised")


# addresses


def test_a_warp_reaches_its_own_lanes_only():
    body = READY + STORED.replace("shl.b32 %r21, %r6, 21;", "mov.b32 %r21, 0;") + WAIT_ST + dealloc()
    fails(body, "starts at lane 0, warp . may use", "tensor memory")


@pytest.mark.parametrize("column", [COLUMNS - 8, 500])
def test_columns_outside_the_allocation_are_reported(column):
    body = READY + load(16) + quarter(column) + st("32x32b", 16, 16) + WAIT_ST + dealloc()
    fails(body, "column", "tensor memory")


def test_an_accumulator_must_fit_the_allocation():
    body = READY + one_thread(mma("f16", d=f"%r20+{COLUMNS - 8}", enable="0") + COMMIT) + wait() + dealloc()
    fails(body, "not allocated", "tensor memory")


def test_an_accumulator_of_128_rows_starts_at_lane_0():
    body = READY + one_thread(mma("f16", d=f"%r20+{16 << 16}", enable="0") + COMMIT) + wait() + dealloc()
    fails(body, "accumulator of M = 128 at lane 16", "tensor memory")


def test_the_address_must_be_uniform():
    body = READY + load(16) + quarter() + "add.s32 %r21, %r21, %r1;\n" + st("32x32b", 16, 16) + WAIT_ST + dealloc()
    fails(body, "differs between the lanes", "convergence")


# descriptors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"mov.b32 %r10, {idesc(128, 8, 'bf16', 'bf16')};\n", "N is 8"),
        (f"mov.b32 %r10, {idesc(256, 16, 'bf16', 'bf16')};\n", "M is 256"),
        (f"mov.b32 %r10, {idesc(128, 16, 'bf16', 'bf16') | 4};\n", "bit 2"),
        (f"mov.b64 %d10, {A_TILE.bits & ~(7 << 46)};\n", "version 0"),
        (f"mov.b64 %d10, {A_TILE.bits & ~(7 << 61) | 3 << 61};\n", "layout code 3"),
    ],
)
def test_illegal_descriptors_are_reported(change, message):
    fails(READY + change + one_thread(MMA + COMMIT) + wait() + dealloc(), message, "descriptor")


def test_a_in_tensor_memory_is_k_major():
    change = f"mov.b32 %r10, {idesc(128, 16, 'bf16', 'bf16', a_mn=True)};\n"
    body = READY + change + one_thread(mma("f16", a="[%r20]", enable="0") + COMMIT) + wait() + dealloc()
    fails(body, "MN-major", "descriptor")


@pytest.mark.parametrize(
    "text",
    [
        mma("i8"),
        mma("f16").replace("kind::f16", "kind::f16.ws"),
        mma("f16").replace("kind::f16", "kind::mxf8f6f4.block_scale"),
        mma("f16", tail=", {1, 2}"),
        mma("f8f6f4", enable="1, 1"),
        ld("32x32b", 16, 15),
        ld("16x256b", 64, 256),
        st("16x128b", 2, 2),
        "tcgen05.shift.cta_group::1.down [%r20];\n",
        "tcgen05.cp.cta_group::1.128x128b.b8x16.b4x16_p64 [%r20], %d10;\n",
    ],
)
def test_unmodelled_forms_are_unknown_when_loaded(text):
    with pytest.raises(UnknownInstruction):
        result(READY + quarter() + text + dealloc())


def test_collector_hints_change_nothing():
    body = READY + one_thread(mma("f16", enable="0", collector=".collector::a::lastuse") + COMMIT) + wait() + READ
    assert (result(body + dealloc()) == PRODUCT).all()
