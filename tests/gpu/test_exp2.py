"""2^x by the special-function unit and by polynomial, as kernels use them: every float32 from -127 to 0."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jax_fa4 import launcher
from jax_fa4.plan import BufferSpec, Launch, Plan, Pointer, dim, encode

pytestmark = pytest.mark.gpu

ROW = 256  # elements that a CTA takes
CHUNK = 1 << 24
FIRST, LAST = 0x80000000, 0xC2FE0000  # -0.0 and -127.0: the bits of negative floats ascend as they fall
TEXTS = pathlib.Path(__file__).parent / "data"  # made by tests/kernels/exp2_kernel.py
SPECIAL_FUNCTION_UNIT = b"""
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


class Way(NamedTuple):
    """One to compute 2^x."""

    name: str
    ptx: bytes
    threads: int  # of a CTA
    largest_error: float  # relative

    @property
    def key(self):
        return self.name.encode().hex().ljust(64, "0")


def polynomial(degree, largest_error):
    return Way(f"degree {degree}", (TEXTS / f"exp2_degree{degree}.ptx").read_bytes(), ROW // 2, largest_error)


WAYS = (
    Way("unit", SPECIAL_FUNCTION_UNIT, ROW, 2.0**-22.5),  # what the PTX manual gives for ex2.approx.ftz.f32
    polynomial(3, 9e-5),
    polynomial(4, 3e-6),
    polynomial(5, 1.7e-7),
)


def exp2(x, way):
    """Of x [rows, ROW] float32."""
    x_spec, out_spec = (
        BufferSpec(name=name, dtype="float32", shape=("rows", ROW), batched=False) for name in ("x", "out")
    )
    params = (Pointer(buffer=0), Pointer(buffer=1))
    launch = Launch(cubin=way.key, entry="exp2", grid=(dim(0, -2), 1, 1), block=way.threads, params=params)
    arch = f"sm_{jax.devices('gpu')[0].compute_capability.replace('.', '')}"
    plan = encode(Plan(arch=arch, operands=(x_spec,), results=(out_spec,), launches=(launch,)))
    return jax.ffi.ffi_call(launcher.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, plan=plan)


@functools.partial(jax.jit, static_argnums=1)
def largest_errors(first, way):
    """Of CHUNK floats from one: relative where the result is a normal number, absolute beyond. float64."""
    bits = first + jnp.arange(CHUNK, dtype=jnp.uint32)
    bits = jnp.minimum(bits, jnp.uint32(LAST))
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    found = exp2(x.reshape(-1, ROW), way).reshape(-1).astype(jnp.float64)
    exact = jnp.exp2(x.astype(jnp.float64))
    normal = x >= -126
    relative = jnp.where(normal, jnp.abs(found / exact - 1), 0).max()
    return relative, jnp.where(normal, 0, jnp.abs(found - exact)).max()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_two_to_the_x_is_as_exact_as_claimed(way, record_property):
    launcher.register_image(way.key, way.ptx + b"\0")
    with jax.enable_x64(True):
        errors = [largest_errors(jnp.uint32(first), way) for first in range(FIRST, LAST + 1, CHUNK)]
        relative, absolute = (float(jnp.stack(column).max()) for column in zip(*errors, strict=True))
    record_property("largest_relative_error", relative)
    assert way.largest_error / 10 <= relative <= way.largest_error
    assert absolute <= 2.0**-126
