"""What `python -m jax_fa4 info` prints: everything a bug report needs to say about an installation."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import jax

import jax_fa4
from jax_fa4 import launcher
from jax_fa4.cubins.cache import Store, shipped_store, user_store
from jax_fa4.cubins.driver import devices, open_driver, version
from jax_fa4.cubins.key import DSL_PACKAGE, installed_dsl, why_dsl_unusable

__all__ = ["describe"]


def describe() -> str:
    """Versions, devices and stored kernels, a line each. Whatever is missing is said, never raised."""
    lines = [
        ("jax_fa4", jax_fa4.__version__),
        ("jax", jax.__version__),
        ("jaxlib", _installed("jaxlib")),
        (DSL_PACKAGE, _compiler()),
        ("launcher", _launcher()),
        *_cuda(),
        ("JAX devices", _jax_devices()),
        *_stored("cache", user_store()),
        *_stored("shipped kernels", shipped_store()),
    ]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    found = installed_dsl()
    if found is None:
        return "not installed"
    problem = why_dsl_unusable(found)
    return f"{found} (unused: {problem})" if problem else found


def _launcher() -> str:
    library = launcher.library()
    return "missing: GPU kernels cannot run" if library is None else str(library._name)


def _cuda() -> Iterator[tuple[str, str]]:
    try:
        driver = open_driver()
        yield "CUDA driver", f"CUDA {version(driver)}"
        for ordinal, device in enumerate(devices(driver)):
            yield f"CUDA device {ordinal}", f"{device.name}, {device.arch}"
    except RuntimeError as e:
        yield "CUDA driver", f"unusable: {_first_line(e)}"


def _jax_devices() -> str:
    try:
        return ", ".join(str(device) for device in jax.devices())
    except RuntimeError as e:
        return f"none: {_first_line(e)}"


def _stored(label: str, store: Store) -> Iterator[tuple[str, str]]:
    entries = store.entries()
    total = sum(entry.size for entry in entries)
    yield label, f"{store.folder}: {len(entries)} kernels, {total / 1e6:.1f} MB"
    for entry in entries:
        if entry.metadata is None:
            yield "", f"{entry.path.name}: unreadable"
        else:
            made = f"{DSL_PACKAGE} {entry.metadata['dsl_version']}"
            yield "", f"{entry.metadata['key'][:12]}  {entry.metadata['arch']}  {entry.metadata['config']}  {made}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
