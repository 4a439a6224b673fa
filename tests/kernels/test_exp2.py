"""2^x by polynomial: how far it is from 2^x for every float32 from -127 to 0, and that kernels compute just that.

x = n + f, and n only changes the exponent of the result, so the relative error is a matter of f, which is a multiple of
2^-24: there are 2^24 + 1 of them, each of which several x may round to. All are tried.
"""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.emulator.launch import Buffer, Launch
from jax_fa4.emulator.run import run
from jax_fa4.kernels.core import exp2

from .exp2_kernel import THREADS, compiled, path, portable

STEP = 2.0**-24  # of fractions: half of it is what rounding of x + 1 takes away, where x > -0.5
CLAIMED = {3: 8.6e-5, 4: 2.9e-6, 5: 1.62e-7}  # largest relative errors, by degree; rounding of sums is half of the last


def polynomial(fraction, degree):
    """2^fraction in float32, fused multiply-adds from the highest power down."""
    *rest, power = exp2.POLYNOMIALS[degree]
    power = np.full_like(fraction, power)
    wide = fraction.astype(np.float64)
    for coefficient in reversed(rest):
        power = (power * wide + np.float64(np.float32(coefficient))).astype(np.float32)
    return power


def emulated(x, degree):
    """2^x in float32 as a kernel computes it."""
    x = np.maximum(x, np.float32(exp2.SMALLEST))
    whole = np.floor(x)
    bits = polynomial(x - whole, degree).view(np.int32) + (whole.astype(np.int32) << 23)
    return bits.view(np.float32)


@pytest.mark.parametrize("degree", exp2.POLYNOMIALS)
def test_the_largest_relative_error_over_all_fractions_is_that_claimed(degree, record_property):
    largest = 0.0
    for start in range(0, 2**24 + 1, 2**22):
        fraction = (np.arange(start, min(start + 2**22, 2**24 + 1)) * STEP).astype(np.float32)
        result = polynomial(fraction, degree).astype(np.float64)
        wide = fraction.astype(np.float64)
        assert ((result >= 1) & (result <= 2)).all()  # so that adding n to the exponent multiplies by 2^n exactly
        error = np.abs(result * np.exp2(-wide) - 1)
        rounded = np.where(wide > 0.5, STEP / 2, 0) * np.log(2)  # of x to the fraction
        largest = max(largest, (error + rounded).max())
    record_property("largest_relative_error", largest)
    assert largest == pytest.approx(CLAIMED[degree], rel=0.05)


@pytest.mark.parametrize("degree", exp2.POLYNOMIALS)
def test_the_error_is_no_larger_in_any_binade(degree):
    rng = np.random.default_rng(0)
    x = np.concatenate([-np.exp2(rng.uniform(-149, np.log2(126), 1 << 20)), -rng.uniform(0, 126, 1 << 20), [0, -126]])
    x = x.astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(emulated(x, degree) / exact - 1)).max() <= CLAIMED[degree] * 1.05


@pytest.mark.parametrize("degree", exp2.POLYNOMIALS)
def test_what_underflows_is_next_to_nothing(degree):
    x = np.array([-np.inf, -1e30, -127.5, -127, np.nextafter(np.float32(-127), np.float32(0)), -126.5], np.float32)
    result = emulated(x, degree)
    assert (result[:4] == 0).all()
    assert (np.abs(result) <= 2.0**-126).all()


@pytest.mark.parametrize("degree", exp2.POLYNOMIALS)
def test_whole_powers_are_exact(degree):
    x = np.arange(-126, 1, dtype=np.float32)
    np.testing.assert_array_equal(emulated(x, degree), np.exp2(x.astype(np.float64)))


@pytest.mark.parametrize(("arch", "packed"), [("sm_90a", False), ("sm_100a", True)])
@pytest.mark.parametrize("degree", exp2.POLYNOMIALS)
def test_a_kernel_computes_the_same_bits(degree, arch, packed):
    x = -np.random.default_rng(degree).uniform(0, 130, 2 * THREADS).astype(np.float32)
    x[:8] = 0, -0.0, -126, -127, -np.inf, -1e-30, -0.5, -1
    ptx = compiled(degree, packed=packed, arch=arch)
    out = np.zeros_like(x)
    run(ptx, Launch(grid=(1, 1, 1), block=THREADS, params=(Buffer(x), Buffer(out))))
    np.testing.assert_array_equal(out.view(np.int32), emulated(x, degree).view(np.int32))


@pytest.mark.parametrize("degree", exp2.POLYNOMIALS)
def test_the_text_that_runs_on_a_gpu_is_current(degree):
    assert path(degree).read_text() == portable(compiled(degree)), "run python tests/kernels/exp2_kernel.py"
