"""Tensor copies: what lands where, who is told, and what is refused."""

import dataclasses

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError, UnknownInstruction
from jax_fa4.emulator.launch import Buffer, Options, TensorMap
from jax_fa4.emulator.layout import number, swizzle

from .snippet import run_body

SMEM = 8192
BARRIER = 8064  # offset of the mbarrier in shared memory, behind the box
DTYPES = {"u8": np.uint8, "bf16": np.uint16, "f16": np.uint16, "f32": np.float32, "u32": np.uint32, "s32": np.int32}

START = f"""
mov.u32 %r1, %tid.x;
mov.b32 %r2, smem;
add.s32 %r3, %r2, {BARRIER};
shl.b32 %r4, %r1, 2;
add.s32 %r5, %r2, %r4;
mov.b64 %d2, p0;
cvta.param.u64 %d3, %d2;
setp.ne.b32 %p1, %r1, 0;
"""
INIT = """
@%p1 bra INITIALISED;
mbarrier.init.shared.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
bar.sync 0;
"""
WAIT = """
POLL:
mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
@%p2 bra LANDED;
bra POLL;
LANDED:
"""


def load(coordinates, size, *, at=0, form="shared::cta.global.tile", tail=""):
    """One thread expects `size` bytes and starts the copy to smem + at."""
    c = ", ".join(map(str, coordinates))
    return f"""
@%p1 bra ISSUED;
mbarrier.arrive.expect_tx.shared.b64 %d1, [%r3], {size};
cp.async.bulk.tensor.{len(coordinates)}d.{form}.mbarrier::complete_tx::bytes [%r2+{at}], [%d3, {{{c}}}], [%r3]{tail};
ISSUED:
"""


def dump(size, param="p1", at=0):
    """All threads copy shared memory to global memory, word by word."""
    lines = [f"ld.param.b64 %d4, [{param}];", "mul.wide.u32 %d5, %r4, 1;", "add.s64 %d4, %d4, %d5;"]
    for i in range(0, size, 128):
        lines += [f"ld.shared.b32 %r9, [%r5+{at + i}];", f"st.global.b32 [%d4+{i}], %r9;"]
    return "\n".join(lines)


def fill(size):
    """All threads write shared memory from a buffer (parameter 1), and make it visible to the async proxy."""
    lines = ["ld.param.b64 %d4, [p1];", "mul.wide.u32 %d5, %r4, 1;", "add.s64 %d4, %d4, %d5;"]
    for i in range(0, size, 128):
        lines += [f"ld.global.b32 %r9, [%d4+{i}];", f"st.shared.b32 [%r5+{i}], %r9;"]
    return "\n".join([*lines, "fence.proxy.async.shared::cta;", "bar.sync 0;"])


