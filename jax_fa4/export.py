"""What `jax.export` needs: the checks to switch off, and the architectures whose cubins travel in the program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import jax
from jax.export import DisabledSafetyCheck

from jax_fa4 import checks, launcher

__all__ = [
    "ARCHS",
    "ENVIRONMENT_VARIABLE",
    "PROVEN",
    "asked_archs",
    "export_disabled_checks",
    "target_arch",
    "target_archs",
]

# Hopper and Blackwell; "a": code that uses wgmma or tcgen05 runs on this architecture alone
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
PROVEN = ("sm_90a",)  # all whose kernels have run on hardware
ENVIRONMENT_VARIABLE = "JAX_FA4_ARCH"

_chosen = jax.make_user_context(default_value=None)  # in JAX's cache keys: another choice's program is not reused


def export_disabled_checks() -> list[DisabledSafetyCheck]:
    """What to pass as `jax.export.export(..., disabled_checks=...)`, which knows only JAX's own custom calls.

    Example:
      >>> import jax, jax_fa4
      >>> q = jax.ShapeDtypeStruct((1, 5, 2, 64), "bfloat16")
      >>> export = jax.export.export(
      ...     jax.jit(jax_fa4.attention), platforms=["cpu"], disabled_checks=jax_fa4.export_disabled_checks()
      ... )
      >>> export(q, q, q).out_avals[0].shape
      (1, 5, 2, 64)
    """
    return [DisabledSafetyCheck.custom_call(launcher.TARGET)]


@contextlib.contextmanager
def target_arch(*archs: str) -> Iterator[None]:
    """Within it, programs that are lowered for a GPU without a device at hand get cubins for `archs`.

    Names are "sm_90a", "sm_100a" and "sm_103a". The environment variable JAX_FA4_ARCH (names with commas between) says
    it for a whole process; without both it is "sm_90a".

    Example:
      >>> import jax_fa4
      >>> with jax_fa4.target_arch("sm_90a"):  # around jax.export.export(step, platforms=["cuda"], ...)(x)
      ...     jax_fa4.export.target_archs()
      ('sm_90a',)

    Raises:
      ValueError: an unknown name, or none.
    """
    with _chosen(_validated("target_arch's archs", archs)):
        yield


def target_archs() -> tuple[str, ...]:
    """The architectures to make cubins for where no device tells: those asked for, else those proven: Hopper."""
    return asked_archs() or PROVEN


def asked_archs() -> tuple[str, ...]:
    """What `target_arch` or else the environment asks for; nothing if neither does."""
    if _chosen.value is not None:
        return _chosen.value
    names = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    return _validated(ENVIRONMENT_VARIABLE, [name.strip() for name in names.split(",")]) if names else ()


def _validated(origin: str, names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        checks.fail(ValueError, f"{origin} must name {' or '.join(ARCHS)}", "nothing")
    for name in names:
        if name not in ARCHS:
            checks.fail(ValueError, f"{origin} must name {' or '.join(ARCHS)}", repr(name))
    return tuple(dict.fromkeys(names))
