"""Eight H200s that exist on paper: XLA compiles for them on any machine that has JAX's CUDA plugin, GPU or not."""

from __future__ import annotations

import functools
import importlib.util

import jax
import numpy as np
from jax.experimental import topologies

TARGET = """
platform_name: "CUDA"
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  l2_cache_size: 62914560 memory_bandwidth: 4800000000000 device_memory_size: 150000000000
}
"""


def why_absent() -> str | None:
    """None where programs for an H200 can be compiled, else the reason."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "needs JAX's CUDA 13 plugin (pip install 'jax[cuda13-local]')"
    return None


@functools.cache
def mesh(shape: tuple[int, ...] = (1,), names: tuple[str, ...] = ("d",)) -> jax.sharding.Mesh:
    """A mesh over the first devices."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x8")
    return jax.sharding.Mesh(np.array(topology.devices)[: np.prod(shape)].reshape(shape), names)
