"""The notebooks run from top to bottom, and were saved with the outputs of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient (pip install 'jax-fa4[test]')")
nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a notebook sets up its own devices
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises what a cell raises
    assert all(cell.execution_count for cell in code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_was_saved_after_a_whole_run(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for cell in cells for o in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_names_no_place_of_the_machine_that_ran_it(path):
    text = json.dumps(json.loads(path.read_text()))
    assert not re.findall(r"/(?:home|root|tmp|usr|work)/\S*|site-packages", text)


def test_both_notebooks_are_here():
    assert [path.stem for path in NOTEBOOKS] == ["flax_attention", "quickstart"]
