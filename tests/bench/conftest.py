"""A cell that is small enough to count by hand."""

import pytest

from jax_fa4.bench.cells import Cell


@pytest.fixture
def cell():
    sizes = {"q_len": 8, "kv_len": 8, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "head_dim_v": 16}
    return Cell(name="tiny", kind="prefill", causal=True, **sizes)
