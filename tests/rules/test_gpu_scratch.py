"""What a backward on a GPU takes of memory beside its operands and results."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import launcher

from . import h200

pytestmark = [
    pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks"),
    pytest.mark.skipif(h200.why_absent() is not None, reason=str(h200.why_absent())),
    pytest.mark.usefixtures("no_compiler"),
]
SEQUENCES, TILE = 8, 128  # a packed row has a tile more for each sequence and for what lies around them


def scratch(attend, *arrays):
    """Elements of the float32 and the int32 arrays that the backward makes, and all bytes of the program's scratch."""

    def pull(q, k, v, dout, *offsets):
        options = {"causal": True, "implementation": "kernel"} | ({"cu_seqlens_q": offsets[0]} if offsets else {})
        return jax.vjp(functools.partial(attend, **options), q, k, v)[1](dout)

    sharding = NamedSharding(h200.mesh(), P())
    dtypes = [jnp.bfloat16] * 4 + [jnp.int32]
    args = [jax.ShapeDtypeStruct(*a, sharding=sharding) for a in zip(arrays, dtypes, strict=False)]
    program = jax.jit(pull).lower(*args).compile()
    calls = re.findall(r"= \((.*?)\) custom-call\(.*?\), custom_call_target=\"jax_fa4_launch_v1\"", program.as_text())
    sizes = {
        dtype: [math.prod(map(int, dims.split(","))) for dims in re.findall(rf"{dtype}\[([\d,]+)\]", calls[-1])]
        for dtype in ("f32", "s32")
    }
    return sizes["f32"], sizes["s32"], program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("kind", ["grouped", "shared-heads", "packed"])
def test_scratch_is_dq_in_float32_and_two_numbers_a_query(kind, dims, deterministic):
    (d, e), q, kv, call = dims, (2, 2048, 8), (2, 4096, 4), jax_fa4.attention
    offsets = []
    if kind == "shared-heads":
        q, kv = (1, 2048, 32), (1, 2048, 1)
    elif kind == "packed":
        q, kv, call, offsets = (8192, 8), (8192, 4), jax_fa4.attention_varlen, [(SEQUENCES + 1,)]
    attend = functools.partial(call, deterministic=deterministic)
    (dq, *statistics), integers, used = scratch(attend, (*q, d), (*kv, d), (*kv, e), (*q, e), *offsets)
    rows = most_rows = math.prod(q)
    if kind == "packed":
        most_rows += (SEQUENCES + 2) * TILE * q[-1]
    assert rows * d <= dq <= most_rows * d
    parts = statistics[2:]
    assert statistics[:2] == [dq // d] * 2
    assert len(parts) == (2 if kind == "shared-heads" and d <= 128 else 0)
    assert sum(parts) <= dq / 2
    assert sum(integers) <= rows / 5
    passed_on = rows * (2 * e + 2 * 4)  # out and lse from the forward, and the cotangent of lse
    assert used <= 4 * (dq + sum(statistics) + sum(integers)) + passed_on + 2**16
    assert used < rows * kv[-2]  # a byte for each score
