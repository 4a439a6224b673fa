"""The cubin of a config: from memory, else from disk, else compiled."""

from __future__ import annotations

import threading
from typing import Any

from jax_fa4.cubins import cache
from jax_fa4.cubins.build import Compiler, build, installed_compiler
from jax_fa4.cubins.cubin import Cubin
from jax_fa4.cubins.key import key_of, recipe_of, sources_have_changed, why_dsl_unusable

__all__ = ["get", "stored"]

_memory: dict[str, Cubin] = {}  # by recipe
_one_at_a_time = threading.Lock()  # the compiler is not thread-safe


def get(config: Any, *, compiler: Compiler | None = None) -> Cubin:
    """The cubin of `config`, compiled by this process only if no process has compiled it yet.

    Args:
      config: KernelConfig, or anything hashable with an `arch` whose repr tells all that a kernel is compiled from.
      compiler: default the installed CuTe DSL.

    Raises:
      RuntimeError: no cubin is stored and none can be compiled; the message says what to install or build.
    """
    recipe = recipe_of(config)
    if recipe not in _memory:
        with _one_at_a_time:
            if recipe not in _memory:
                _memory[recipe] = _get(config, recipe, compiler or installed_compiler())
    return _memory[recipe]


def stored(config: Any, *, compiler: Compiler | None = None) -> Cubin | None:
    """The cubin of `config` if it is on disk."""
    return _stored(recipe_of(config), compiler or installed_compiler())


def _get(config: Any, recipe: str, compiler: Compiler) -> Cubin:
    cubin = _stored(recipe, compiler)
    if cubin is not None:
        return cubin
    problem = why_dsl_unusable(compiler.version)
    store = cache.user_store()
    if problem or compiler.version is None:
        raise RuntimeError(
            f"no cubin is stored for {config!r}, and {problem}; or lower this program where the compiler is installed "
            f"(python -m jax_fa4 build --arch {config.arch} makes those of common calls) and bring the files of "
            f"{store.folder} here"
        )
    key = key_of(recipe, compiler.version)
    with store.lock(key):
        cubin = store.get(key)  # whoever held the lock before us may have built it
        if cubin is None:
            cubin = build(config, recipe, compiler)
            if not sources_have_changed():  # else it may be the kernel of another recipe
                store.put(cubin)
    return cubin


def _stored(recipe: str, compiler: Compiler) -> Cubin | None:
    """With a usable compiler the user's store is asked for that version's cubin, without one for any (see key.py)."""
    store = cache.user_store()
    if compiler.version is None or why_dsl_unusable(compiler.version):
        cubin = store.find(recipe)
    else:
        cubin = store.get(key_of(recipe, compiler.version))
    return cubin or cache.shipped_store().find(recipe)
