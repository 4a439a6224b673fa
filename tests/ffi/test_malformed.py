"""Damaged or impossible plans: refused with their place, the field and its value, before anything is evaluated."""

import dataclasses
import re
import struct

import pytest

from jax_fa4.plan import Pointer, Record, Scalar, TensorMap, dim, encode, encode_images, lead
from jax_fa4.plan.expr import Binary, Const, Dim, Lead
from jax_fa4.plan.limits import DTYPES, Dtype
from jax_fa4.plan.plan import BufferSpec

Q, OUT = range(2)
NO_BUFFERS = ([], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:3], "magic: needs 4 bytes at byte 0, but 3 are left"),
        (lambda b: b"FA3P" + b[4:], "the bytes do not start with FA4P"),
        (lambda b: b[:4] + b"\2\0" + b[6:], "version must be 1, got 2"),
        (lambda b: b[:6] + b"\0" + b[7:], "number of variants must be in [1, 8], got 0"),
        (lambda b: b[:6] + b"\x09" + b[7:], "number of variants must be in [1, 8], got 9"),
        (lambda b: b + b"\0\0", "2 bytes follow its end"),
        (lambda b: b[:-1], "variant 0: launch 0: scale: param 3: value: needs 4 bytes at byte 177, but 3 are left"),
        (lambda b: b.replace(b"sm_90a", b"xx_90a"), "variant 0: arch must be like sm_90a, got xx_90a"),
        (lambda b: b.replace(b"sm_90a", b"sm_9xa"), "variant 0: arch must be like sm_90a, got sm_9xa"),
        (lambda b: b.replace(b"scale", b"sca\0e"), "variant 0: launch 0: entry must not hold NUL"),
    ],
)
def test_damaged_bytes_are_refused(error_of, make_plan, change, message):
    assert error_of(change(encode(make_plan())), *NO_BUFFERS) == f"plan: {message}"


SPEC = BufferSpec(name="q", dtype="bfloat16", shape=("T", 64))