def store(coordinates, form="cp.async.bulk.tensor", operation=""):
    c = ", ".join(map(str, coordinates))
    return f"""
@%p1 bra STORED;
{form}.{len(coordinates)}d.global.shared::cta{operation}.tile.bulk_group [%d3, {{{c}}}], [%r2];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
STORED:
"""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A contiguous array (outermost dimension first) and the map of it."""

    array: np.ndarray
    map: TensorMap

    @classmethod
    def random(cls, dtype, shape, box, **options):
        """`shape` outermost first, `box` innermost first, as a map has it."""
        rng = np.random.default_rng(len(shape) + box[0])
        array = rng.integers(0, 256, (*shape[:-1], shape[-1] * np.dtype(DTYPES[dtype]).itemsize)).astype(np.uint8)
        array = np.ascontiguousarray(array).view(DTYPES[dtype])
        return cls.of(array, dtype, box, **options)

    @classmethod
    def of(cls, array, dtype, box, **options):
        dims = array.shape[::-1]
        strides = tuple(array.strides[:-1][::-1])
        return cls(array, TensorMap(buffer=Buffer(array), dtype=dtype, dims=dims, strides=strides, box=box, **options))

    def box(self, coordinates, outside=0):
        """The elements of a box by plain loops: 1-D, innermost fastest."""
        steps = self.map.element_strides or (1,) * self.array.ndim
        counts = [-(-b // s) for b, s in zip(self.map.box, steps, strict=True)][::-1]
        start, steps = coordinates[::-1], steps[::-1]
        values = []
        for index in np.ndindex(*counts):
            at = tuple(c + i * s for c, i, s in zip(start, index, steps, strict=True))
            inside = all(0 <= a < d for a, d in zip(at, self.array.shape, strict=True))
            values.append(self.array[at] if inside else outside)
        return np.array(values, self.array.dtype)

    def swizzled(self, values, start=1024):
        """Bytes in shared memory of a box that starts at `start`."""
        linear = start + np.arange(values.nbytes)
        memory = np.zeros(values.nbytes, np.uint8)
        memory[swizzle.by_name(self.map.swizzle)(linear) - start] = values.view(np.uint8)
        return memory


def run_load(tensor, coordinates, options=None, **how):
    size = tensor.box(coordinates).nbytes
    landed = np.zeros(-(-size // 128) * 128, np.uint8)
    body = START + INIT + load(coordinates, size, **how) + WAIT + dump(size)
    run_body(body, params=(tensor.map, Buffer(landed)), smem=SMEM, options=options)
    return landed[:size]


TILES = {
    "none": Tensor.random("bf16", (40, 96), (32, 12), swizzle="none"),
    "32B": Tensor.random("bf16", (40, 96), (16, 24), swizzle="32B"),
    "64B": Tensor.random("bf16", (40, 96), (32, 24), swizzle="64B"),
    "128B": Tensor.random("bf16", (40, 96), (64, 24), swizzle="128B"),
    "128B-atom32": Tensor.random("f32", (40, 96), (32, 24), swizzle="128B_ATOM_32B"),
    "128B-atom32-flip8": Tensor.random("u8", (40, 128), (128, 24), swizzle="128B_ATOM_32B_FLIP_8B"),
    "128B-atom64": Tensor.random("u8", (40, 128), (128, 24), swizzle="128B_ATOM_64B"),
}


@pytest.mark.parametrize("mode", TILES)
@pytest.mark.parametrize("corner", [(0, 0), (8, 30), (-8, -3), (-200, 0)], ids=["inside", "end", "negative", "outside"])
def test_a_loaded_box_is_swizzled_and_zero_outside_the_tensor(mode, corner):
    tensor = TILES[mode]
    assert (run_load(tensor, corner) == tensor.swizzled(tensor.box(corner))).all()


RANKS = {
    "1d": (Tensor.random("u32", (100,), (64,)), (30,)),
    "3d": (Tensor.random("u8", (3, 5, 48), (32, 4, 2)), (-1, 3, 2)),
    "4d": (Tensor.random("f16", (2, 2, 3, 64), (16, 2, 1, 2)), (50, 1, 0, -1)),
    "5d": (Tensor.random("f32", (3, 2, 2, 3, 8), (4, 2, 2, 1, 2)), (2, 1, 1, 1, 1)),
    "steps": (Tensor.random("bf16", (5, 9, 32), (16, 7, 8), element_strides=(1, 3, 2)), (8, 1, 2)),
}


@pytest.mark.parametrize("rank", RANKS)
def test_boxes_of_every_rank(rank):
    tensor, corner = RANKS[rank]
    assert (run_load(tensor, corner).view(tensor.array.dtype) == tensor.box(corner)).all()


def test_elements_outside_may_be_filled_with_nan():
    tensor = Tensor.random("f32", (4, 8), (8, 4), oob_fill="nan")
    values = run_load(tensor, (4, 1)).view(np.uint32)
    assert (values == Tensor.of(tensor.array.view(np.uint32), "u32", (8, 4)).box((4, 1), outside=0x7FF77FF7)).all()


@pytest.mark.parametrize("completion", ["early", "late", "random"])
def test_completion_at_any_time_gives_the_same(completion):
    tensor = TILES["128B"]
    landed = run_load(tensor, (0, 0), Options(completion=completion, order="random", seed=3))
    assert (landed == tensor.swizzled(tensor.box((0, 0)))).all()


def test_the_swizzle_counts_from_the_absolute_address():
    """A box that starts at row 3 of the pattern."""
    tensor = TILES["128B"]
    size = tensor.box((0, 0)).nbytes
    landed = np.zeros(size, np.uint8)
    body = START + INIT + load((0, 0), size, at=384) + WAIT + dump(size, at=384)
    run_body(body, params=(tensor.map, Buffer(landed)), smem=SMEM)
    assert (landed == tensor.swizzled(tensor.box((0, 0)), start=1024 + 384)).all()
    assert (landed != tensor.swizzled(tensor.box((0, 0)))).any()


# stores and reductions


def run_store(tensor, coordinates, values, form="cp.async.bulk.tensor", operation="", options=None):
    source = tensor.swizzled(values)
    padded = np.zeros(-(-source.nbytes // 128) * 128, np.uint8)
    padded[: source.nbytes] = source
    body = START + fill(padded.nbytes) + store(coordinates, form, operation)
    run_body(body, params=(tensor.map, Buffer(padded)), smem=SMEM, options=options)


@pytest.mark.parametrize("mode", TILES)
@pytest.mark.parametrize("corner", [(8, 3), (80, 30), (500, 0)], ids=["inside", "end", "outside"])
@pytest.mark.parametrize("completion", ["early", "late"])
def test_a_stored_box_changes_only_elements_of_the_tensor(mode, corner, completion):
    tile = TILES[mode]
    tensor = Tensor.of(tile.array.copy(), tile.map.dtype, tile.map.box, swizzle=tile.map.swizzle)
    rows, columns = tile.map.box[::-1]
    values = np.random.default_rng(5).integers(0, 250, (rows, columns)).astype(tensor.array.dtype)
    expected = tile.array.copy()
    for i, j in np.ndindex(rows, columns):
        if 0 <= corner[1] + i < expected.shape[0] and 0 <= corner[0] + j < expected.shape[1]:
            expected[corner[1] + i, corner[0] + j] = values[i, j]
    run_store(tensor, corner, values.reshape(-1), options=Options(completion=completion))
    assert tensor.array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", [("cp.async.bulk.tensor", ""), ("cp.reduce.async.bulk.tensor", ".add")])
@pytest.mark.parametrize("corner", [(-1, 0), (0, -1)])
def test_stores_do_not_start_before_the_tensor(form, corner):
    tensor = Tensor.random("f32", (9, 32), (32, 8), swizzle="128B")
    with pytest.raises(ExecutionError, match="starts at negative coordinates"):
        run_store(tensor, corner, tensor.box((0, 0)), *form)


@pytest.mark.parametrize(
    ("dtype", "operation", "function"),
    [
        ("f32", "add", np.add),
        ("u32", "add", np.add),
        ("s32", "min", np.minimum),
        ("s32", "max", np.maximum),
        ("u32", "and", np.bitwise_and),
        ("u32", "or", np.bitwise_or),
        ("u32", "xor", np.bitwise_xor),
    ],
)
def test_a_reduction_combines_with_what_is_there(dtype, operation, function):
    old = np.random.default_rng(1).integers(-99, 99, (9, 32)).astype(DTYPES[dtype])
    new = np.random.default_rng(2).integers(-99, 99, (8, 32)).astype(DTYPES[dtype])
    tensor = Tensor.of(old.copy(), dtype, (32, 8), swizzle="128B")
    run_store(tensor, (0, 2), new.reshape(-1), "cp.reduce.async.bulk.tensor", f".{operation}")
    expected = old.copy()
    expected[2:] = function(old[2:], new[:7])
    assert (tensor.array == expected).all()


def test_bfloat16_sums_are_rounded_to_nearest():
    old = number.encode_bf16(np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32))
    new = number.encode_bf16(np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32))
    tensor = Tensor.of(old.copy(), "bf16", (64, 8))
    run_store(tensor, (0, 0), new.reshape(-1), "cp.reduce.async.bulk.tensor", ".add")
    assert (tensor.array == number.encode_bf16(number.BF16.decode(old) + number.BF16.decode(new))).all()


@pytest.mark.parametrize(("opcode", "suffix", "times"), [("cp.async", "", 1), ("cp.reduce.async", ".add", 32)])
def test_a_store_that_all_lanes_issue_alike_happens_once_but_a_reduction_in_every_lane(opcode, suffix, times):
    """So does the machine code that the assembler makes: kernels leave the election out for stores."""
    tensor = Tensor.of(np.zeros((8, 32), np.float32), "f32", (32, 8), swizzle="128B")
    ones = np.ones(256, np.float32)
    body = START + fill(1024) + store((0, 0), f"{opcode}.bulk.tensor", suffix).replace("@%p1 bra STORED;", "")
    result = run_body(body, params=(tensor.map, Buffer(ones)), smem=SMEM)
    assert (tensor.array == times).all()
    assert result.stats.total("tma_store_bytes") == times * ones.nbytes


# clusters


def multicast(mask, group=""):
    form = f"shared::cluster.global.tile.multicast::cluster{group}"
    return f"""
