"""The benchmark on a GPU: its clock sees what it times."""

import pytest

from jax_fa4.bench.cells import SMOKE
from jax_fa4.bench.clock import DeviceClock
from jax_fa4.bench.peers import PEERS
from jax_fa4.bench.run import time_cell

pytestmark = pytest.mark.gpu


def test_the_device_clock_sees_every_call_of_ours_and_of_cudnn():
    rows = time_cell(SMOKE, [PEERS["jax_fa4"], PEERS["cudnn"]], DeviceClock(), rounds=2)
    assert [row.refused for row in rows] == [{}, {}]
    for row in rows:
        assert set(row.figures) == {"jax_fa4", "cudnn"}
        assert all(1e-6 < figure.seconds < 1e-3 for figure in row.figures.values())
