"""What needs a process of its own: XLA's command buffers on and off, and exported programs."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CHAIN = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jax_fa4
q, k, v = (jax.random.normal(jax.random.key(i), (2, 200, 4, 64), jnp.bfloat16) for i in range(3))

@jax.jit
def chain(q, k, v):
    for _ in range(8):
        q = q + jax_fa4.attention(q, k, v, causal=True, implementation="kernel")
    return q

for _ in range(3):
    out = chain(q, k, v)
np.save(sys.argv[1], np.asarray(out, np.float32))
"""
EXPORT = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jax_fa4

def f(q, k, v):
    return jax_fa4.attention(q, k, v, causal=True, implementation="kernel")

b, t = jax.export.symbolic_shape("b, t")
x = jax.ShapeDtypeStruct((b, t, 4, 64), jnp.bfloat16)
program = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=jax_fa4.export_disabled_checks())(x, x, x)
open(sys.argv[1] + ".bin", "wb").write(program.serialize())
q, k, v = (jax.random.normal(jax.random.key(i), (2, 200, 4, 64), jnp.bfloat16) for i in range(3))
np.save(sys.argv[1] + ".npy", np.asarray(f(q, k, v), np.float32))
"""
LOAD = """
import sys
sys.modules["cutlass"] = None  # importing it now fails
import jax, jax.numpy as jnp, numpy as np
import jax_fa4
program = jax.export.deserialize(open(sys.argv[1] + ".bin", "rb").read())
q, k, v = (jax.random.normal(jax.random.key(i), (2, 200, 4, 64), jnp.bfloat16) for i in range(3))
np.testing.assert_array_equal(np.asarray(program.call(q, k, v), np.float32), np.load(sys.argv[1] + ".npy"))
"""


def python(code, *args, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=os.environ | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_command_buffers_change_no_bit(tmp_path):
    import numpy as np

    flags = os.environ.get("XLA_FLAGS", "")
    python(CHAIN, tmp_path / "on.npy", XLA_FLAGS=f"{flags} --xla_gpu_graph_min_graph_size=1")
    python(CHAIN, tmp_path / "off.npy", XLA_FLAGS=f"{flags} --xla_gpu_enable_command_buffer=")
    np.testing.assert_array_equal(np.load(tmp_path / "on.npy"), np.load(tmp_path / "off.npy"))


def test_an_exported_program_runs_without_compiler_and_cache(tmp_path):
    python(EXPORT, tmp_path / "program")
    (tmp_path / "empty").mkdir()
    python(LOAD, tmp_path / "program", JAX_FA4_CACHE_DIR=str(tmp_path / "empty"))