BAD_BUFFER_SPECS = {
    "batched": ({"batched": 2}, "batched must be in [0, 1], got 2"),
    "axes": ({"shape": (1,) * 9}, "number of axes must be in [0, 8], got 9"),
    "size": ({"shape": (-1, 64)}, "size of an axis must be >= 0, got -1"),
    "name": ({"name": ""}, "name must have 1 to 255 bytes, got 0"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_BUFFER_SPECS.values(), ids=BAD_BUFFER_SPECS)
def test_an_impossible_buffer_is_refused(error_of, make_plan, unchecked, fields, message):
    plan = unchecked(make_plan(), operands=(unchecked(SPEC, **fields),))
    assert error_of(plan, *NO_BUFFERS) == f"plan: variant 0: operand 0: {message}"


def test_an_unknown_dtype_is_refused(error_of, make_plan, monkeypatch):
    monkeypatch.setitem(DTYPES, "bfloat16", Dtype(99, 2, True))
    assert error_of(make_plan(), *NO_BUFFERS) == "plan: variant 0: operand 0: dtype: XLA's type 99 is not supported"


def test_too_many_buffers_are_refused(error_of, make_plan, unchecked):
    plan = unchecked(make_plan(), operands=(SPEC,) * 64)
    assert error_of(plan, *NO_BUFFERS) == "plan: variant 0: number of buffers must be <= 64, got 65"


def test_too_many_launches_are_refused(error_of, make_launch, make_plan, unchecked):
    plan = unchecked(make_plan(), launches=(make_launch(),) * 9)
    assert error_of(plan, *NO_BUFFERS) == "plan: variant 0: number of launches must be in [0, 8], got 9"


BAD_LAUNCHES = {
    "block of none": ({"block": 0}, "block must be in [1, 1024], got 0"),
    "block": ({"block": 1025}, "block must be in [1, 1024], got 1025"),
    "cluster of none": ({"cluster": (1, 0, 1)}, "cluster must be in [1, 16], got 0"),
    "cluster": ({"cluster": (4, 4, 2)}, "cluster must have <= 16 CTAs, got 32"),
    "smem_bytes": ({"smem_bytes": 232449}, "smem_bytes must be in [0, 232448], got 232449"),
    "programmatic": ({"programmatic": 3}, "programmatic must be in [0, 1], got 3"),
    "params": ({"params": (Pointer(buffer=Q),) * 65}, "number of params must be in [0, 64], got 65"),
    "tensor maps": (
        {"params": (TensorMap(buffer=Q, dtype="bfloat16", dims=(64,), box=(64,)),) * 17},
        "number of tensor maps must be <= 16, got 17",
    ),
    "bytes": (
        {"params": (Record(size=4096, fields=()), Pointer(buffer=Q))},
        "params without tensor maps must have <= 4096 bytes, got 4104",
    ),
}


@pytest.mark.parametrize(("fields", "message"), BAD_LAUNCHES.values(), ids=BAD_LAUNCHES)
def test_an_impossible_launch_is_refused(error_of, make_launch, make_plan, unchecked, fields, message):
    plan = unchecked(make_plan(), launches=(unchecked(make_launch(), **fields),))
    assert error_of(plan, *NO_BUFFERS) == f"plan: variant 0: launch 0: scale: {message}"


MAP = TensorMap(buffer=Q, dtype="bfloat16", dims=(64, 5), strides=(128,), box=(64, 1), swizzle=128)
POINTER = Pointer(buffer=Q)
RECORD = Record(size=16, fields=((0, Scalar(dtype="i64", value=1)), (8, POINTER)))

BAD_PARAMS = {
    "a map's buffer": (MAP, {"buffer": 2}, "buffer must be < 2, got 2"),
    "a map's dtype": (MAP, {"dtype": "int16"}, "dtype: TMA does not copy int16"),
    "a map's rank": (MAP, {"dims": ()}, "rank must be in [1, 5], got 0"),
    "a map of rank 6": (MAP, {"dims": (1,) * 6}, "rank must be in [1, 5], got 6"),
    "an empty box": (MAP, {"box": (64, 0)}, "box must be in [1, 256], got 0"),
    "a large box": (MAP, {"box": (64, 257)}, "box must be in [1, 256], got 257"),
    "a row": (MAP, {"box": (12, 1)}, "a row of the box must be a multiple of 16 bytes, got 24"),
    "a swizzled row": (MAP, {"box": (128, 1)}, "a row of the box must be <= 128 bytes (swizzle), got 256"),
    "a swizzle": (MAP, {"swizzle": 16}, "swizzle: 16 is not one of its values"),
    "an L2 promotion": (MAP, {"l2_promotion": 512}, "l2_promotion: 512 is not one of its values"),
    "a pointer's buffer": (POINTER, {"buffer": 9}, "buffer must be < 2, got 9"),
    "an alignment of none": (POINTER, {"align": 0}, "align must be in [1, 256], got 0"),
    "an alignment": (POINTER, {"align": 24}, "align must be a power of two, got 24"),
    "a struct of none": (RECORD, {"size": 0}, "size must be in [1, 4096], got 0"),
    "a short struct": (RECORD, {"size": 15}, "field 1: offset must be in [8, 15 - 8], got 8"),
    "an overlap": (
        RECORD,
        {"fields": ((0, POINTER), (4, POINTER))},
        "field 1: offset must be in [8, 16 - 8], got 4",
    ),
    "a map in a struct": (RECORD, {"fields": ((0, MAP),)}, "field 0: kind must be in [1, 2], got 0"),
}


@pytest.mark.parametrize(("param", "fields", "message"), BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_an_impossible_param_is_refused(error_of, make_launch, make_plan, unchecked, param, fields, message):
    launch = unchecked(make_launch(), params=(POINTER, unchecked(param, **fields)))
    plan = unchecked(make_plan(), launches=(launch,))
    assert error_of(plan, *NO_BUFFERS) == f"plan: variant 0: launch 0: scale: param 1: {message}"


def deep(depth):
    expr = Const(1)
    for _ in range(depth - 1):
        expr = Binary("add", Const(1), expr)
    return expr


BAD_EXPRS = {
    "a buffer": (Dim(5, -1), "operation 0: buffer must be < 2, got 5"),
    "an axis": (dim(Q, -4), "operation 0: axis must be <= 3, the rank of q, got 4"),
    "a batch": (lead(Q, 4), "operation 0: axis must be <= 3, the rank of q, got 4"),
    "a stack": (deep(17), "operation 16: an expression must hold <= 16 values at once"),
    "nothing": (b"\0", "an expression must leave 1 value, it leaves 0"),
    "two values": (b"\2\0\2\0\2", "an expression must leave 1 value, it leaves 2"),
    "no operands": (b"\2\0\2\3", "operation 1: an operator needs 2 values, there are 1"),
    "a code": (b"\1\x0b", "operation 0: code must be in [0, 10], got 11"),
    "an axis from the front": (b"\1\1\0\0", "operation 0: axis must be in [1, 255], got 0"),
    "a constant": (b"\1\0" + b"\xff" * 9 + b"\2", "operation 0: constant: a varint does not fit an int64"),
    "a long constant": (b"\1\0" + b"\x80" * 11, "operation 0: constant: a varint does not fit an int64"),
}


@pytest.mark.parametrize(("expr", "message"), BAD_EXPRS.values(), ids=BAD_EXPRS)
def test_an_impossible_expression_is_refused(error_of, make_launch, make_plan, unchecked, expr, message):
    mark = Const(0x1234567)  # the bytes of grid[1], which raw bytes replace
    grid = (Const(1), expr if not isinstance(expr, bytes) else mark, Const(1))
    raw = encode(unchecked(make_plan(), launches=(unchecked(make_launch(), grid=grid),)))
    if isinstance(expr, bytes):
        code = b"\1\0\xce\x95\x9a\x12"
        assert raw.count(code) == 1
        raw = raw.replace(code, expr)
    assert error_of(raw, *NO_BUFFERS) == f"plan: variant 0: launch 0: scale: grid[1]: {message}"


# --- the images of an exported program ---

KEYS = ("11" * 32, "22" * 32)
IMAGES = encode_images({KEYS[1]: b"two", KEYS[0]: b"one"})


def test_images_come_in_the_order_of_their_keys():
    assert encode_images({KEYS[0]: b"one", KEYS[1]: b"two"}) == IMAGES
    assert IMAGES.index(b"one") < IMAGES.index(b"two")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"FA4P" + b[4:], "the bytes do not start with FA4I"),
        (lambda b: b[:4] + b"\7\0" + b[6:], "version must be 1, got 7"),
        (lambda b: b[:-1], "image 1: cubin: needs 3 bytes at byte 83, but 2 are left"),
        (lambda b: b + b"\0", "1 bytes follow their end"),
        (lambda b: b[:6] + struct.pack("<H", 3) + b[8:], "image 2: key: needs 32 bytes at byte 86, but 0 are left"),
    ],
)
def test_damaged_images_are_refused(error_of, make_plan, change, message):
    assert error_of(make_plan(), *NO_BUFFERS, images=change(IMAGES)) == f"images: {message}"


