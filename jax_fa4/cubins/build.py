"""From a config to a cubin: runs the kernel compiler and reads from its PTX what a launch has to know."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from jax_fa4.cubins.cubin import Cubin
from jax_fa4.cubins.key import installed_dsl, key_of
from jax_fa4.cubins.ptx_params import check_config, params_of, threads_of

__all__ = ["Compiled", "Compiler", "build", "installed_compiler"]


class Compiled(Protocol):
    """What a compiler returns."""

    @property
    def cubin(self) -> bytes: ...
    @property
    def ptx(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def smem_bytes(self) -> int: ...  # dynamic shared memory of a launch
    @property
    def threads(self) -> int: ...  # in a CTA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """A kernel compiler: what it does to a config, and the version that goes into keys (None: not installed)."""

    version: str | None
    compile: Callable[[Any], Compiled]


def installed_compiler() -> Compiler:
    """CuTe DSL as installed. Nothing of it is imported before it compiles."""
    return Compiler(version=installed_dsl(), compile=_compile_with_dsl)


def build(config: Any, recipe: str, compiler: Compiler) -> Cubin:
    """Compiles a config.

    Raises:
      RuntimeError: the compiler failed; its own error is the cause.
      ValueError: the PTX has other parameters or threads than the config and the compiler say.
    """
    assert compiler.version is not None, "callers ask why_dsl_unusable first"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a program prints is its own
            compiled = compiler.compile(config)
    except Exception as e:
        raise RuntimeError(f"the kernel compiler failed on {config!r}: {e}") from e
    params = params_of(compiled.ptx, compiled.entry)
    check_config(params, config.params, compiled.entry)
    demanded = threads_of(compiled.ptx, compiled.entry)
    if demanded not in (None, compiled.threads):
        raise ValueError(f"kernel {compiled.entry}: the compiler says {compiled.threads} threads, the PTX {demanded}")
    return Cubin(
        key=key_of(recipe, compiler.version),
        recipe=recipe,
        dsl_version=compiler.version,
        arch=config.arch,
        config=repr(config),
        entry=compiled.entry,
        smem_bytes=compiled.smem_bytes,
        threads=compiled.threads,
        params=params,
        image=compiled.cubin,
        ptx_zlib=zlib.compress(compiled.ptx.encode(), 9),
    )


def _compile_with_dsl(config: Any) -> Compiled:
    from jax_fa4.kernels.build import compile_kernel  # imports CuTe DSL: seconds, and absent on most machines

    return compile_kernel(config)