mov.u32 %r6, %cluster_ctarank;
setp.ne.b32 %p3, %r6, 0;
@%p1 bra EXPECTED;
{{expect}}
EXPECTED:
barrier.cluster.arrive;
barrier.cluster.wait;
or.pred %p4, %p1, %p3;
@%p4 bra ISSUED;
mov.b16 %h1, {mask};
cp.async.bulk.tensor.2d.{form}.mbarrier::complete_tx::bytes [%r2], [%d3, {{0, 0}}], [%r3], %h1;
ISSUED:
"""


EXPECT = "mbarrier.arrive.expect_tx.shared.b64 %d1, [%r3], {size};"
OWN_DUMP = "mul.lo.u32 %r7, %r6, {size};\nadd.s32 %r4, %r4, %r7;\n"


def test_a_multicast_box_lands_in_every_cta_of_the_mask():
    tensor = TILES["128B"]
    size = tensor.box((0, 0)).nbytes
    landed = np.zeros((2, size), np.uint8)
    body = multicast(3).replace("{expect}", EXPECT.format(size=size))
    body = START + INIT + body + WAIT + OWN_DUMP.format(size=size) + dump(size)
    body += "\nbarrier.cluster.arrive;\nbarrier.cluster.wait;"
    run_body(body, params=(tensor.map, Buffer(landed)), smem=SMEM, grid=(2, 1, 1), cluster=(2, 1, 1))
    assert (landed == tensor.swizzled(tensor.box((0, 0)))).all()


def test_a_pair_may_signal_one_barrier_for_both():
    """cta_group::2: both destinations count on the even CTA's barrier, which expects all the bytes."""
    tensor = TILES["128B"]
    size = tensor.box((0, 0)).nbytes
    landed = np.zeros((2, size), np.uint8)
    expect = f"@%p3 bra EXPECTED;\nmbarrier.arrive.expect_tx.shared.b64 %d1, [%r3], {2 * size};"
    body = START + INIT + multicast(3, ".cta_group::2").replace("{expect}", expect)
    body += "@%p3 bra LANDED;" + WAIT + "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    body += OWN_DUMP.format(size=size) + dump(size)
    run_body(body, params=(tensor.map, Buffer(landed)), smem=SMEM, grid=(2, 1, 1), cluster=(2, 1, 1), target="sm_100a")
    assert (landed == tensor.swizzled(tensor.box((0, 0)))).all()


