"""Launch plans in the emulator: parameters and grids from the shapes of a call (tests/rules/test_emulated.py calls)."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4 import emulate
from jax_fa4.emulator.launch import Options
from jax_fa4.plan import Launch, Plan, Pointer, Record, RecordField, Scalar, TensorMap, dim
from jax_fa4.plan.plan import BufferSpec

from .snippet import module_text

KEY = "0" * 64
X, Y = range(2)
BODY = """
ld.param.b64 %d0, [p0]; ld.param.b32 %r1, [p1+8]; ld.param.b32 %r2, [p2]; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %nctaid.x;
mad.wide.u32 %d1, %r3, 4, %d0; mad.lo.u32 %r5, %r1, 100, %r2; mad.lo.u32 %r5, %r4, 10000, %r5; st.global.b32 [%d1], %r5;
"""


X_SPEC = BufferSpec(name="x", dtype="float32", shape=("M", "N"), batched=False)


def plan(*params, grid=1) -> Plan:
    """One launch on x [M, N] that fills y."""
    return Plan(
        arch="sm_90a",
        operands=(X_SPEC,),
        results=(BufferSpec(name="y", dtype="int32", shape=(None,), batched=False),),
        launches=(Launch(cubin=KEY, entry="snippet", grid=(grid, 1, 1), block=32, params=params),),
    )


def array(memory: np.ndarray) -> emulate.Array:
    return emulate.Array(memory, memory.shape)


def test_extents_offsets_and_structs_are_computed_from_shapes():
    params = (
        Pointer(buffer=Y, offset=dim(X, -1) * 4),
        Record(size=16, fields=(RecordField(8, Scalar(dtype="i32", value=dim(X, -1))),)),
        Scalar(dtype="i32", value=dim(X, -2) + 1),
    )
    y = np.zeros(8, np.int32)
    text = module_text(BODY, (bytes(8), bytes(16), bytes(4)))
    buffers = [array(np.zeros((3, 2), np.float32)), array(y)]
    with emulate.recording(Options(completion="early")) as launches:
        emulate.run_plan(plan(*params, grid=dim(X, -2)), {KEY: text}, buffers)
    assert y.tolist() == [0, 0, *[30000 + 200 + 4] * 3, 0, 0, 0]
    assert [launch.result.stats.by_warp("st") for launch in launches] == [{0: 3}]


def test_a_struct_may_hold_addresses():
    record = Record(size=16, fields=(RecordField(8, Pointer(buffer=Y, offset=4)),))
    body = "ld.param.b64 %d0, [p0+8]; mov.u32 %r1, 7; st.global.b32 [%d0], %r1;"
    y = np.zeros(3, np.int32)
    buffers = [array(np.zeros((1, 1), np.float32)), array(y)]
    emulate.run_plan(plan(record), {KEY: module_text(body, (bytes(16),))}, buffers)
    assert y.tolist() == [0, 7, 0]


BATCHED = (
    BufferSpec(name="x", dtype="float32", shape=("M", "N")),
    BufferSpec(name="y", dtype="float32", shape=("N", 2)),
)


@pytest.mark.parametrize(
    ("specs", "shapes", "dtype", "message"),
    [
        ((X_SPEC,), [(3, 2)], np.float16, "x must be float32, got float16"),
        ((X_SPEC,), [(3,)], np.float32, r"x must be \[M, N\]"),
        (BATCHED, [(1, 3, 2), (2, 2, 2)], np.float32, r"y must be \[\*batch, N, 2\]"),
        (BATCHED, [(1, 3, 4), (1, 5, 2)], np.float32, r"y must be \[\*batch, N, 2\]"),
        (BATCHED, [(1, 3, 4), (1, 4, 3)], np.float32, r"y must be \[\*batch, N, 2\]"),
    ],
)
def test_a_plan_refuses_what_the_library_refuses(specs, shapes, dtype, message):
    empty = Plan(arch="sm_90a", operands=specs, results=(), launches=())
    with pytest.raises(ValueError, match=message):
        emulate.run_plan(empty, {}, [array(np.zeros(shape, dtype)) for shape in shapes])


def test_tensor_maps_follow_their_expressions():
    param = TensorMap(
        buffer=X, dtype="bfloat16", dims=(dim(X, -1), dim(X, -2)), strides=(dim(X, -1) * 2,), box=(64, 4), swizzle=128
    )
    memory = np.zeros((5, 64), np.uint16)
    bound = emulate._tensor_map(param, memory, [memory.shape])
    assert (bound.dims, bound.strides, bound.box, bound.swizzle, bound.dtype) == (
        (64, 5),
        (128,),
        (64, 4),
        "128B",
        "bf16",
    )
    empty = emulate._tensor_map(param, memory[:0], [(0, 64)])
    assert empty.dims == (1, 1)
    assert empty.buffer.array.size
