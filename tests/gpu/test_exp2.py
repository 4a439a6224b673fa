"""2^x by the special-function unit, as kernels use it: every float32 from -127 to 0."""

import jax
import jax.numpy as jnp
import pytest

from jax_fa4 import launcher
from jax_fa4.plan import BufferSpec, Launch, Plan, Pointer, dim, encode

pytestmark = pytest.mark.gpu

KEY = "e2" * 32
ROW = 256  # elements that a CTA takes, one a thread
CHUNK = 1 << 24
FIRST, LAST = 0x80000000, 0xC2FE0000  # -0.0 and -127.0: the bits of negative floats ascend as they fall
LARGEST_ERROR = 2.0**-22.5  # relative; what the PTX manual gives for ex2.approx.ftz.f32
PTX = b"""
.version 8.0
.target sm_90
.address_size 64

.visible .entry exp2(
    .param .u64 x,
    .param .u64 out)
{
    .reg .u32 %thread, %cta, %index;
    .reg .u64 %x, %out, %offset;
    .reg .f32 %value;

    ld.param.u64 %x, [x];
    ld.param.u64 %out, [out];
    mov.u32 %thread, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.u32 %index, %cta, 256, %thread;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %x, %x, %offset;
    add.u64 %out, %out, %offset;
    ld.global.f32 %value, [%x];
    ex2.approx.ftz.f32 %value, %value;
    st.global.f32 [%out], %value;
    ret;
}
"""


def exp2(x):
    """Of x [rows, ROW] float32."""
    x_spec, out_spec = (
        BufferSpec(name=name, dtype="float32", shape=("rows", ROW), batched=False) for name in ("x", "out")
    )
    launch = Launch(
        cubin=KEY, entry="exp2", grid=(dim(0, -2), 1, 1), block=ROW, params=(Pointer(buffer=0), Pointer(buffer=1))
    )
    arch = f"sm_{jax.devices('gpu')[0].compute_capability.replace('.', '')}"
    plan = encode(Plan(arch=arch, operands=(x_spec,), results=(out_spec,), launches=(launch,)))
    return jax.ffi.ffi_call(launcher.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, plan=plan)


@jax.jit
def largest_errors(first):
    """Of CHUNK floats from one: relative where the result is a normal number, absolute beyond. float64."""
    bits = first + jnp.arange(CHUNK, dtype=jnp.uint32)
    bits = jnp.minimum(bits, jnp.uint32(LAST))
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    found = exp2(x.reshape(-1, ROW)).reshape(-1).astype(jnp.float64)
    exact = jnp.exp2(x.astype(jnp.float64))
    normal = x >= -126
    relative = jnp.where(normal, jnp.abs(found / exact - 1), 0).max()
    return relative, jnp.where(normal, 0, jnp.abs(found - exact)).max()


def test_the_special_function_unit_is_as_exact_as_its_manual_says(record_property):
    launcher.register_image(KEY, PTX + b"\0")
    with jax.enable_x64(True):
        errors = [largest_errors(jnp.uint32(first)) for first in range(FIRST, LAST + 1, CHUNK)]
        relative, absolute = (float(jnp.stack(column).max()) for column in zip(*errors, strict=True))
    record_property("largest_relative_error", relative)
    assert 0 < relative <= LARGEST_ERROR
    assert absolute <= 2.0**-126
