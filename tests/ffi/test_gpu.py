"""On a GPU: a small kernel that the driver compiles from PTX runs through XLA and the library."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import launcher
from jax_fa4.plan import BufferSpec, Launch, Plan, Pointer, Scalar, TensorMap, dim, encode, encode_images, lead

pytestmark = pytest.mark.gpu

KEY, EMBEDDED, UNKNOWN = "a1" * 32, "b2" * 32, "c3" * 32
IMAGE = pathlib.Path(__file__).with_name("scale.ptx").read_bytes() + b"\0"
X, OUT = range(2)
SPECS = [BufferSpec(name=name, dtype="float32", shape=("T", 64)) for name in ("x", "out")]


def scale_launch(source=X, *, key=KEY, factor=2.0, **fields):
    rows, batch = dim(X, -2), lead(X, 2)
    params = (
        TensorMap(buffer=source, dtype="float32", dims=(64, rows, batch), strides=(256, rows * 256), box=(64, 1, 1)),
        Pointer(buffer=OUT, extent=lead(OUT, 0) * 4, align=16),
        Scalar(dtype="i32", value=rows),
        Scalar(dtype="f32", value=factor),
    )
    return Launch(
        **{"cubin": key, "entry": "scale", "grid": (rows * batch, 1, 1), "block": 64, "params": params, **fields}
    )


def plan_of(*launches, arch=None):
    capability = jax.devices("gpu")[0].compute_capability.replace(".", "")
    arch = arch or f"sm_{capability}"
    return encode(Plan(arch=arch, operands=(SPECS[0],), results=(SPECS[1],), launches=launches))


def call(x, plan, **attributes):
    return jax.ffi.ffi_call(launcher.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, plan=plan, **attributes)


@pytest.fixture(scope="module", autouse=True)
def kernel():
    launcher.register_image(KEY, IMAGE)


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 100, 64), dtype=np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 100), (4, 1, 2, 129), (2, 0), (0, 5), (1, 100_000)], ids=str)
def test_one_plan_serves_every_shape(shape):
    x = np.random.default_rng(0).standard_normal((*shape, 64), dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, plan_of(scale_launch())))(x), 2 * x)


def test_launches_of_one_call_run_in_order(x):
    plan = plan_of(scale_launch(), scale_launch(OUT, factor=3.0, programmatic=True))
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, plan))(x), 6 * np.asarray(x))


def test_large_shared_memory_and_clusters_are_allowed(x):
    plan = plan_of(scale_launch(smem_bytes=200_000, cluster=(2, 1, 1)))
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, plan))(x), 2 * np.asarray(x))


def test_an_embedded_cubin_needs_no_registration(x):
    plan, images = plan_of(scale_launch(key=EMBEDDED)), encode_images({EMBEDDED: IMAGE})
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, plan, images=images))(x), 2 * np.asarray(x))


def test_a_graph_is_replayed_with_the_buffers_of_each_run():
    double, half = plan_of(scale_launch()), plan_of(scale_launch(factor=0.5))
    chain = jax.jit(lambda x: call(call(call(x, double), double), half))
    kept = []
    for n in range(20):
        kept.append(jnp.full((1 + n, 1000), 7.0))  # moves what is allocated next
        x = jnp.full((3, 64, 64), float(n)) + jnp.arange(64.0)
        np.testing.assert_array_equal(chain(x), 2 * np.asarray(x))


def test_every_device_gets_its_own_limits():
    plan = plan_of(scale_launch(smem_bytes=100_000))
    for device in jax.devices("gpu"):
        x = jax.device_put(jnp.ones((2, 3, 64)), device)
        np.testing.assert_array_equal(jax.jit(lambda x: call(x, plan))(x), 2 * np.ones((2, 3, 64)))


WRONG = {
    "key": (lambda: plan_of(scale_launch(key=UNKNOWN)), f"no cubin of key {UNKNOWN} is known in this process"),
    "entry": (lambda: plan_of(scale_launch(entry="other")), "cuLibraryGetKernel: CUDA_ERROR_NOT_FOUND"),
    "params": (
        lambda: plan_of(scale_launch(params=(Pointer(buffer=X),))),
        "param 0: the plan has 8 bytes, the kernel 128",
    ),
    "arch": (lambda: plan_of(scale_launch(), arch="sm_75"), "the program has kernels for sm_75, but device 0"),
    "extent": (
        lambda: plan_of(
            scale_launch(
                params=(*scale_launch().params[:1], Pointer(buffer=OUT, extent=2**40), *scale_launch().params[2:])
            )
        ),
        "scale: param 1: pointer to out: 1099511627776 bytes from byte 0 are not inside its",
    ),
    "smem": (
        lambda: plan_of(scale_launch(smem_bytes=227 * 1024)),  # the kernel has 264 bytes of its own
        r"cuKernelSetAttribute\(MAX_DYNAMIC_SHARED_SIZE_BYTES\): CUDA_ERROR_INVALID_VALUE",
    ),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_an_error_reaches_the_caller_and_leaves_the_device_usable(x, make, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(lambda x: call(x, make()))(x))
    np.testing.assert_array_equal(call(x, plan_of(scale_launch())), 2 * np.asarray(x))
