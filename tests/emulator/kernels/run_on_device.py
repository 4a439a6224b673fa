"""Runs the compiled feature kernels on a Hopper GPU: `python run_on_device.py CUBINS OUT` writes OUT/hopper.npz.

Needs numpy and the CUDA driver alone. The file holds `NAME:OUTPUT`, and `NAME:ptx`, what the cubin was made from;
`NAME:error` is the driver's error of a case that hardware refuses.
A kernel that fails takes its process with it, so kernels run in a child that is started again behind the failure.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, Case, Map

SECONDS = 240  # for one child process
MAX_PLAIN_SMEM = 48 * 1024  # bytes a kernel may use without asking
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STOPPED = "RuntimeError: cuCtxSynchronize: "  # how a child ends whose kernel hardware refused to run
DATA_TYPES = {"u8": 0, "f16": 6, "f32": 7, "bf16": 9}  # CUtensorMapDataType
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}  # CUtensorMapSwizzle


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with its cluster dimension."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("cluster", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Device:
    """The first GPU, through the driver's C interface."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, function: str, *arguments: Any) -> None:
        """Raises RuntimeError with the driver's name of the error."""
        status = getattr(self.driver, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{function}: {text.value.decode() if text.value else status}")

    def upload(self, array: np.ndarray) -> int:
        """Device memory with the array's bytes."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 16)))
        self.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return pointer.value

    def download(self, pointer: int, array: np.ndarray) -> None:
        """Overwrite the array with device memory."""
        target = ctypes.c_void_p(array.ctypes.data)
        self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(pointer), ctypes.c_size_t(array.nbytes))

    def tensor_map(self, described: Map, pointer: int) -> Any:
        """A CUtensorMap."""
        rank = len(described.dims)
        encoded = (ctypes.c_char * (128 + 64))()
        start = ctypes.addressof(encoded)
        start += -start % 64
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(start),
            DATA_TYPES[described.dtype],
            rank,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * rank)(*described.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*described.strides),
            (ctypes.c_uint32 * rank)(*described.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            SWIZZLES[described.swizzle],
            0,
            int(described.fills_nan),
        )
        return ctypes.create_string_buffer(ctypes.string_at(start, 128), 128)

    def launch(self, image: bytes, entry: str, case: Case, parameters: list[Any]) -> None:
        """Run a kernel to its end; `parameters` are ctypes values."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if case.smem_bytes > MAX_PLAIN_SMEM:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SMEM, case.smem_bytes)
        attribute = LaunchAttribute(id=CLUSTER_DIMENSION, cluster=(ctypes.c_uint * 3)(*case.cluster))
        config = LaunchConfig(
            grid=(ctypes.c_uint * 3)(*case.grid),
            block=(ctypes.c_uint * 3)(case.threads, 1, 1),
            smem_bytes=case.smem_bytes,
            attributes=ctypes.pointer(attribute),
            num_attributes=int(case.cluster != (1, 1, 1)),
        )
        pointers = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(value) for value in parameters))
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self.call("cuCtxSynchronize")


def entry_of(ptx: str) -> str:
    """The name of the only kernel."""
    return ptx.split(".visible .entry ")[1].split("(")[0].strip()


def run_case(device: Device, case: Case, folder: Path) -> dict[str, np.ndarray]:
    """The outputs of a case, and where they come from."""
    ptx, image = (folder / f"{case.name}.ptx").read_text(), (folder / f"{case.name}.cubin").read_bytes()
    arrays = {name: np.ascontiguousarray(array) for name, array in case.arrays().items()}
    pointers = {name: device.upload(array) for name, array in arrays.items()}

    def bind(parameter: Map | str | int) -> Any:
        if isinstance(parameter, int):
            return ctypes.c_int32(parameter)
        if isinstance(parameter, Map):
            return device.tensor_map(parameter, pointers[parameter.array])
        return ctypes.c_uint64(pointers[parameter])

    device.launch(image, entry_of(ptx), case, [bind(parameter) for parameter in case.params])
    for name in case.outputs:
        device.download(pointers[name], arrays[name])
    outputs = {f"{case.name}:{name}": arrays[name] for name in case.outputs}
    return outputs | {f"{case.name}:ptx": np.frombuffer(ptx.encode(), np.uint8), "device": np.array(device.name)}


def run_here(folder: Path, out: Path, names: list[str]) -> None:
    """Run cases in this process."""
    device = Device()
    for name in names:
        np.savez_compressed(out / f"{name}.npz", **run_case(device, CASES[name], folder))


def main(folder: Path, out: Path, names: list[str]) -> int:
    """Run all cases that are compiled; the number of those that fail."""
    out.mkdir(parents=True, exist_ok=True)
    waiting = [
        name for name in (names or CASES) if CASES[name].arch == "sm_90a" and (folder / f"{name}.cubin").exists()
    ]
    failed = []
    while waiting:
        command = [sys.executable, __file__, "--here", str(folder), str(out), *waiting]
        try:
            result = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)
            reason = result.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            reason = ["hangs"]
        waiting = [name for name in waiting if not (out / f"{name}.npz").exists()]
        if waiting:
            name = waiting.pop(0)
            if CASES[name].is_refused and reason and reason[0].startswith(STOPPED):
                ptx = np.frombuffer((folder / f"{name}.ptx").read_bytes(), np.uint8)
                error = np.array(reason[0].removeprefix(STOPPED))
                np.savez_compressed(out / f"{name}.npz", **{f"{name}:error": error, f"{name}:ptx": ptx})
            else:
                failed.append(f"{name}: {''.join(reason)}")
    results: dict[str, np.ndarray] = {}
    for path in sorted(out.glob("*.npz")):
        if path.stem in CASES:
            results |= np.load(path)
            path.unlink()
    np.savez_compressed(out / "hopper.npz", **results)
    sys.stdout.write("\n".join([*failed, f"{len(failed)} of the cases failed", ""]))
    return len(failed)


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        run_here(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(bool(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
