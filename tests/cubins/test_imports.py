"""What is not imported: neither the compiler nor CUDA by the package, no compiler on the way from a cached cubin."""

import subprocess
import sys

import pytest

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


def test_a_cached_cubin_needs_no_compiler(config, stand_in):
    from jax_fa4 import cubins

    cubins.get(config, compiler=stand_in.compiler())
    program = f"""
from jax_fa4 import cubins
from jax_fa4.configs import *
config = {config!r}
print(cubins.get(config).config == repr(config))
print("filelock" in sys.modules, "platformdirs" in sys.modules)
"""
    assert run(program, "cutlass", "nvidia_cutlass_dsl").splitlines()[0] == "True"
