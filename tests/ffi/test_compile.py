"""XLA compiles GPU programs with the custom call on a machine without a GPU, which parses the plan."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jax_fa4 import launcher
from jax_fa4.plan import BufferSpec, Launch, Plan, Pointer, ceil_div, dim, encode, encode_images

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
"""
SPECS = [BufferSpec(name=name, dtype="float32", shape=("T",)) for name in ("x", "y")]
LAUNCH = Launch(
    cubin="ab" * 32,
    entry="scale",
    grid=(ceil_div(dim(0, -1), 256), 1, 1),
    block=256,
    params=(Pointer(buffer=0), Pointer(buffer=1)),
)
PLAN = encode(Plan(arch="sm_90a", operands=(SPECS[0],), results=(SPECS[1],), launches=(LAUNCH,)))


@pytest.fixture(scope="module")
def compiled():
    """compiled(plan=...): the optimised HLO of a program with one call."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs JAX's CUDA plugin")
    launcher.require()
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    x = jax.ShapeDtypeStruct((3, 1000), jnp.float32, sharding=sharding)

    def compile_call(**attributes):
        def call(x):
            return jax.ffi.ffi_call(launcher.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes)

        return jax.jit(call).lower(x).compile().as_text()

    return compile_call


def test_a_program_with_a_plan_compiles(compiled):
    assert launcher.TARGET in compiled(plan=PLAN)


def test_a_program_with_embedded_cubins_compiles(compiled):
    assert launcher.TARGET in compiled(plan=PLAN, images=encode_images({"ab" * 32: b"\x7fELF"}))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"plan": PLAN[:-1]}, "jax_fa4: plan: variant 0: launch 0: scale: param 1: has_extent: needs 1 bytes"),
        ({"plan": b""}, "jax_fa4: plan: magic: needs 4 bytes at byte 0, but 0 are left"),
        ({"plan": PLAN, "images": b"FA4I"}, "jax_fa4: images: version: needs 2 bytes"),
        ({"plan": 7}, "jax_fa4: attribute plan must be bytes"),
        ({}, "jax_fa4: attribute plan must be bytes"),
    ],
)
def test_a_malformed_attribute_fails_the_compilation(compiled, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*{message}"):
        compiled(**attributes)
