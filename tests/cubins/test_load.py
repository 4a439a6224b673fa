"""Loading, with a stand-in for the driver: what is called, how often, and what an error says."""

import enum
import subprocess
import sys
import types

import pytest

from jax_fa4 import launcher
from jax_fa4.cubins import driver, load


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_NOT_FOUND = 500


class Driver:
    """A machine with two A100s; each call's status can be set."""

    CUresult = CUresult
    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=8, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0
    )

    def __init__(self):
        self.loaded = []
        self.status = {}

    def _reply(self, call, value):
        return self.status.get(call, CUresult.CUDA_SUCCESS), value

    def cuLibraryLoadData(self, image, *options):  # noqa: N802
        self.loaded.append(image)
        return self._reply("load", "library")

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        return self._reply("kernel", 1234)

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


@pytest.fixture
def machine(monkeypatch):
    """The driver that `load` sees."""
    fake = Driver()
    monkeypatch.setattr(load, "open_driver", lambda: fake)
    monkeypatch.setattr(load, "_handles", {})
    return fake


@pytest.fixture
def registered(monkeypatch):
    """What the C++ library was told."""
    calls = []
    monkeypatch.setattr(launcher, "register_kernel", lambda key, handle: calls.append((key, handle)))
    return calls


def test_a_cubin_is_loaded_and_registered_once(machine, registered, cubin):
    assert [load.load(cubin), load.load(cubin)] == [1234, 1234]
    assert machine.loaded == [cubin.image]
    assert registered == [(cubin.key, 1234)]


def test_an_error_says_what_the_cubin_and_the_devices_are(machine, registered, cubin):
    machine.status["load"] = CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(RuntimeError) as error:
        load.load(cubin)
    assert str(error.value) == (
        "loading the sm_90a kernel kernel_forward_bfloat16 (devices here: sm_80) failed: CUDA_ERROR_NO_BINARY_FOR_GPU"
    )
    assert registered == []


def test_an_absent_entry_is_named(machine, registered, cubin):
    machine.status["kernel"] = CUresult.CUDA_ERROR_NOT_FOUND
    with pytest.raises(
        RuntimeError, match="the kernel kernel_forward_bfloat16 in its cubin failed: CUDA_ERROR_NOT_FOUND"
    ):
        load.load(cubin)


def test_a_failed_load_is_tried_again(machine, registered, cubin):
    machine.status["load"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(RuntimeError):
        load.load(cubin)
    machine.status.clear()
    assert load.load(cubin) == 1234


def test_devices_and_version_are_read():
    assert driver.devices(Driver()) == [driver.Device(name="NVIDIA A100", arch="sm_80")] * 2
    assert driver.version(Driver()) == "13.2"


@pytest.mark.parametrize("call", ["count", "device", "name", "attribute"])
def test_every_status_is_looked_at(call):
    machine = Driver()
    machine.status[call] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NO_DEVICE"):
        driver.devices(machine)


def test_a_machine_without_cuda_python_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match="cuda-python can't be imported"):
        driver.open_driver()


def test_a_machine_without_a_driver_is_told_so():
    """In a process of its own, whose loader finds no libcuda even on a machine that has one."""
    program = (
        "import cuda.pathfinder as p\n"
        "from cuda.bindings import driver as d\n"
        "def absent(): raise p.DynamicLibNotFoundError('no libcuda')\n"
        "d.cuInit = lambda flags: absent()\n"
        "from jax_fa4.cubins.driver import open_driver\n"
        "try: open_driver()\n"
        "except RuntimeError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "there is no CUDA driver: no libcuda\n"


@pytest.mark.gpu
def test_a_kernel_of_the_device_loads_on_it(monkeypatch):
    """Needs CuTe DSL, or a cache that was filled elsewhere."""
    from jax_fa4 import configs, cubins

    monkeypatch.delenv("JAX_FA4_CACHE_DIR")
    cubin = cubins.get(configs.all_configs("sm_90a")[0])
    assert load.load(cubin) > 0
