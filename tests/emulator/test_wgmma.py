"""wgmma: products of every type and layout against numpy, and the rules of fence, commit and wait."""

import dataclasses

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError, UnknownInstruction
from jax_fa4.emulator.launch import Buffer, Options
from jax_fa4.emulator.layout import fragment, matrix, number, swizzle

from .snippet import run_body

BASE = 0x400  # address of smem
B_AT = 0x2000  # offset of B's tile in shared memory, A's is at 0
SMEM = 0x6000
CODES = {swizzle.NONE: 0, swizzle.B128: 1, swizzle.B64: 2, swizzle.B32: 3}
D, A = 100, 300  # the first %r of the fragments


def encode_fp8(values, name):
    table = number.FORMATS[name].decode(np.arange(256, dtype=np.uint8))
    return np.array([np.flatnonzero(table == value)[0] for value in values.ravel()], np.uint8).reshape(values.shape)


ENCODE = {
    "s8": lambda values: values.astype(np.int8).view(np.uint8),
    "u8": lambda values: values.astype(np.uint8),
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
        """The descriptor: dense, 8 rows (or a swizzle's width of them) after another."""
        size = number.FORMATS[self.name].element_bytes
        rows = len(self.values)
        if self.mode is swizzle.NONE:
            leading, stride = (8 * 16 * (rows // 8), 128) if not self.mn_major else (128 * (rows * size // 16), 128)
        elif self.mn_major:
            leading, stride = self.mode.span_bytes * 32 // size, 8 * self.mode.span_bytes
        else:
            leading, stride = 16, 8 * self.mode.span_bytes
        start = BASE + self.at
        return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | CODES[self.mode] << 62

    def place(self, smem):
        """Write the tile into an image of shared memory."""
        f = number.FORMATS[self.name]
        addresses = matrix.element_addresses(
            matrix.decode_wgmma(self.bits),
            rows=len(self.values),
            element_bytes=f.element_bytes,
            mn_major=self.mn_major,
        )
        assert len(np.unique(addresses)) == addresses.size
        smem.view(f.bits_dtype)[(addresses - BASE) // f.element_bytes] = ENCODE[self.name](self.values)


START = """
mov.u32 %r1, %tid.x;
mov.b32 %r2, smem;
shl.b32 %r4, %r1, 2;
add.s32 %r5, %r2, %r4;
ld.param.b64 %d1, [p0];
ld.param.b64 %d2, [p1];
ld.param.b64 %d3, [p2];
mul.wide.u32 %d4, %r1, 4;
add.s64 %d1, %d1, %d4;
add.s64 %d2, %d2, %d4;
add.s64 %d3, %d3, %d4;
"""


def fill(size=SMEM):
    return "\n".join(f"ld.global.b32 %r9, [%d1+{i}];\nst.shared.b32 [%r5+{i}], %r9;" for i in range(0, size, 512))


VISIBLE = "\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"


def load(first, count, base="%d2"):
    return "\n".join(f"ld.global.b32 %r{first + i}, [{base}+{512 * i}];" for i in range(count)) + "\n"


def save(count, base="%d3"):
    return "\n".join(f"st.global.b32 [{base}+{512 * i}], %r{D + i};" for i in range(count)) + "\n"


def vector(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def registers_of(n, accumulator):
    return n // 4 if accumulator == "f16" else n // 2


def wgmma(n, types, *, a="%d10", scale="1", tail=", 1, 1, 0, 0", first=D):
    k = 32 // number.FORMATS[types[1]].element_bytes
    d = vector(first, registers_of(n, types[0]))
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{'.'.join(types)} {d}, {a}, %d11, {scale}{tail};\n"


def descriptors(a, b):
    return f"mov.b64 %d10, {a.bits if a else 0};\nmov.b64 %d11, {b.bits};\n"


FENCE = "wgmma.fence.sync.aligned;\n"
FINISH = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"


def image(*tiles):
    smem = np.zeros(SMEM, np.uint8)
    for tile in tiles:
        tile.place(smem)
    return smem


def integers(seed, shape, low=-4, high=5):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def run(body, smem, registers, options=None, threads=128):
    """Run for one warpgroup. `registers` [count, 128]: what `load` finds. Returns what `save` stored, [128, 128]."""
    out = np.zeros((128, threads), np.uint32)
    params = (Buffer(smem), Buffer(np.ascontiguousarray(registers, np.uint32)), Buffer(out))
    run_body(START + body, params=params, threads=threads, smem=SMEM, options=options)
    return out


def as_threads(words):
    """[warp, register, lane] -> [register, thread]."""
    return np.moveaxis(words, 0, 1).reshape(words.shape[1], 128)


def as_warps(registers):
    return np.moveaxis(registers.reshape(-1, 4, 32), 1, 0)


def d_registers(d, accumulator):
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[accumulator]
    return as_threads(fragment.scatter_accumulator(d.astype(dtype).view(f"u{np.dtype(dtype).itemsize}")))


def multiply(a, b, d=None, *, n, types, options=None, scale="1", tail=", 1, 1, 0, 0"):
    """D (+)= A B^T through the emulator; `a` and `b` are tiles, or `a` a matrix for registers."""
    count = registers_of(n, types[0])
    d = np.zeros((64, n), np.float32) if d is None else d
    in_registers = not isinstance(a, Tile)
    registers = d_registers(d, types[0])
    body = fill() + VISIBLE + load(D, count)
    if in_registers:
        coordinates = fragment.a_coordinates(number.FORMATS[types[1]].element_bytes)
        words = np.ascontiguousarray(ENCODE[types[1]](a)[coordinates.row, coordinates.column]).view(np.uint32)[..., 0]
        registers = np.concatenate([registers, as_threads(words)])
        body += "\n".join(f"ld.global.b32 %r{A + i}, [%d2+{512 * (count + i)}];" for i in range(4)) + "\n"
    operand = vector(A, 4) if in_registers else "%d10"
    body += descriptors(None if in_registers else a, b) + FENCE
    body += wgmma(n, types, a=operand, scale=scale, tail=tail) + FINISH + save(count)
    smem = image(*([b] if in_registers else [a, b]))
    out = run(body, smem, registers, options)[:count]
    bits = {"f32": np.uint32, "f16": np.uint16, "s32": np.uint32}[types[0]]
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[types[0]]
    return fragment.gather_accumulator(np.ascontiguousarray(as_warps(out)), n, bits).view(dtype)


def operands(n, types, seed=0, **layout):
    k = 32 // number.FORMATS[types[1]].element_bytes
    low = 0 if "u8" in types else -4
    a = Tile(integers(seed, (64, k), low), types[1], 0, **layout)
    b = Tile(integers(seed + 1, (n, k), low), types[2], B_AT, **layout)
    return a, b


TYPES = {
    "bf16": (("f32", "bf16", "bf16"), ", 1, 1, 0, 0"),
    "f16": (("f32", "f16", "f16"), ", 1, 1, 0, 0"),
    "f16-f16": (("f16", "f16", "f16"), ", 1, 1, 0, 0"),
    "tf32": (("f32", "tf32", "tf32"), ", 1, 1"),
    "e4m3": (("f32", "e4m3", "e4m3"), ", 1, 1"),
    "e5m2-e4m3": (("f32", "e5m2", "e4m3"), ", 1, 1"),
    "e4m3-f16": (("f16", "e4m3", "e4m3"), ", 1, 1"),
    "s8": (("s32", "s8", "s8"), ""),
    "u8-s8": (("s32", "u8", "s8"), ""),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n", [8, 24, 64, 256])
@pytest.mark.parametrize("is_exact", [False, True], ids=["fast", "exact"])
def test_products_of_every_type(name, n, is_exact):
    types, tail = TYPES[name]
    a, b = operands(n, types)
    d = integers(7, (64, n), -99, 100)
    got = multiply(a, b, d, n=n, types=types, tail=tail, options=Options(exact_mma=is_exact))
    assert (got == d + a.values @ b.values.T).all()


@pytest.mark.parametrize("mode", CODES, ids=["none", "128B", "64B", "32B"])
@pytest.mark.parametrize("majors", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["k-k", "k-mn", "mn-k", "mn-mn"])
def test_operands_of_every_layout(mode, majors):
    types = ("f32", "bf16", "bf16")
    a = Tile(integers(0, (64, 16)), "bf16", 0, mode, bool(majors[0]))
    b = Tile(integers(1, (128, 16)), "bf16", B_AT, mode, bool(majors[1]))
    got = multiply(a, b, n=128, types=types, tail=f", 1, 1, {majors[0]}, {majors[1]}")
    assert (got == a.values @ b.values.T).all()


@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "s8"])
def test_a_may_come_from_registers(name):
    types, tail = TYPES[name]
    a, b = operands(32, types)
    got = multiply(a.values, b, n=32, types=types, tail=tail.removesuffix(", 0"))
    assert (got == a.values @ b.values.T).all()


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
def test_operands_may_be_negated(signs):
    types = ("f32", "f16", "f16")
    a, b = operands(16, types)
    got = multiply(a, b, n=16, types=types, tail=f", {signs[0]}, {signs[1]}, 0, 0")
    assert (got == signs[0] * signs[1] * (a.values @ b.values.T)).all()


def test_without_scale_d_the_old_accumulator_is_ignored():
    types = ("f32", "bf16", "bf16")
    a, b = operands(16, types)
    got = multiply(a, b, np.full((64, 16), np.nan), n=16, types=types, scale="0")
    assert (got == a.values @ b.values.T).all()


def test_saturated_integers_stay_at_the_limit():
    types = ("s32", "s8", "s8")
    a, b = operands(16, types)
    top = np.full((64, 16), 2**31 - 1)
    body = fill() + VISIBLE + load(D, 8) + descriptors(a, b) + FENCE
    body += wgmma(16, types, tail="").replace(".s32.s8.s8", ".satfinite.s32.s8.s8") + FINISH + save(8)
    out = as_warps(run(body, image(a, b), d_registers(top, "s32"))[:8])
    got = fragment.gather_accumulator(np.ascontiguousarray(out), 16, np.uint32).view(np.int32)
    expected = np.minimum(2**31 - 1 + (a.values @ b.values.T).astype(np.int64), 2**31 - 1)
    assert (got == expected).all()


# order

TYPES_BF16 = ("f32", "bf16", "bf16")
A_TILE, B_TILE = operands(16, TYPES_BF16)
PRODUCT = A_TILE.values @ B_TILE.values.T
COUNT = 8
READY = fill() + VISIBLE + load(D, COUNT) + descriptors(A_TILE, B_TILE)
MMA = wgmma(16, TYPES_BF16)
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;\n", "wgmma.wait_group.sync.aligned {};\n"


def result(body, **how):
    out = run(body, image(A_TILE, B_TILE), np.zeros((COUNT, 128)), **how)[:COUNT]
    return fragment.gather_accumulator(np.ascontiguousarray(as_warps(out)), 16, np.uint32).view(np.float32)


@pytest.mark.parametrize("completion", ["early", "late", "random"])
@pytest.mark.parametrize("order", ["round_robin", "random"])
def test_chains_accumulate_whenever_they_complete(completion, order):
    body = READY + FENCE + MMA + MMA + COMMIT + MMA + COMMIT + WAIT.format(0) + save(COUNT)
    assert (result(body, options=Options(completion=completion, order=order, seed=5)) == 3 * PRODUCT).all()


def test_waiting_for_all_but_one_group_frees_the_older_ones():
    other = wgmma(16, TYPES_BF16, first=D + 32, scale="0")
    body = READY + FENCE + MMA + COMMIT + other + COMMIT + WAIT.format(1) + save(COUNT) + WAIT.format(0)
    assert (result(body) == PRODUCT).all()


def fails(body, message, check="wgmma", error=ExecutionError, **how):
    with pytest.raises(error, match=message) as caught:
        result(body, **how)
    assert caught.value.check == check


@pytest.mark.parametrize("completion", ["early", "late"])
def test_reading_an_accumulator_before_the_wait_is_reported(completion):
    fails(
        READY + FENCE + MMA + COMMIT + save(COUNT) + WAIT.format(0), "in flight", options=Options(completion=completion)
    )


def test_waiting_for_too_few_groups_is_reported():
    fails(READY + FENCE + MMA + COMMIT + WAIT.format(1) + save(COUNT) + WAIT.format(0), "in flight")


def test_waiting_without_a_commit_waits_for_nothing():
    fails(READY + FENCE + MMA + WAIT.format(0) + save(COUNT), "in flight")


def test_writing_an_accumulator_in_flight_is_reported():
    fails(READY + FENCE + MMA + COMMIT + f"mov.b32 %r{D + 3}, 0;\n" + WAIT.format(0), "in flight")


def test_writing_a_registers_of_a_product_in_flight_is_reported():
    rs = wgmma(16, TYPES_BF16, a=vector(A, 4), tail=", 1, 1, 0")
    body = READY + load(A, 4) + FENCE + rs + COMMIT + f"mov.b32 %r{A}, 0;\n" + WAIT.format(0)
    fails(body, "in flight")


def test_the_first_wgmma_needs_a_fence():
    fails(READY + MMA + FINISH, "needs a wgmma.fence")


def test_touching_an_accumulator_after_the_fence_is_reported():
    fails(READY + FENCE + f"mov.b32 %r{D}, 0;\n" + MMA + FINISH, "touched since")


def test_each_batch_after_using_the_accumulators_needs_a_fence():
    body = READY + FENCE + MMA + FINISH + save(COUNT) + MMA + FINISH
    fails(body, "touched since")
    assert (result(READY + FENCE + MMA + FINISH + FENCE + MMA + FINISH + save(COUNT)) == 2 * PRODUCT).all()


def test_an_accumulator_in_flight_can_not_be_operand_a():
    rs = wgmma(16, TYPES_BF16, a=vector(D, 4), tail=", 1, 1, 0", first=D + 32, scale="0")
    fails(READY + FENCE + MMA + rs + FINISH, "operand A is the accumulator")


def test_overlapping_accumulators_of_different_shape_are_reported():
    wide = wgmma(32, TYPES_BF16, scale="0")
    fails(READY + FENCE + MMA + wide + FINISH, "overlaps")


def test_groups_must_be_waited_for():
    fails(READY + FENCE + MMA + COMMIT, "never waited for")


def test_accumulating_onto_unwritten_registers_is_reported():
    body = fill() + VISIBLE + descriptors(A_TILE, B_TILE) + FENCE + MMA + FINISH
    fails(body, "never written", "uninitialised")


def test_an_unfenced_operand_is_reported():
    body = READY.replace("fence.proxy.async.shared::cta;", "") + FENCE + MMA + FINISH
    fails(body, "without fence", "proxy fence")


def test_an_operand_that_other_warps_write_without_a_barrier_is_reported():
    fails(READY.replace("bar.sync 0;", "") + FENCE + MMA + FINISH, "not ordered", "race")


def test_overwriting_an_operand_in_flight_is_reported():
    body = READY + FENCE + MMA + COMMIT + "st.shared.b32 [%r5], %r1;\n" + WAIT.format(0)
    fails(body, "may still read|not ordered", "race")


def test_an_operand_may_be_overwritten_after_the_wait_and_a_barrier():
    body = READY + FENCE + MMA + FINISH + "bar.sync 0;\nst.shared.b32 [%r5], %r1;\n" + save(COUNT)
    assert (result(body) == PRODUCT).all()


def test_unwritten_operands_are_reported():
    fails(load(D, COUNT) + descriptors(A_TILE, B_TILE) + FENCE + MMA + FINISH, "nothing wrote", "uninitialised")


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (A_TILE.bits | 1 << 49, "base offset"),
        (A_TILE.bits | 1 << 52, "reserved bits"),
    ],
)
def test_illegal_descriptors_are_reported(bits, message):
    body = READY + f"mov.b64 %d10, {bits};\n" + FENCE + MMA + FINISH
    fails(body, message, "descriptor")


def test_a_walk_out_of_shared_memory_is_reported():
    body = READY + f"mov.b64 %d10, {A_TILE.bits & ~0x3FFF | (BASE + SMEM) >> 4};\n" + FENCE + MMA + FINISH
    fails(body, "lies outside", "bounds")


def test_a_descriptor_must_be_uniform():
    body = READY + "cvt.u64.u32 %d12, %r1;\nadd.s64 %d10, %d10, %d12;\n" + FENCE + MMA + FINISH
    fails(body, "descriptor A differs", "convergence")


def test_warps_of_a_warpgroup_must_agree():
    body = READY + "shr.u32 %r6, %r1, 5;\nshl.b32 %r6, %r6, 7;\ncvt.u64.u32 %d12, %r6;\nadd.s64 %d10, %d10, %d12;\n"
    fails(body + FENCE + MMA + FINISH, "differs between its warps")


def test_all_lanes_must_take_part():
    body = READY + FENCE + "setp.eq.b32 %p1, %r1, 5;\n@%p1 bra SKIP;\n" + MMA + "SKIP:\n" + FINISH
    fails(body, "is executed by lanes", "convergence")


def test_a_warpgroup_has_four_warps():
    body = FENCE + "mov.b32 %r1, 0;"
    with pytest.raises(ExecutionError, match="warpgroup of 2 warps"):
        run(body, np.zeros(SMEM, np.uint8), np.zeros((1, 64)), threads=64)


def test_a_missing_warp_is_named():
    body = READY + FENCE + "setp.ge.u32 %p1, %r1, 96;\n@%p1 bra SKIP;\n" + MMA + FINISH + "SKIP:\n"
    fails(body, "warp 3 has not reached", "deadlock", error=Deadlock)


@pytest.mark.parametrize(
    "text",
    [
        MMA.replace("m64n16k16", "m64n20k16"),
        MMA.replace("m64n16k16", "m64n16k8"),
        MMA.replace("f32.bf16.bf16", "f32.bf16.f16"),
        MMA.replace("f32.bf16.bf16", "f16.bf16.bf16"),
        MMA.replace(", 1, 1, 0, 0", ", 2, 1, 0, 0"),
        MMA.replace(", 1, 1, 0, 0", ", 1, 1, 0"),
        wgmma(16, ("s32", "s8", "s8"), tail="").replace("m64n16k32", "m64n40k32"),
        wgmma(16, TYPES_BF16).replace(vector(D, 8), vector(D, 7)),
        MMA.replace("mma_async", "mma_async.sp"),
    ],
)
def test_illegal_forms_are_unknown_when_loaded(text):
    with pytest.raises(UnknownInstruction):
        result(READY + FENCE + text + FINISH)
