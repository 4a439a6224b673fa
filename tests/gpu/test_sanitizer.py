"""Every kernel under NVIDIA's compute-sanitizer: none touches what isn't its own."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from . import sanitize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer (CUDA toolkit) on PATH"),
]
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--padding", "65536")
CRASH = 139  # of the tool itself, before or after the program; it has gone away on a second try
ATTEMPTS = 2


@pytest.mark.parametrize("part", sanitize.GROUPS)
def test_memcheck_finds_nothing(part):
    program = (sys.executable, str(pathlib.Path(sanitize.__file__)), part)
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    for _ in range(ATTEMPTS):
        run = subprocess.run(
            ["compute-sanitizer", *OPTIONS, *program], env=environment, capture_output=True, text=True, timeout=900
        )
        if run.returncode != CRASH:
            break
    said = f"{run.stdout}\n{run.stderr}"[-5000:]
    assert run.returncode == 0, said
    assert "done" in run.stdout.splitlines(), said
    assert "ERROR SUMMARY: 0 errors" in said
