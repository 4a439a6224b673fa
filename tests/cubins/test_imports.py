"""What is not imported: neither the compiler nor CUDA by the package, no compiler on the way from a cached cubin."""

import subprocess
import sys

import pytest

from jax_fa4 import cubins, launcher
from jax_fa4.cubins.key import installed_dsl

FORBID = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Forbidden())
"""


def run(program, *forbidden):
    """Standard output of a Python program in which these packages can't be imported."""
    text = FORBID.replace("FORBIDDEN", repr(forbidden)) + program
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["jax_fa4", "jax_fa4.cubins", "jax_fa4.cubins.load", "jax_fa4.configs"])
def test_importing_needs_neither_compiler_nor_cuda(module):
    run(f"import {module}", "cutlass", "cuda", "nvidia_cutlass_dsl")


def test_importing_touches_no_cache(folder):
    run("import jax_fa4.cubins")
    assert not folder.exists()


LOWER = """
import jax, jax_fa4
q = jax.ShapeDtypeStruct((1, 128, 2, 128), "bfloat16")
call = jax.jit(lambda q: jax_fa4.attention(q, q, q, implementation="kernel"))
with jax_fa4.target_arch("sm_90a"):
    text = call.trace(q).lower(lowering_platforms=("cuda",)).as_text()
print(jax_fa4.launcher.TARGET in text)
"""


@pytest.mark.skipif(launcher.library() is None, reason="needs the launcher, which was not built")
def test_a_call_whose_cubin_is_cached_needs_neither_compiler_nor_cuda_nor_locks(config, stand_in):
    cubins.get(config, compiler=stand_in.compiler(installed_dsl() or "4.8.1"))
    assert run(LOWER, "cutlass", "nvidia_cutlass_dsl", "cuda", "filelock", "platformdirs") == "True\n"
