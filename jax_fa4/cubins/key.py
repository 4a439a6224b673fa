"""What names a cubin: recipe = hash(sources, config, architecture), key = hash(recipe, DSL version).

A machine that only runs kernels has no CuTe DSL and so knows no DSL version. It knows the recipe, and takes any cubin
made from it: the same sources of kernels and configs, the same config and architecture, compiled by a DSL version of
the tested range (no other is ever used). With a DSL installed, the cache is asked for the exact key, so that another
DSL version compiles anew.

Nothing here imports the DSL: its version comes from the package metadata, and the kernels are read as files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import Any

__all__ = [
    "DSL_PACKAGE",
    "DSL_TESTED",
    "digest_of_folder",
    "installed_dsl",
    "key_of",
    "recipe_of",
    "source_folders",
    "sources_digest",
    "sources_have_changed",
    "why_dsl_unusable",
]

DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_TESTED = ((4, 8, 1), (4, 9))  # from, below: releases within one minor version kept the generated code's contract
_INSTALL = 'pip install "jax-fa4[cuda13]"'


def recipe_of(config: Any) -> str:
    """64 hex digits for (bytes of all sources, repr of the config, its architecture)."""
    return _hash(sources_digest(), repr(config), config.arch)


def key_of(recipe: str, dsl_version: str) -> str:
    """64 hex digits: the name of the cubin that this DSL version makes of the recipe."""
    return _hash(recipe, dsl_version)


@functools.cache
def sources_digest() -> str:
    """Hash over names and bytes of every Python file of kernels and configs; read once per process."""
    return _digest_of_sources()


def sources_have_changed() -> bool:
    """Whether somebody has edited one since `sources_digest` was taken, so that what is compiled may be newer."""
    return _digest_of_sources() != sources_digest()


def _digest_of_sources() -> str:
    return _hash(*map(digest_of_folder, source_folders()))


def source_folders() -> Iterator[pathlib.Path]:
    """Of kernels and configs: kernels ask a config for what follows from its fields, which its repr doesn't show."""
    for package in ("jax_fa4.kernels", "jax_fa4.configs"):
        spec = importlib.util.find_spec(package)
        folders = spec.submodule_search_locations if spec else None
        assert folders, f"{package} is part of every installation"
        yield pathlib.Path(folders[0])


def digest_of_folder(folder: pathlib.Path) -> str:
    """Hash over the relative names and bytes of every `*.py` in the folder and below."""
    root = folder.resolve()  # a checkout maps the folder in by a link
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    return _hash(*(part for name, path in files for part in (name, path.read_bytes())))


@functools.cache
def installed_dsl() -> str | None:
    """Version of the installed CuTe DSL, or None."""
    try:
        return importlib.metadata.version(DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_dsl_unusable(version: str | None) -> str | None:
    """None when this DSL version may compile kernels, else what is wrong and what to do about it."""
    oldest, below = (".".join(map(str, bound)) for bound in DSL_TESTED)
    if version is None:
        return f"the kernel compiler ({DSL_PACKAGE}) is not installed: {_INSTALL}"
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if not DSL_TESTED[0] <= numbers < DSL_TESTED[1]:
        return f"{DSL_PACKAGE} {version} is installed, kernels are tested with >={oldest},<{below}: {_INSTALL}"
    return None


def _hash(*parts: str | bytes) -> str:
    """SHA-256 over length-prefixed parts, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
