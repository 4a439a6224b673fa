"""Hands cubins to the C++ library, which loads them into the driver when a program that launches them first starts.

A kernel handle of a CUDA library belongs to no context, so one load serves every GPU of the process.
"""

from __future__ import annotations

from jax_fa4 import launcher
from jax_fa4.cubins.cubin import Cubin

__all__ = ["register"]

_registered: set[str] = set()  # keys; the library keeps what it got as long as the process


def register(cubin: Cubin) -> None:
    """Makes the cubin known to this process's launches under its key, once; needs neither a driver nor a device.

    Raises:
      RuntimeError: the package was installed without its library.
    """
    if cubin.key not in _registered:
        launcher.register_image(cubin.key, cubin.image)
        _registered.add(cubin.key)