# --- the same in Python, before anything is encoded ---


@pytest.mark.parametrize("name", [name for name in BAD_LAUNCHES if name != "programmatic"])
def test_python_refuses_an_impossible_launch(make_launch, name):
    fields, _ = BAD_LAUNCHES[name]
    with pytest.raises(ValueError, match="must be"):
        make_launch(**fields)


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_python_refuses_an_impossible_param(make_plan, name):
    param, fields, _ = BAD_PARAMS[name]
    with pytest.raises(ValueError, match="must be"):
        make_plan(params=(dataclasses.replace(param, **fields),))


@pytest.mark.parametrize("name", [name for name in BAD_BUFFER_SPECS if name != "batched"])
def test_python_refuses_an_impossible_buffer(name):
    fields, _ = BAD_BUFFER_SPECS[name]
    with pytest.raises(ValueError, match="must be"):
        dataclasses.replace(SPEC, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operands": (SPEC,) * 64}, "the number of buffers must be <= 64, got 65"),
        ({"arch": "90a"}, "arch must be like sm_90a, got '90a'"),
    ],
)
def test_python_refuses_an_impossible_plan(make_plan, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(make_plan(), **fields)


def test_python_refuses_too_many_launches(make_launch, make_plan):
    with pytest.raises(ValueError, match=re.escape("len(launches) must be <= 8, got 9")):
        make_plan(launches=(make_launch(),) * 9)


def test_python_refuses_a_deep_expression(make_plan):
    with pytest.raises(ValueError, match="an expression's stack depth must be <= 16, got 17"):
        make_plan(grid=(deep(17), 1, 1))


def test_python_refuses_axes_beyond_the_rank(make_plan):
    with pytest.raises(ValueError, match="axes of q counted from its end must be <= 3, got 4"):
        make_plan(grid=(Lead(Q, 4), 1, 1))


def test_plans_of_one_program_are_for_different_architectures(make_plan):
    with pytest.raises(ValueError, match=re.escape("1 to 8 of different architectures, got ['sm_90a', 'sm_90a']")):
        encode([make_plan(), make_plan()])
