"""What a plan comes to for given buffers: grid, tensor maps, pointers, scalars and structs."""

import struct

import pytest

from jax_fa4.plan import BufferSpec, Launch, Plan, Pointer, Record, Scalar, TensorMap, dim, encode, lead
from jax_fa4.plan.limits import DTYPES

KEY = "ab" * 32
Q, OUT = range(2)


def test_a_launch_has_the_numbers_of_its_buffers(answer, make_plan, buffers):
    said = answer(make_plan(), *buffers(2, 3, 300))
    assert said == {
        "arch": "sm_90a",
        "launches": [
            {
                "cubin": KEY,
                "entry": "scale",
                "grid": [18, 1, 1],
                "block": 384,
                "cluster": [1, 1, 1],
                "smem_bytes": 100_000,
                "programmatic": False,
                "params": [
                    {
                        "address": 0x10000,
                        "dtype": "bfloat16",
                        "dims": [64, 300, 6],
                        "strides": [128, 38400],
                        "box": [64, 128, 1],
                        "swizzle": 128,
                        "l2_promotion": 128,
                    },
                    struct.pack("<Q", 0x90000).hex(),
                    struct.pack("<i", 300).hex(),
                    struct.pack("<f", 0.5).hex(),
                ],
            }
        ],
    }


@pytest.mark.parametrize("batch", [(3,), (2, 3), (5, 2, 3), (1, 1, 1, 1, 1)], ids=str)
def test_one_plan_serves_any_number_of_batch_axes(answer, make_plan, buffers, batch):
    grid = answer(make_plan(), *buffers(*batch, 129))["launches"][0]["grid"]
    total = 1
    for size in batch:
        total *= size
    assert grid == [2 * total, 1, 1]


def test_launches_keep_their_order_and_settings(answer, make_launch, make_plan, buffers):
    first = make_launch(entry="first", grid=(4, 2, 6), cluster=(2, 1, 2), params=())
    second = make_launch(entry="second", programmatic=True, smem_bytes=0, block=32, params=())
    said = answer(make_plan(launches=(first, second)), *buffers(1, 5))["launches"]
    assert [launch["entry"] for launch in said] == ["first", "second"]
    assert (said[0]["cluster"], said[0]["grid"]) == ([2, 1, 2], [4, 2, 6])
    assert (said[1]["programmatic"], said[1]["smem_bytes"], said[1]["block"]) == (True, 0, 32)


def param_of(answer, make_plan, param, *call):
    return answer(make_plan(params=(param,)), *call)["launches"][0]["params"][0]


@pytest.mark.parametrize(
    ("dtype", "value", "code"),
    [
        ("i32", -(2**31), "<i"),
        ("i32", 2**31 - 1, "<i"),
        ("u32", 2**32 - 1, "<I"),
        ("i64", -(2**63), "<q"),
        ("i64", 2**63 - 1, "<q"),
        ("f32", 1.25, "<f"),
        ("f32", float("-inf"), "<f"),
        ("f32", 3, "<f"),
    ],
)
def test_a_scalar_is_stored_in_its_type(answer, make_plan, buffers, dtype, value, code):
    said = param_of(answer, make_plan, Scalar(dtype=dtype, value=value), *buffers(1, 5))
    assert said == struct.pack(code, value).hex()


def test_a_struct_has_its_fields_in_place_and_zeros_between(answer, make_plan, buffers):
    record = Record(
        size=32,
        fields=(
            (0, Scalar(dtype="i32", value=dim(Q, -2))),
            (8, Pointer(buffer=OUT, offset=256)),
            (20, Scalar(dtype="f32", value=2.0)),
        ),
    )
    said = param_of(answer, make_plan, record, *buffers(2, 5))
    assert said == struct.pack("<i4xQ4xf8x", 5, 0x90000 + 256, 2.0).hex()


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.in_tensor_map])
def test_every_dtype_has_the_same_size_in_both_languages(answer, name):
    itemsize = DTYPES[name].itemsize
    spec = BufferSpec(name="x", dtype=name, shape=(64,))
    tensor_map = TensorMap(buffer=0, dtype=name, dims=(64, lead(0, 1)), strides=(64 * itemsize,), box=(16, 1))
    launch = Launch(cubin=KEY, entry="k", grid=(1, 1, 1), block=32, params=(tensor_map,))
    plan = Plan(arch="sm_90a", operands=(spec,), results=(), launches=(launch,))
    said = answer(plan, [(name, (3, 64), 0x1000)], [])
    assert said["launches"][0]["params"][0]["dtype"] == name


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("l2_promotion", [0, 64, 128, 256])
def test_a_tensor_map_has_its_modes(answer, make_plan, buffers, swizzle, l2_promotion):
    param = TensorMap(
        buffer=Q, dtype="bfloat16", dims=(64,), box=(16,), swizzle=swizzle, l2_promotion=l2_promotion, offset=128
    )
    said = param_of(answer, make_plan, param, *buffers(1, 5))
    assert (said["swizzle"], said["l2_promotion"], said["address"]) == (swizzle, l2_promotion, 0x10000 + 128)


