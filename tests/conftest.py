"""Set-up of every test: 8 host devices, so that sharding is tested anywhere, and a skip for tests that need a GPU."""

import os
from collections.abc import Iterator

# XLA reads this once, when the first backend starts: it has to be set before any test module imports jax.
HOST_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HOST_DEVICES}".strip()
# JAX looks for its CUDA plugin once, too; programs for a GPU are compiled where the plugin has neither GPU nor cuDNN.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and (reason := why_no_gpu()):
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """For modules that mostly compile; the others run what XLA's optimisations make of the same code."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def why_no_gpu() -> str | None:
    """None where JAX has an NVIDIA GPU, else the reason that a skipped test shows."""
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"needs an NVIDIA GPU: {str(error).splitlines()[0]}"
    return None
