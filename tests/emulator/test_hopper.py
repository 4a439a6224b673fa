"""The emulator against an H200: the same PTX on the same inputs. `kernels/` says how the stored results were made."""

import numpy as np
import pytest

from jax_fa4.emulator.errors import ExecutionError
from jax_fa4.emulator.launch import Options
from jax_fa4.emulator.layout import fragment, number

from .stored import CASES, Stored

STORED = Stored("hopper.npz", "sm_90a")
MOSTLY = 0.99  # of the outputs that are equal bit by bit
MANTISSA = {"bf16": 7, "f16": 10}  # bits
CHECKS = {"CUDA_ERROR_MISALIGNED_ADDRESS": "alignment", "CUDA_ERROR_ILLEGAL_INSTRUCTION": "tensor map"}
FORWARD = [name for name in STORED.names if CASES[name].kernel == "forward"]
REFUSED = [name for name in STORED.names if CASES[name].is_refused]
FEATURES = [name for name in STORED.names if name not in (*FORWARD, *REFUSED)]


def agree(got: np.ndarray, expected: np.ndarray, name: str) -> np.ndarray:
    """Where bit patterns are equal; float32 results of scalar instructions also where both are NaN, or near enough."""
    case, equal = CASES[name], got == expected
    if case.options.get("output") == "f32":
        with np.errstate(invalid="ignore"):
            a, b = (x.view(np.float32).astype(np.float64) for x in (got, expected))
            equal |= np.isnan(a) & np.isnan(b)
            if case.relative_error:
                equal |= np.abs(a - b) <= case.relative_error * np.abs(b) + case.absolute_error
    return equal


@pytest.mark.parametrize("name", FEATURES)
def test_the_emulator_computes_what_the_hardware_does(name):
    arrays = STORED.emulate(CASES[name], Options(exact_mma=True))
    for output in STORED.outputs(name):
        got, expected = arrays[output], STORED.arrays[f"{name}:{output}"]
        equal = agree(got, expected, name)
        assert equal.all(), (np.argwhere(~equal)[:5], got[~equal][:5], expected[~equal][:5])


@pytest.mark.parametrize("name", REFUSED)
def test_the_emulator_refuses_what_hardware_does(name):
    with pytest.raises(ExecutionError) as info:
        STORED.emulate(CASES[name])
    assert info.value.check == CHECKS[str(STORED.arrays[f"{name}:error"])]


@pytest.mark.parametrize("name", FORWARD)
def test_our_forward_kernel_computes_what_the_hardware_does(name):
    """Apart from ex2.approx, whose last bit is the hardware's own, every step is the same."""
    got, dtype = STORED.emulate(CASES[name], Options(exact_mma=True)), CASES[name].options["dtype"]
    out, lse = (STORED.arrays[f"{name}:{output}"] for output in ("out", "lse"))
    assert (got["out"] == out).mean() > MOSTLY
    a, b = (number.FORMATS[dtype].decode(x).astype(np.float64) for x in (got["out"], out))
    assert (np.abs(a - b) <= 2.0 ** -MANTISSA[dtype] * np.maximum(np.abs(b), 2.0**-6)).all()
    np.testing.assert_allclose(got["lse"], lse, rtol=2e-7, atol=1e-6)


PRODUCTS = [name for name in STORED.names if name.startswith("wgmma") and "-f32-near" in name and "True" not in name]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_right_where_cute_puts_the_operands(name):
    """Independent of any hardware, so that a kernel that feeds nonsense is not compared with itself."""
    options, before = CASES[name].options, CASES[name].arrays()
    a, b = (number.FORMATS[options[x]].decode(before[x]).astype(np.float64) for x in "ab")

    def matrix(registers: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(np.moveaxis(registers.reshape(-1, 4, 32), 1, 0))
        return fragment.gather_accumulator(words, options["n"], np.uint32).view(np.float32).astype(np.float64)

    got, expected = matrix(STORED.emulate(CASES[name])["d"]), matrix(before["d"]) + a @ b.T
    spacing = np.spacing(np.float32(np.abs(a) @ np.abs(b).T))
    assert (np.abs(got - expected) <= options["k"] * spacing).all()


ORDERED = ["tma-bf16-128", "tma-reduce", "bulk-reduce", "multicast", "dsmem", "matrices", "named-barriers"]


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_warps_and_copies_changes_the_result(name, seed):
    first = STORED.emulate(CASES[name])
    again = STORED.emulate(CASES[name], Options(order="random", completion="random", seed=seed))
    for output in CASES[name].outputs:
        assert (first[output] == again[output]).all()
