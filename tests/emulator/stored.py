"""The feature kernels' PTX, stored in `data/`, and how the emulator runs a case of them."""

import sys
from pathlib import Path

import numpy as np

from jax_fa4.emulator.launch import Buffer, Launch, Options, TensorMap
from jax_fa4.emulator.run import run

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

from cases import CASES, Case, Map

__all__ = ["CASES", "Stored"]


class Stored:
    """One file of `data/`: `NAME:ptx` of each case, and `NAME:OUTPUT` of those that hardware has run."""

    def __init__(self, file: str, arch: str) -> None:
        self.arrays = dict(np.load(Path(__file__).parent / "data" / file))
        self.names = [name for name, case in CASES.items() if case.arch == arch]

    def outputs(self, name: str) -> list[str]:
        """The outputs of a case that hardware has computed."""
        return [output for output in CASES[name].outputs if f"{name}:{output}" in self.arrays]

    def emulate(self, case: Case, options: Options | None = None) -> dict[str, np.ndarray]:
        """All arrays of a case after its launch."""
        arrays = case.arrays()
        buffers = {name: Buffer(array) for name, array in arrays.items()}
        launch = Launch(
            grid=case.grid,
            block=case.threads,
            cluster=case.cluster,
            params=tuple(bind(parameter, buffers) for parameter in case.params),
            smem_bytes=case.smem_bytes,
        )
        run(self.arrays[f"{case.name}:ptx"].tobytes().decode(), launch, options)
        return arrays


def bind(parameter: Map | str | int, buffers: dict[str, Buffer]) -> Buffer | TensorMap | bytes:
    """A parameter of a case as the emulator takes it."""
    if isinstance(parameter, int):
        return np.int32(parameter).tobytes()
    if isinstance(parameter, str):
        return buffers[parameter]
    return TensorMap(
        buffer=buffers[parameter.array],
        dtype=parameter.dtype,
        dims=parameter.dims,
        strides=parameter.strides,
        box=parameter.box,
        swizzle=parameter.swizzle,
        oob_fill="nan" if parameter.fills_nan else "zero",
    )
