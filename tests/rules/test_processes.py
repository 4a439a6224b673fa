"""Programs of two processes, as JAX's persistent compilation cache compares them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from jax_fa4 import launcher

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax_fa4 import attention

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def loss(q, lengths):
    return attention(q, q, q, causal=True, kv_lengths=lengths, sinks=jnp.ones(2)).astype(jnp.float32).sum()

args = jnp.ones((1, 70, 2, 64), jnp.bfloat16), jnp.array([50])
program = jax.jit(jax.grad(loss))
if sys.argv[2] == "run":
    jax.block_until_ready(program(*args))
else:
    print(program.trace(*args).lower(lowering_platforms=("cuda",)).as_text())
"""
HAS_KERNELS = launcher.register() and importlib.util.find_spec("cutlass") is not None


def python(folder, what, seed):
    """What a process prints whose sets and hashes have an order of their own."""
    environment = os.environ | {"PYTHONHASHSEED": seed}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), what], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_another_process_compiles_nothing_anew(tmp_path):
    python(tmp_path, "run", "1")
    compiled = {path.name for path in tmp_path.glob("*-cache")}
    assert any(name.startswith("jit_loss-") for name in compiled)
    python(tmp_path, "run", "2")
    assert {path.name for path in tmp_path.glob("*-cache")} == compiled


@pytest.mark.skipif(not HAS_KERNELS, reason="needs the FFI library and CuTe DSL (pip install 'jax-fa4[cuda13]')")
def test_another_process_lowers_the_same_gpu_program(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path / "cubins"))
    first, second = (python(tmp_path, "lower", seed) for seed in "12")
    assert first.count(f"@{launcher.TARGET}(") == 2  # forward and backward
    assert first == second
