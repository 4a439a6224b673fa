"""Loads cubins into the driver and makes their kernels known to the C++ library, once per process.

A kernel handle of a CUDA library belongs to no context, so one load serves every GPU of the process.
"""

from __future__ import annotations

import threading
from typing import Any

from jax_fa4 import launcher
from jax_fa4.cubins.cubin import Cubin
from jax_fa4.cubins.driver import check, devices, open_driver

__all__ = ["load", "register"]

_handles: dict[str, int] = {}  # CUkernel by key; a library stays loaded as long as the process
_one_at_a_time = threading.Lock()


def load(cubin: Cubin) -> int:
    """The kernel's CUkernel handle; a second call with the same key returns the first one's.

    Raises:
      RuntimeError: there is no driver, no device that can run the cubin, or the package lacks its launcher.
    """
    if cubin.key not in _handles:
        with _one_at_a_time:
            if cubin.key not in _handles:
                handle = _load(open_driver(), cubin)
                launcher.register_kernel(cubin.key, handle)
                _handles[cubin.key] = handle
    return _handles[cubin.key]


def register(cubin: Cubin) -> bool:
    """Loads the kernel if this process has a device for it, so that the C++ library can launch it.

    A program may be lowered for a device of another machine: then nothing happens, and the result is False.
    """
    if cubin.key in _handles:
        return True
    try:
        present = devices(open_driver())
    except RuntimeError:
        return False
    if not any(device.arch == cubin.arch.rstrip("af") for device in present):
        return False
    load(cubin)
    return True


def _load(driver: Any, cubin: Cubin) -> int:
    status, library = driver.cuLibraryLoadData(cubin.image, [], [], 0, [], [], 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        present = ", ".join(dict.fromkeys(device.arch for device in devices(driver))) or "none"
        check(driver, status, f"loading the {cubin.arch} kernel {cubin.entry} (devices here: {present})")
    status, kernel = driver.cuLibraryGetKernel(library, cubin.entry.encode())
    check(driver, status, f"finding the kernel {cubin.entry} in its cubin")
    return int(kernel)
