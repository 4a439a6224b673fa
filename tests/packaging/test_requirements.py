"""What an installation asks for and what it can do without."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import jax_fa4
from jax_fa4.cubins import key

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

ATTENTION_WITHOUT_NVIDIA_SOFTWARE = """
import sys

FORBIDDEN = ("cuda", "cutlass", "flax", "nvidia", "nvidia_cutlass_dsl", "optax", "tqdm")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"{name} is not installed")

sys.meta_path.insert(0, Absent())

import jax, jax_fa4, jax_fa4.flax

q = jax.numpy.ones((1, 8, 2, 16))
gradient = jax.grad(lambda q: jax_fa4.attention(q, q, q, causal=True).sum())(q)
print(gradient.shape)
"""


def test_attention_needs_no_nvidia_software_on_a_cpu():
    folder = str(Path(jax_fa4.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{ATTENTION_WITHOUT_NVIDIA_SOFTWARE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(1, 8, 2, 16)\n"


def test_a_plain_installation_asks_for_no_compiler():
    names = {requirement.split(">")[0].split("[")[0] for requirement in PROJECT["dependencies"]}
    assert names == {"cuda-python", "filelock", "jax", "numpy", "platformdirs"}


def test_the_compiler_is_asked_for_in_the_range_that_is_accepted():
    low, below = (".".join(map(str, version)) for version in key.DSL_TESTED)
    extras = PROJECT["optional-dependencies"]
    for extra in ("cuda13", "test"):
        (requirement,) = (r for r in extras[extra] if r.startswith(key.DSL_PACKAGE))
        assert requirement.split(";")[0] == f"{key.DSL_PACKAGE}[cu13]>={low},<{below}"
