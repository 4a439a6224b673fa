"""Blackwell's tensor core: CuTe's reading of every layout against the emulator's."""

import pytest

from jax_fa4.emulator.launch import Options

from .stored import CASES, Stored

STORED = Stored("blackwell.npz", "sm_100a")


@pytest.mark.parametrize("name", STORED.names)
def test_products_are_right_where_cute_puts_the_operands(name):
    arrays = STORED.emulate(CASES[name])
    assert (arrays["d"] == arrays["expected"]).all()


@pytest.mark.parametrize("completion", ["early", "random"])
@pytest.mark.parametrize("name", ["umma-bf16-bf16-128x64x64-32x32b-8", "umma-bf16-bf16-256x128x64-2-mm"])
def test_no_order_changes_the_product(name, completion):
    arrays = STORED.emulate(CASES[name], Options(completion=completion, order="random", seed=3))
    assert (arrays["d"] == arrays["expected"]).all()
