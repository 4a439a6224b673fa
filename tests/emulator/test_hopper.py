"""The emulator against an H200: the same PTX on the same inputs. `kernels/` says how the stored results were made."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jax_fa4.emulator.launch import Buffer, Launch, Options, TensorMap
from jax_fa4.emulator.run import run

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

from cases import CASES, Case, Map

STORED = np.load(Path(__file__).parent / "data" / "hopper.npz")


def emulate(case: Case, options: Options) -> dict[str, np.ndarray]:
    """The outputs of a case."""
    arrays = case.arrays()
    buffers = {name: Buffer(array) for name, array in arrays.items()}

    def bind(parameter: Map | str) -> Buffer | TensorMap:
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

    launch = Launch(
        grid=case.grid,
        block=case.threads,
        cluster=case.cluster,
        params=tuple(bind(parameter) for parameter in case.params),
        smem_bytes=case.smem_bytes,
    )
    run(STORED[f"{case.name}:ptx"].tobytes().decode(), launch, options)
    return {name: arrays[name] for name in case.outputs}


def close(got: np.ndarray, expected: np.ndarray, case: Case) -> np.ndarray:
    """Where two arrays of float32 bit patterns agree within the error that the case allows; any NaN equals any NaN."""
    a, b = (x.view(np.float32).astype(np.float64) for x in (got, expected))
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= case.relative_error * np.abs(b) + case.absolute_error
    return near | (a == b) | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("name", CASES)
def test_the_emulator_computes_what_the_hardware_does(name):
    case = CASES[name]
    got = emulate(case, Options(exact_mma=True))
    for output in case.outputs:
        if f"{name}:{output}" in STORED:
            expected = STORED[f"{name}:{output}"]
            equal = close(got[output], expected, case) if case.relative_error else got[output] == expected
            assert equal.all(), (np.argwhere(~equal)[:5], got[output][~equal][:5], expected[~equal][:5])


FEATURES = ["tma-bf16-128", "tma-reduce", "bulk-reduce", "multicast", "dsmem", "matrices", "named-barriers"]


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_warps_and_copies_changes_the_result(name, seed):
    first = emulate(CASES[name], Options())
    again = emulate(CASES[name], Options(order="random", completion="random", seed=seed))
    for output in CASES[name].outputs:
        assert (first[output] == again[output]).all()
