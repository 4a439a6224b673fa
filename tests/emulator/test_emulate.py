"""Launch plans in the emulator: what a call would do on a GPU, from its plan to its results."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4 import emulate, testing
from jax_fa4.emulator.launch import Options
from jax_fa4.plan import Launch, Plan, Pointer, Record, RecordField, Scalar, TensorMap, dim
from jax_fa4.plan.plan import BufferSpec
from jax_fa4.spec import AttentionSpec, MaskSpec
from jax_fa4.testing import Cell

from .snippet import module_text
from .test_forward_sm90 import assert_exact, window_of

CELLS = [
    Cell(batch=(2,), q=70, k=130, kv_heads=2, group=2, head_dim=64, dtype="bfloat16", causal=True),
    Cell(batch=(2, 1), q=70, k=130, kv_heads=1, group=3, head_dim=64, dtype="bfloat16", causal=True, layout="BNTH"),
    Cell(batch=(), q=5, k=0, kv_heads=1, head_dim=64, dtype="bfloat16", causal=True),
    Cell(batch=(1,), q=0, k=7, kv_heads=1, head_dim=64, dtype="bfloat16", causal=True),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_plan_does_the_call(cell):
    pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")
    x = testing.random(cell)
    left, right = window_of(x)
    spec = AttentionSpec(
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        head_dim_v=cell.value_dim,
        group=cell.group,
        mask=MaskSpec(has_left=left is not None, has_right=right is not None),
        layout=cell.layout,
    )
    scale = cell.head_dim**-0.5
    found = emulate.forward(
        x["q"], x["k"], x["v"], spec=spec, arch="sm_90a", softmax_scale=scale, window_right=right or 0
    )
    assert len(found.runs) == (cell.q > 0)
    if cell.q:
        assert_exact(x, found.out, found.lse, cell.dtype)


def test_a_call_without_a_kernel_is_refused():
    spec = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, group=1, has_sinks=True)
    zero = np.zeros((1, 1, 1, 64), np.float32)
    with pytest.raises(ValueError, match="sinks"):
        emulate.forward(zero, zero, zero, spec=spec, arch="sm_90a", softmax_scale=1.0)


KEY = "0" * 64
X, Y = range(2)
BODY = """
ld.param.b64 %d0, [p0]; ld.param.b32 %r1, [p1+8]; ld.param.b32 %r2, [p2]; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %nctaid.x;
mad.wide.u32 %d1, %r3, 4, %d0; mad.lo.u32 %r5, %r1, 100, %r2; mad.lo.u32 %r5, %r4, 10000, %r5; st.global.b32 [%d1], %r5;
"""


def test_extents_offsets_and_structs_are_computed_from_shapes():
    launch = Launch(
        cubin=KEY,
        entry="snippet",
        grid=(dim(X, -2), 1, 1),
        block=32,
        params=(
            Pointer(buffer=Y, offset=dim(X, -1) * 4),
            Record(size=16, fields=(RecordField(8, Scalar(dtype="i32", value=dim(X, -1))),)),
            Scalar(dtype="i32", value=dim(X, -2) + 1),
        ),
    )
    plan = Plan(
        arch="sm_90a",
        operands=(BufferSpec(name="x", dtype="float32", shape=("M", "N"), batched=False),),
        results=(BufferSpec(name="y", dtype="int32", shape=(None,), batched=False),),
        launches=(launch,),
    )
    y = np.zeros(8, np.int32)
    text = module_text(BODY, (bytes(8), bytes(16), bytes(4)))
    buffers = [emulate.Array(np.zeros((3, 2), np.float32), (3, 2)), emulate.Array(y, (8,))]
    runs = emulate.run_plan(plan, {KEY: text}, buffers, Options(completion="early"))
    assert y.tolist() == [0, 0, *[30000 + 200 + 4] * 3, 0, 0, 0]
    assert runs[0].stats.by_warp("st") == {0: 3}


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
