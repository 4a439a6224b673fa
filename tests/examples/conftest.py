"""Examples run in processes of their own, which find jax_fa4 where these tests found it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import jax_fa4


@pytest.fixture(autouse=True)
def _find_jax_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(jax_fa4.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
