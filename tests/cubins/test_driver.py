"""Devices and versions as the driver tells them, with a stand-in for the driver."""

import enum
import subprocess
import sys
import types

import pytest

from jax_fa4.cubins import driver


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


class Driver:
    """A machine with two A100s; the status of each call can be set."""

    CUresult = CUresult
    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=8, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0
    )

    def __init__(self, failing=None):
        self.failing = failing

    def _reply(self, call, value):
        return CUresult.CUDA_ERROR_NO_DEVICE if call == self.failing else CUresult.CUDA_SUCCESS, value

    def cuDriverGetVersion(self):  # noqa: N802
        return self._reply("version", 13020)

    def cuDeviceGetCount(self):  # noqa: N802
        return self._reply("count", 2)

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return self._reply("device", ordinal)

    def cuDeviceGetName(self, length, device):  # noqa: N802
        return self._reply("name", b"NVIDIA A100\0\0")

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return self._reply("attribute", attribute)


def test_devices_are_listed_with_their_architecture():
    assert driver.devices(Driver()) == [driver.Device(name="NVIDIA A100", arch="sm_80")] * 2


def test_the_version_is_written_as_people_do():
    assert driver.version(Driver()) == "13.2"


@pytest.mark.parametrize("call", ["count", "device", "name", "attribute"])
def test_every_status_is_looked_at(call):
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NO_DEVICE"):
        driver.devices(Driver(failing=call))


def test_a_machine_without_cuda_python_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match="cuda-python can't be imported"):
        driver.open_driver()


def test_a_machine_without_a_driver_is_told_so():
    """In a process of its own, whose loader finds no libcuda even on a machine that has one."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-python, which exists for Linux")
    program = (
        "import cuda.pathfinder\n"
        "import cuda.bindings.driver\n"
        "from jax_fa4.cubins.driver import open_driver\n"
        "def cuInit(flags): raise cuda.pathfinder.DynamicLibNotFoundError('no libcuda')\n"
        "cuda.bindings.driver.cuInit = cuInit\n"
        "try: open_driver()\n"
        "except RuntimeError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "there is no CUDA driver: no libcuda\n"


@pytest.mark.gpu
def test_the_machines_own_devices_are_listed():
    found = driver.devices(driver.open_driver())
    assert found
    assert all(device.arch.startswith("sm_") for device in found)
