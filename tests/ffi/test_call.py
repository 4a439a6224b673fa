"""Calls that do not fit their plan: each gets an error that names the buffer or the kernel, the field and the value."""

import pytest

from jax_fa4.plan import BufferSpec, Plan, Pointer, Scalar, TensorMap, dim, lead

Q, OUT = range(2)
ROW = ("bfloat16", (2, 5, 64), 0x1000)

BAD_BUFFERS = {
    "an operand too few": ([], [ROW], "the plan has 1 operands, the call 0"),
    "an operand too many": ([ROW, ROW], [ROW], "the plan has 1 operands, the call 2"),
    "a result too few": ([ROW], [], "the plan has 1 results, the call 0"),
    "a dtype": (
        [("float32", (2, 5, 64), 0x1000)],
        [ROW],
        "operand 0 (q): dtype must be bfloat16, got float32",
    ),
    "a rank": ([("bfloat16", (5, 64), 0x1000)], [ROW], "operand 0 (q): rank must be >= 3, got 2"),
    "an exact size": (
        [("bfloat16", (2, 5, 32), 0x1000)],
        [ROW],
        "operand 0 (q): axis 2 must be 64, got 32",
    ),
    "a named size": (
        [ROW],
        [("bfloat16", (2, 6, 64), 0x1000)],
        "result 0 (out): axis 1 (T) must be 5 as in operand 0 (q), got 6",
    ),
    "a batch": (
        [ROW],
        [("bfloat16", (4, 5, 64), 0x1000)],
        "result 0 (out): leading axes must be [2] as in operand 0 (q), got [4]",
    ),
    "batch axes": (
        [ROW],
        [("bfloat16", (1, 2, 5, 64), 0x1000)],
        "result 0 (out): leading axes must be [2] as in operand 0 (q), got [1, 2]",
    ),
    "a negative size": (
        [("bfloat16", (-2, 5, 64), 0x1000)],
        [ROW],
        "operand 0 (q): axis 0 must be >= 0, got -2",
    ),
    "too many bytes": (
        [("bfloat16", (2**40, 2**40, 64), 0x1000)],
        [ROW],
        "operand 0 (q): shape [1099511627776, 1099511627776, 64] has too many bytes",
    ),
}


@pytest.mark.parametrize(("operands", "results", "message"), BAD_BUFFERS.values(), ids=BAD_BUFFERS)
def test_a_buffer_that_does_not_fit_is_named(error_of, make_plan, operands, results, message):
    assert error_of(make_plan(), operands, results) == message


def test_a_buffer_without_batch_has_exactly_its_rank(error_of):
    scale = BufferSpec(name="scale", dtype="float32", shape=(), batched=False)
    plan = Plan(arch="sm_90a", operands=(scale,), results=(), launches=())
    assert error_of(plan, [("float32", (1,), 0x1000)], []) == "operand 0 (scale): rank must be 0, got 1"


def tensor_map(**fields):
    default = {"buffer": Q, "dtype": "bfloat16", "dims": (64, 5), "strides": (128,), "box": (64, 1)}
    return {"params": (TensorMap(**{**default, **fields}),)}


def pointer(**fields):
    return {"params": (Pointer(buffer=Q, **fields),)}


def scalar(dtype, value):
    return {"params": (Scalar(dtype=dtype, value=value),)}


BAD_VALUES = {
    "grid below zero": ({"grid": (dim(Q, -2) - 6, 1, 1)}, "grid[0] must be in [0, 2147483647], got -1"),
    "grid x": ({"grid": (2**31, 1, 1)}, "grid[0] must be in [0, 2147483647], got 2147483648"),
    "grid y": ({"grid": (1, 65536, 1)}, "grid[1] must be in [0, 65535], got 65536"),
    "grid z": ({"grid": (1, 1, 65536)}, "grid[2] must be in [0, 65535], got 65536"),
    "cluster": (
        {"grid": (dim(Q, -2), 1, 1), "cluster": (2, 1, 1)},
        "grid (5, 1, 1) must be a multiple of cluster (2, 1, 1)",
    ),
    "overflow": (
        {"grid": (dim(Q, -1) * 2**60, 1, 1)},
        "grid[0]: an operation on 64 and 1152921504606846976 does not fit an int64",
    ),
    "division": (
        {"grid": (64 // (dim(Q, -2) - 5), 1, 1)},
        "grid[0]: cannot divide 64 by 0: a divisor must be positive",
    ),
    "dims below zero": (
        tensor_map(dims=(64, dim(Q, -2) - 6)),
        "param 0: tensor map of q: dims[1] must be in [0, 2^32], got -1",
    ),
    "dims above 2^32": (
        tensor_map(dims=(64, 2**32 + 1)),
        "param 0: tensor map of q: dims[1] must be in [0, 2^32], got 4294967297",
    ),
    "a stride that is no multiple of 16": (
        tensor_map(strides=(dim(Q, -2) * 8,)),
        "param 0: tensor map of q: strides[0] must be a multiple of 16 in [0, 2^40), got 40",
    ),
    "a stride of 2^40": (
        tensor_map(strides=(2**40,)),
        "param 0: tensor map of q: strides[0] must be a multiple of 16 in [0, 2^40), got 1099511627776",
    ),
    "a map's offset below zero": (
        tensor_map(offset=-16),
        "param 0: tensor map of q: offset must be >= 0, got -16",
    ),
    "a map's reach": (
        tensor_map(dims=(64, 2**32), strides=(2**39,)),
        "param 0: tensor map of q: its elements reach byte 9223372036854775807 of a buffer of 1280 bytes",
    ),
    "a map's offset past the end": (
        tensor_map(dims=(64, 10), offset=16),
        "param 0: tensor map of q: its elements reach byte 1296 of a buffer of 1280 bytes",
    ),
    "a map's address": (
        tensor_map(offset=8),
        "param 0: tensor map of q: its address must be a multiple of 16, got 0x1008",
    ),
    "a pointer's offset": (
        pointer(offset=1281),
        "param 0: pointer to q: 0 bytes from byte 1281 are not inside its 1280 bytes",
    ),
    "a pointer's extent": (
        pointer(offset=256, extent=lead(Q, 0) * 2),
        "param 0: pointer to q: 1280 bytes from byte 256 are not inside its 1280 bytes",
    ),
    "a pointer's alignment": (
        pointer(offset=4, align=8),
        "param 0: pointer to q: its address must be a multiple of 8, got 4100",
    ),
    "an i32": (
        scalar("i32", dim(Q, -1) * 2**25),
        "param 0: scalar: 2147483648 does not fit i32",
    ),
    "a u32": (scalar("u32", dim(Q, -2) - 6), "param 0: scalar: -1 does not fit u32"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_value_out_of_range_is_named_with_its_kernel(error_of, make_plan, fields, message):
    assert error_of(make_plan(**fields), [ROW], [ROW]) == f"scale: {message}"


def test_a_map_over_no_memory_is_refused(error_of, make_plan):
    message = error_of(make_plan(**tensor_map()), [("bfloat16", (2, 5, 64), 0)], [ROW])
    assert message == "scale: param 0: tensor map of q: its address must be a multiple of 16, got 0"
