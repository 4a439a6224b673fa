"""Random valid plans come through unchanged, and no damage to one makes the library do worse than refuse it."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.plan import (
    BufferSpec,
    Launch,
    Plan,
    Pointer,
    Record,
    Scalar,
    TensorMap,
    ceil_div,
    dim,
    encode,
    evaluate,
    lead,
    maximum,
    minimum,
)
from jax_fa4.plan.limits import DTYPES

SPECS = (
    BufferSpec(name="q", dtype="bfloat16", shape=("T", "G", 64)),
    BufferSpec(name="k", dtype="bfloat16", shape=("S", 64)),
    BufferSpec(name="scale", dtype="float32", shape=(), batched=False),
    BufferSpec(name="out", dtype="bfloat16", shape=("T", "G", 64)),
)
OPERANDS, RESULTS = SPECS[:3], SPECS[3:]

extents = st.one_of(
    st.integers(0, 300),
    st.builds(dim, st.sampled_from((0, 3)), st.integers(-4, -1)),
    st.builds(dim, st.just(1), st.integers(-3, -1)),
    st.builds(lead, st.sampled_from((0, 3)), st.integers(0, 4)),
    st.builds(lead, st.just(1), st.integers(0, 3)),
)
exprs = st.recursive(
    extents,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(minimum, inner, inner),
        st.builds(maximum, inner, inner),
        st.builds(ceil_div, inner, st.integers(1, 256)),
    ),
    max_leaves=4,
)
buffers = st.integers(0, len(SPECS) - 1)
pointers = st.builds(Pointer, buffer=buffers, align=st.sampled_from((1, 2, 16)))
scalars = st.one_of(
    st.builds(Scalar, dtype=st.just("i64"), value=exprs),
    st.builds(Scalar, dtype=st.just("f32"), value=st.floats(width=32, allow_nan=False)),
)


@st.composite
def tensor_maps(draw):
    rank = draw(st.integers(1, 5))
    return TensorMap(
        buffer=draw(st.sampled_from((0, 1, 3))),
        dtype="bfloat16",
        dims=tuple(draw(st.lists(st.sampled_from((0, 1)), min_size=rank, max_size=rank))),
        strides=tuple(16 * draw(exprs) for _ in range(rank - 1)),
        box=(draw(st.sampled_from((8, 16))), *(draw(st.integers(1, 256)) for _ in range(rank - 1))),
        swizzle=draw(st.sampled_from((0, 32, 64, 128))),
        l2_promotion=draw(st.sampled_from((0, 64, 128, 256))),
    )


@st.composite
def records(draw):
    fields, end = [], 0
    for value in draw(st.lists(st.one_of(pointers, scalars), max_size=4)):
        offset = end + draw(st.integers(0, 8))
        fields.append((offset, value))
        end = offset + value.size
    return Record(size=end + draw(st.integers(1, 8)), fields=tuple(fields))


launches = st.builds(
    Launch,
    cubin=st.binary(min_size=32, max_size=32).map(bytes.hex),
    entry=st.text("abc_0", min_size=1, max_size=300),
    grid=st.tuples(exprs, st.just(1), st.integers(1, 9)),
    block=st.integers(1, 1024),
    smem_bytes=st.integers(0, 227 * 1024),
    programmatic=st.booleans(),
    params=st.lists(st.one_of(tensor_maps(), pointers, scalars, records()), max_size=5).map(tuple),
)
plans = st.builds(
    Plan,
    arch=st.just("sm_90a"),
    operands=st.just(OPERANDS),
    results=st.just(RESULTS),
    launches=st.lists(launches, max_size=3).map(tuple),
)
sizes = st.integers(0, 40)
shapes = st.tuples(st.lists(sizes, min_size=1, max_size=3), sizes, sizes, sizes)


def call_of(shape):
    batch, t, s, g = shape
    dims = ((*batch, t, g, 64), (*batch, s, 64), (), (*batch, t, g, 64))
    return dims, [(spec.dtype, d, 0x1000 * (i + 1)) for i, (spec, d) in enumerate(zip(SPECS, dims, strict=True))]


def bytes_of(value, dims):
    if isinstance(value, Pointer):
        return struct.pack("<Q", 0x1000 * (value.buffer + 1))
    if value.dtype == "f32":
        return struct.pack("<f", value.value)
    return struct.pack("<q", evaluate(value.value, dims))


def record_of(param, dims):
    out = bytearray(param.size)
    for offset, value in param.fields:
        out[offset : offset + value.size] = bytes_of(value, dims)
    return bytes(out)


def expected_param(param, said, dims):
    """What the library must say of a parameter; a map's address, dims and strides depend on emptiness."""
    if isinstance(param, TensorMap):
        strides = [evaluate(e, dims) for e in param.strides]
        empty = 0 in dims[param.buffer] or 0 in [evaluate(e, dims) for e in param.dims]
        return {
            "address": said["address"] if empty else 0x1000 * (param.buffer + 1),
            "dtype": param.dtype,
            "dims": [1] * len(param.dims),
            "strides": [16] * len(strides) if empty else strides,
            "box": list(param.box),
            "swizzle": param.swizzle,
            "l2_promotion": param.l2_promotion,
        }
    return (record_of(param, dims) if isinstance(param, Record) else bytes_of(param, dims)).hex()


@settings(max_examples=300, deadline=None)
@given(plan=plans, shape=shapes)
def test_a_plan_comes_through_unchanged(answer, plan, shape):
    dims, call = call_of(shape)
    said = answer(plan, call[:3], call[3:])
    if "error" in said:  # a random size may be out of the driver's range
        assert any(text in said["error"]["message"] for text in ("must be", "does not fit", "can stand in"))
        return
    assert len(said["launches"]) == len(plan.launches)
    for launch, got in zip(plan.launches, said["launches"], strict=True):
        for field in ("cubin", "entry", "block", "smem_bytes", "programmatic"):
            assert got[field] == getattr(launch, field)
        assert got["grid"] == [evaluate(e, dims) for e in launch.grid]
        if 0 not in got["grid"]:
            assert got["params"] == [
                expected_param(p, said, dims) for p, said in zip(launch.params, got["params"], strict=True)
            ]


def check_refused_or_evaluated(said):
    assert ("error" in said) != ("launches" in said)
    if "error" in said:
        assert said["error"]["message"]
        assert said["error"]["code"] in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")


@settings(max_examples=300, deadline=None)
@given(plan=plans, shape=shapes, data=st.data())
def test_a_plan_with_flipped_bits_is_refused_or_another_plan(answer, plan, shape, data):
    raw = bytearray(encode(plan))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    _, call = call_of(shape)
    check_refused_or_evaluated(answer(bytes(raw), call[:3], call[3:]))


@settings(max_examples=200, deadline=None)
@given(plan=plans, data=st.data())
def test_a_plan_that_was_cut_is_refused(answer, plan, data):
    raw = encode(plan)
    said = answer(raw[: data.draw(st.integers(0, len(raw) - 1))], [], [])
    assert said["error"]["message"].startswith("plan: ")


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=300))
def test_bytes_after_a_valid_head_are_refused_or_a_plan(answer, raw):
    check_refused_or_evaluated(answer(b"FA4P\1\0" + raw, [], []))


def test_dtypes_fit_the_one_byte_of_their_code():
    assert all(0 < dtype.code < 256 for dtype in DTYPES.values())