# what is refused

TILE = TILES["128B"]
SIZE = TILE.box((0, 0)).nbytes
RESULT = np.zeros(SIZE, np.uint8)


def fails(body, check, message, *, map=TILE.map, error=ExecutionError, **how):
    with pytest.raises(error, match=message) as caught:
        run_body(body, params=(map, Buffer(RESULT)), smem=SMEM, **how)
    assert caught.value.check == check


def test_a_box_must_be_aligned_to_128_bytes():
    fails(START + INIT + load((0, 0), SIZE, at=64), "alignment", "multiple of 128")


def test_a_box_must_fit_shared_memory():
    fails(START + INIT + load((0, 0), SIZE, at=5888), "bounds", "lies outside")


def test_the_rank_of_map_and_instruction_must_agree():
    fails(START + INIT + load((0, 0, 0), SIZE), "tensor map", "3 coordinates for a map of rank 2")


def test_the_map_must_be_one():
    body = START + INIT + load((0, 0), SIZE).replace("[%d3,", "[%d3+64,")
    fails(body, "tensor map", "no tensor map")


def test_reading_before_the_wait_is_reported():
    fails(START + INIT + load((0, 0), SIZE) + dump(SIZE), "in flight", "in flight")


def test_writing_where_a_copy_will_land_is_reported():
    body = START + INIT + load((0, 0), SIZE) + "st.shared.b32 [%r5+128], %r1;" + WAIT
    fails(body, "in flight", "in flight", options=Options(completion="late"))


