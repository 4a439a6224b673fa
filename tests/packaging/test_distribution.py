"""What the built wheel and source archive hold. The C++ library is left out here: the installation has it or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"jax_fa4": "jax_fa4", "kernels": "jax_fa4/kernels", "emulator": "jax_fa4/emulator"}  # source, in the wheel
NOT_SOURCES = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "tests", "benchmarks")
BUILT = {".pyc", ".so"}

pytest.importorskip("scikit_build_core", reason="needs the build backend (pip install 'jax-fa4[test]')")


def copy_of_checkout(folder: Path) -> Path:
    """The checkout with what a developer may have in it: links to the two other folders, a built library, byte code."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    for name in ("kernels", "emulator"):
        link = folder / "jax_fa4" / name
        if not link.is_symlink():
            link.symlink_to(Path("..") / name)
    (folder / "jax_fa4" / "_ffi.so").write_bytes(b"stale")
    (folder / "jax_fa4" / "__pycache__").mkdir()
    (folder / "jax_fa4" / "__pycache__" / "api.cpython-311.pyc").write_bytes(b"stale")
    return folder


def build(what: str, source: Path, output: Path) -> Path:
    """Builds a `wheel` or an `sdist` with the backend, offline and without CMake."""
    program = (
        "import sys, scikit_build_core.build as b;"
        f"print(b.build_{what}(sys.argv[1], config_settings={{'wheel.cmake': 'false'}}))"
    )
    command = [sys.executable, "-c", program, str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.split()[-1]


def files_of_wheel(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def expected_files(source: Path) -> set[str]:
    """Every source file under the name that it gets in the wheel."""
    return {
        f"{inside}/{path.relative_to(source / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for path in (source / folder).rglob("*")  # follows no links
        if path.is_file() and path.suffix not in BUILT and not any(part.is_symlink() for part in path.parents)
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_checkout(tmp_path_factory.mktemp("checkout") / "jax_fa4")


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


def test_the_wheel_claims_one_name(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"jax_fa4"}


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel, checkout):
    assert files_of_wheel(wheel) == expected_files(checkout)


def test_the_wheel_serves_every_python_3(wheel):
    assert wheel.name.split("-")[2:4] == ["py3", "none"]


def test_the_wheel_holds_the_licence_and_says_that_it_is_typed(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "jax_fa4/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_archive_holds_what_the_library_is_built_from(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ffi").glob("*") if path.suffix in {".cc", ".h"}}
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"} | sources <= names
    assert not {name for name in names if name.startswith(("jax_fa4/kernels", "jax_fa4/emulator", "jax_fa4/_ffi"))}


def test_a_wheel_from_the_source_archive_is_the_same(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert files_of_wheel(build("wheel", unpacked, tmp_path)) == files_of_wheel(wheel)
