"""What `import jax_fa4` gives and what it leaves alone."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import jax_fa4


def python(code: str) -> str:
    """Output of a new process in which jax_fa4 can be imported from where it was found here."""
    root = str(pathlib.Path(jax_fa4.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_public_names_are():
    assert set(jax_fa4.__all__) == {
        "__version__",
        "append_kv",
        "attention",
        "attention_paged",
        "attention_qkv",
        "attention_varlen",
        "cluster_launch_control",
        "combine",
        "dot_product_attention",
        "export_disabled_checks",
        "target_arch",
    }
    assert all(hasattr(jax_fa4, name) for name in jax_fa4.__all__)


def test_import_loads_no_nvidia_software_and_starts_no_backend():
    code = (
        "import jax_fa4, jax; from jax._src import xla_bridge; "
        "print([m for m in sys.modules if m.split('.')[0] in ('cutlass', 'cuda', 'flax')], xla_bridge._backends)"
    )
    assert python(code) == "[] {}"


def test_the_version_is_that_of_the_installed_package():
    try:
        installed = importlib.metadata.version("jax-fa4")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jax_fa4 is imported from its sources, not installed")
    assert installed == jax_fa4.__version__