def test_loading_over_unread_data_of_another_warp_is_reported():
    """Warp 1 reads what warp 0's next load overwrites, and nobody has told warp 0 that it is done."""
    again = load((0, 8), SIZE).replace("ISSUED", "ISSUED2")
    body = START + INIT + load((0, 0), SIZE) + WAIT + "ld.shared.b32 %r9, [%r5];" + again
    fails(body, "race", "overwrites", threads=64, options=Options(completion="early"))


def test_an_mbarrier_needs_its_fence_before_asynchronous_use():
    body = START + INIT.replace("fence.mbarrier_init.release.cluster;", "") + load((0, 0), SIZE)
    fails(body, "mbarrier", "fence.mbarrier_init")


def test_too_few_expected_bytes_are_reported():
    fails(START + INIT + load((0, 0), SIZE - 16) + WAIT, "mbarrier", "more")


def test_too_many_expected_bytes_are_a_deadlock():
    fails(START + INIT + load((0, 0), SIZE + 16) + WAIT, "deadlock", "16 bytes", error=Deadlock)


def test_storing_what_was_written_without_a_proxy_fence_is_reported():
    body = START + fill(SIZE).replace("fence.proxy.async.shared::cta;", "") + store((0, 0))
    fails(body, "proxy fence", "without fence")


def test_storing_what_another_warp_wrote_without_a_barrier_is_reported():
    body = START + fill(SIZE).replace("bar.sync 0;", "") + store((0, 0))
    fails(body, "race", "not ordered", threads=64)


def test_overwriting_the_source_of_a_store_is_reported():
    body = START + fill(SIZE) + store((0, 0)).replace("cp.async.bulk.wait_group 0;", "")
    fails(body + "st.shared.b32 [%r5], %r1;", "race", "may still read")


def test_storing_unwritten_shared_memory_is_reported():
    fails(START + store((0, 0)), "uninitialised", "nothing wrote")


def test_the_barrier_must_be_in_the_destinations_cta():
    body = START + INIT + "mapa.shared::cluster.u32 %r3, %r3, 1;\n" + "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    body += """@%p1 bra ISSUED;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%d3, {0, 0}], [%r3];
ISSUED:"""
    fails(body, "mbarrier", "must be in that CTA", grid=(2, 1, 1), cluster=(2, 1, 1))


def test_a_multicast_mask_must_name_ctas_of_the_cluster():
    body = START + INIT + multicast(5).replace("{expect}", EXPECT.format(size=SIZE)) + WAIT
    fails(body, "bounds", "multicast mask", grid=(2, 1, 1), cluster=(2, 1, 1))


def test_a_load_beyond_the_buffer_is_reported():
    """A map that claims more rows than its buffer holds."""
    wrong = dataclasses.replace(TILE.map, dims=(96, 41))
    fails(START + INIT + load((0, 20), SIZE) + WAIT, "bounds", "buffer of", map=wrong)


@pytest.mark.parametrize("form", ["shared::cta.global.im2col", "shared::cta.global.tile::gather4"])
def test_unmodelled_forms_are_unknown_when_loaded(form):
    with pytest.raises(UnknownInstruction, match=r"bulk\.tensor"):
        run_body(START + INIT + load((0, 0), SIZE, form=form), params=(TILE.map, Buffer(RESULT)), smem=SMEM)


def test_hints_do_nothing():
    body = START + "prefetch.tensormap [%d3];\ncp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d3, {0, 0}];"
    run_body(body, params=(TILE.map, Buffer(RESULT)), smem=SMEM)
