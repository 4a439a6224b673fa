"""Which CTA computes which tile: what a program may ask for where the hardware leaves a choice."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

from jax_fa4 import checks

__all__ = ["ENVIRONMENT_VARIABLE", "cluster_launch_control", "takes_over"]

ENVIRONMENT_VARIABLE = "JAX_FA4_CLC"

_chosen = jax.make_user_context(default_value=None)  # in JAX's cache keys: another choice's program is not reused


@contextlib.contextmanager
def cluster_launch_control(is_on: bool = True) -> Iterator[None]:
    """Within it, programs are lowered to kernels of which a CTA takes over tiles of others that have not started.

    That is Blackwell's forward with head dims up to 128 and without lengths of keys, packed sequences, softcap, mask or
    bias. All other kernels have one way to deal out their tiles, and keep it. Results have the same bits either way.
    JAX_FA4_CLC=1 in the environment asks for it in a whole process.

    Example:
      >>> import jax_fa4
      >>> with jax_fa4.cluster_launch_control():  # around what lowers the program
      ...     jax_fa4.scheduling.takes_over()
      True

    Raises:
      TypeError: is_on is not a bool.
    """
    with _chosen(checks.flag("is_on", is_on)):
        yield


def takes_over() -> bool:
    """Whether programs that are lowered now ask for it.

    Raises ValueError if the environment says neither 1 nor 0.
    """
    if _chosen.value is not None:
        return _chosen.value
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"