def test_a_map_may_end_with_its_buffer_and_no_later(answer, error_of, make_plan, buffers):
    def rows(count):
        return make_plan(params=(TensorMap(buffer=Q, dtype="bfloat16", dims=(64, count), strides=(128,), box=(64, 1)),))

    assert "error" not in answer(rows(lead(Q, 1)), *buffers(2, 5))
    assert error_of(rows(lead(Q, 1) + 1), *buffers(2, 5)) == (
        "scale: param 0: tensor map of q: its elements reach byte 1408 of a buffer of 1280 bytes"
    )


# --- empty calls ---


def test_a_grid_with_a_zero_extent_launches_nothing(answer, make_plan, buffers):
    launch = answer(make_plan(grid=(dim(Q, -2) - 5, 1, 1)), *buffers(2, 5))["launches"][0]
    assert (launch["grid"], launch["params"]) == ([0, 1, 1], [])


def test_a_call_without_a_byte_launches_nothing(answer, make_plan, buffers):
    assert answer(make_plan(grid=(1, 1, 1)), *buffers(2, 0))["launches"][0]["grid"] == [0, 0, 0]


def attention_plan():
    """q, k, out: a kernel that runs although k has no rows."""
    specs = [BufferSpec(name=n, dtype="bfloat16", shape=(s, 64)) for n, s in (("q", "T"), ("k", "S"), ("out", "T"))]
    rows = TensorMap(
        buffer=1,
        dtype="bfloat16",
        dims=(64, dim(1, -2), lead(1, 2)),
        strides=(128, dim(1, -2) * 128),
        box=(64, 64, 1),
        swizzle=128,
    )
    launch = Launch(cubin=KEY, entry="k", grid=(lead(0, 2), 1, 1), block=32, params=(rows, Pointer(buffer=1)))
    return Plan(arch="sm_90a", operands=tuple(specs[:2]), results=tuple(specs[2:]), launches=(launch,))


def call_without_keys(q_address=0x1000, out_address=0x2000):
    operands = [("bfloat16", (2, 9, 64), q_address), ("bfloat16", (2, 0, 64), 0)]
    return operands, [("bfloat16", (2, 9, 64), out_address)]


def test_a_map_of_an_empty_buffer_is_one_element_of_a_result(answer):
    tensor_map, pointer = answer(attention_plan(), *call_without_keys())["launches"][0]["params"]
    assert tensor_map["address"] == 0x2000
    assert (tensor_map["dims"], tensor_map["strides"]) == ([1, 1, 1], [16, 16])
    assert (tensor_map["box"], tensor_map["swizzle"]) == ([64, 64, 1], 128)
    assert pointer == "00" * 8


def test_a_stand_in_is_aligned(answer, error_of):
    tensor_map, _ = answer(attention_plan(), *call_without_keys(out_address=0x2008))["launches"][0]["params"]
    assert tensor_map["address"] == 0x1000
    message = error_of(attention_plan(), *call_without_keys(q_address=0x1008, out_address=0x2008))
    assert message == "k: param 0: tensor map of k: it is empty, and no buffer of the call can stand in for it"


def test_a_zero_among_the_dims_makes_a_map_empty(answer, make_plan, buffers):
    param = TensorMap(buffer=Q, dtype="bfloat16", dims=(64, dim(Q, -2) - 5), strides=(128,), box=(64, 1))
    assert param_of(answer, make_plan, param, *buffers(2, 5))["dims"] == [1, 1]


# --- architectures ---


@pytest.mark.parametrize(
    ("arch", "runs_on", "fails_on"),
    [
        ("sm_90a", [(9, 0)], [(10, 0), (8, 9)]),
        ("sm_90", [(9, 0)], [(10, 0)]),
        ("sm_100a", [(10, 0)], [(10, 3), (9, 0), (12, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(12, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),
    ],
)
def test_a_variant_runs_on_the_devices_of_its_architecture(
    answer, make_plan, buffers, unchecked, arch, runs_on, fails_on
):
    plan = unchecked(make_plan(), arch=arch)
    for major, minor in runs_on:
        assert answer(plan, *buffers(1, 5), major=major, minor=minor)["arch"] == arch
    for major, minor in fails_on:
        error = answer(plan, *buffers(1, 5), major=major, minor=minor)["error"]
        assert error == {"code": "FAILED_PRECONDITION", "message": f"the program has kernels for {arch}"}


def test_a_program_for_two_architectures_takes_the_devices_own(answer, make_plan, buffers, unchecked):
    plans = encode([make_plan(block=384), unchecked(make_plan(block=192), arch="sm_100a")])
    blocks = {major: answer(plans, *buffers(1, 5), major=major)["launches"][0]["block"] for major in (9, 10)}
    assert blocks == {9: 384, 10: 192}
