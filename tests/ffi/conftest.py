"""What the tests of the FFI library share: its test entry points, and a plan to vary."""

import copy
import importlib.util
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import pytest

from jax_fa4 import launcher
from jax_fa4.plan import BufferSpec, Launch, Plan, Pointer, Scalar, TensorMap, ceil_div, dim, encode, lead
from jax_fa4.plan.limits import DTYPES

HERE = pathlib.Path(__file__).parent
KEY = "ab" * 32
Q, OUT = range(2)


def _load(name):
    spec = importlib.util.spec_from_file_location(f"jax_fa4_tests_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native():
    return _load("native")


def _coded(buffers):
    return [(DTYPES.get(dtype, DTYPES["bool"]).code, tuple(shape), address) for dtype, shape, address in buffers]


@pytest.fixture(scope="session")
def answer(native):
    """answer(plan or bytes, operands, results, major=9, minor=0): buffers are (dtype, shape, address)."""
    launcher.require()
    lib = launcher.library()

    def run(plan, operands, results, **more):
        plan = plan if isinstance(plan, bytes) else encode(plan)
        return native.answer(
            lib, entry="evaluate", plan=plan, operands=_coded(operands), results=_coded(results), **more
        )

    return run


@pytest.fixture(scope="session")
def error_of(answer):
    """The message for a call that must fail as an invalid argument."""

    def run(*args, code="INVALID_ARGUMENT", **more):
        error = answer(*args, **more)["error"]
        assert error["code"] == code
        return error["message"]

    return run


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    """A folder with a libcuda.so.1 that logs what it is asked for instead of driving a GPU."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    source, library = HERE / "fake_driver.c", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


@pytest.fixture
def run(fake_driver, tmp_path):
    """run(requests, fail="cuInit=100", ...): answers and the log of a process with the fake driver."""

    def call(*requests, **settings):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        fake = {f"FAKE_{name.upper()}": str(value) for name, value in settings.items()}
        env = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "FAKE_LOG": str(log), **fake}
        coded = [
            {
                **request,
                "entry": "run",
                "operands": _coded(request["operands"]),
                "results": _coded(request["results"]),
            }
            for request in requests
        ]
        command = [sys.executable, "-S", HERE / "native.py", launcher.library()._name]
        done = subprocess.run(command, input=pickle.dumps(coded), env=env, capture_output=True, check=True)
        lines = log.read_text().splitlines() if log.exists() else []
        return json.loads(done.stdout), lines

    return call


@pytest.fixture(scope="session")
def unchecked():
    """A copy of a plan's part with fields that its own checks would refuse."""

    def change(part, **fields):
        other = copy.copy(part)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    return change


@pytest.fixture(scope="session")
def make_launch():
    def make(**fields):
        tokens = dim(Q, -2)
        default = {
            "cubin": KEY,
            "entry": "scale",
            "grid": (ceil_div(tokens, 128) * lead(Q, 2), 1, 1),
            "block": 384,
            "smem_bytes": 100_000,
            "params": (
                TensorMap(
                    buffer=Q,
                    dtype="bfloat16",
                    dims=(64, tokens, lead(Q, 2)),
                    strides=(128, tokens * 128),
                    box=(64, 128, 1),
                    swizzle=128,
                ),
                Pointer(buffer=OUT, extent=lead(OUT, 0) * 2, align=16),
                Scalar(dtype="i32", value=tokens),
                Scalar(dtype="f32", value=0.5),
            ),
        }
        return Launch(**{**default, **fields})

    return make


@pytest.fixture(scope="session")
def make_plan(make_launch):
    """A plan of one launch over q and out, both [*b, K, T, 64] bfloat16."""

    def make(launches=None, **launch):
        specs = [BufferSpec(name=name, dtype="bfloat16", shape=("T", 64)) for name in ("q", "out")]
        launches = launches if launches is not None else (make_launch(**launch),)
        return Plan(arch="sm_90a", operands=(specs[0],), results=(specs[1],), launches=launches)

    return make


@pytest.fixture(scope="session")
def buffers():
    """buffers(2, 3, 100): operand and result [2, 3, 100, 64] at made-up addresses."""

    def make(*shape):
        return [("bfloat16", (*shape, 64), 0x10000)], [("bfloat16", (*shape, 64), 0x90000)]

    return make
