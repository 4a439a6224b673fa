"""The CUDA driver through cuda-python, for people who ask what is installed; its import is too slow for a launch."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Device", "devices", "open_driver", "version"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A CUDA device of this process."""

    name: str
    arch: str  # "sm_90": the architecture without the suffix that a cubin may carry


def open_driver() -> Any:
    """The module `cuda.bindings.driver`, initialised.

    Raises:
      RuntimeError: cuda-python, the driver's library or a device is missing; the message says which.
    """
    try:
        from cuda.bindings import driver  # 0.2 s, and absent outside Linux
    except ImportError as e:
        raise RuntimeError(f"cuda-python can't be imported: {e}") from e
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as e:  # how cuda-python says that there is no libcuda
        raise RuntimeError(f"there is no CUDA driver: {e}") from e
    _check(driver, status, "cuInit")
    return driver


def version(driver: Any) -> str:
    """The newest CUDA that the driver knows, like "13.0"."""
    status, number = driver.cuDriverGetVersion()
    _check(driver, status, "cuDriverGetVersion")
    return f"{number // 1000}.{number % 1000 // 10}"


def devices(driver: Any) -> list[Device]:
    """The devices of this process, in the driver's order."""
    status, count = driver.cuDeviceGetCount()
    _check(driver, status, "cuDeviceGetCount")
    return [_device(driver, ordinal) for ordinal in range(count)]


def _device(driver: Any, ordinal: int) -> Device:
    attribute = driver.CUdevice_attribute
    status, device = driver.cuDeviceGet(ordinal)
    _check(driver, status, "cuDeviceGet")
    status, name = driver.cuDeviceGetName(128, device)
    _check(driver, status, "cuDeviceGetName")
    numbers = []
    for part in ("MAJOR", "MINOR"):
        which = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}")
        status, number = driver.cuDeviceGetAttribute(which, device)
        _check(driver, status, "cuDeviceGetAttribute")
        numbers.append(number)
    return Device(name=name.split(b"\0")[0].decode(), arch="sm_{}{}".format(*numbers))


def _check(driver: Any, status: Any, what: str) -> None:
    """Raises RuntimeError with the CUDA error's name if `status` is an error."""
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what} failed: {status.name}")
