"""Cells that a GPU checks for accuracy hit every forward kernel that is shipped, and every row of Hopper's tables."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import configs, launcher, testing
from jax_fa4.configs import KernelConfig, sm90
from jax_fa4.rules import cuda

from ..gpu import test_features, test_forward

pytestmark = pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks")
CELLS = {  # one of each kind; fewer queries may be decoded
    dataclasses.replace(cell.spec, group=1, layout="BTNH"): cell
    for cell in (*test_forward.CELLS, *test_features.CELLS)
    if cell.q >= 100 and (cell.head_dim, cell.value_dim) in sm90.FORWARD
}
ELSEWHERE = ("WIDE", "PACKED")  # part of other tables; of packed sequences, in test_varlen.py
TABLES = {
    name: table
    for name, table in vars(sm90).items()
    if isinstance(table, dict) and isinstance(next(iter(table.values()), None), sm90.Row) and name not in ELSEWHERE
}


class RecordedError(Exception):
    """Ends the lowering of a call once its kernel is known."""


@pytest.fixture(scope="module")
def asked():
    """Of each cell: the config of its first kernel, and which row of which table that is from."""
    rows, found = [], []

    def first_that_fits(table, spec):
        row = next((key for key in table if spec.head_dim <= key[0] and spec.head_dim_v <= key[1]), None)
        rows.extend((name, row) for name in TABLES if TABLES[name] is table)
        return table.get(row)

    def get(config):
        found.append((config, rows[-1]))
        raise RecordedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_FA4_ARCH", "sm_90a")
        patch.setattr(sm90, "first_that_fits", first_that_fits)
        patch.setattr(cuda.cubins, "get", get)
        for cell in CELLS.values():
            with pytest.raises(RecordedError):
                lower(testing.random(cell))
    return dict(zip(CELLS.values(), found, strict=True))


def lower(x):
    arrays = {name: value for name, value in x.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in x.items() if name not in arrays}
    call = jax.jit(lambda **a: jax_fa4.attention(**a, **static, implementation="kernel"))
    call.trace(**arrays).lower(lowering_platforms=("cuda",))


def test_a_cell_tells_what_its_call_asks_for(asked):
    for cell, (config, _) in asked.items():
        assert config == configs.forward_config(cell.spec, "sm_90a"), cell


def test_every_forward_kernel_that_is_shipped_is_checked(asked):
    shipped = {config for config in configs.all_configs("sm_90a") if isinstance(config, KernelConfig)}
    assert len(shipped) == 48
    assert shipped <= {config for config, _ in asked.values()}


def test_every_row_of_every_table_is_checked(asked):
    rows = {(name, key) for name, table in TABLES.items() for key in table}
    assert rows <= {row for _, row in asked.values()}
