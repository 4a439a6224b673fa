"""The real compiler on a small kernel: what its PTX declares and its binary holds."""

import dataclasses

import pytest

from jax_fa4.configs import PointerParam, ScalarParam
from jax_fa4.cubins import get
from jax_fa4.cubins.build import Compiler
from jax_fa4.cubins.key import installed_dsl, why_dsl_unusable
from jax_fa4.cubins.report import resources_of

cutlass = pytest.importorskip("cutlass", reason="needs CuTe DSL, which is not installed")
cute = pytest.importorskip("cutlass.cute")
runtime = pytest.importorskip("cutlass.cute.runtime")

pytestmark = pytest.mark.skipif(why_dsl_unusable(installed_dsl()) is not None, reason="needs a tested CuTe DSL")

THREADS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    arch: str = "sm_90a"
    params: tuple = (PointerParam(name="lse", dtype="float32"), ScalarParam(name="q_len"), ScalarParam(name="kv_len"))


@dataclasses.dataclass(frozen=True)
class Compiled:
    cubin: bytes
    ptx: str
    entry: str
    smem_bytes: int = 0
    threads: int = THREADS


@cute.kernel
def add_kernel(x: cute.Pointer, n: cutlass.Int32, a: cutlass.Int32):
    i = cute.arch.thread_idx()[0] + cute.arch.block_idx()[0] * THREADS
    if i < n:
        y = cute.make_tensor(x, cute.make_layout(n))
        y[i] = y[i] * cutlass.Float32(a) + y[i]


@cute.jit
def add(x: cute.Pointer, n: cutlass.Int32, a: cutlass.Int32):
    add_kernel(x, n, a).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@pytest.fixture
def small(tmp_path):
    """The cubin of the kernel above."""

    def compile(config):
        x = runtime.make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=16)
        options = f"--keep-ptx --keep-cubin --gpu-arch {config.arch} --dump-dir {tmp_path}"
        artifacts = cute.compile(add, x, cutlass.Int32(1), cutlass.Int32(1), options=options).artifacts
        entry = artifacts.PTX.split(".entry ")[1].split("(")[0]
        return Compiled(artifacts.CUBIN, artifacts.PTX, entry)

    return get(Config(), compiler=Compiler(version=installed_dsl(), compile=compile))


def test_parameters_are_read_from_real_ptx(small):
    assert [(p.kind, p.size, p.pointee_align) for p in small.params] == [
        ("pointer", 8, 16),
        ("bytes", 4, 1),
        ("bytes", 4, 1),
    ]


def test_the_image_is_a_binary(small):
    assert small.image.startswith(b"\x7fELF")


def test_the_disassembler_reads_it(small):
    try:
        resources = resources_of(small)
    except RuntimeError as e:
        pytest.skip(str(e))
    assert resources.count("FFMA") == 1
    assert 0 < resources.registers < 32
    assert resources.spill_loads == resources.spill_stores == resources.stack_bytes == 0


def test_a_kernel_of_the_table_fits_its_config_and_leaves_nothing_behind(config, tmp_path, monkeypatch, capfd, folder):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    cubin = get(config)
    assert list(work.iterdir()) == []
    assert capfd.readouterr().out == ""
    assert [p.name for p in folder.glob("*.cubin")] == [f"{cubin.key}.cubin"]
    assert (cubin.smem_bytes, cubin.threads) == (config.smem_bytes, config.threads)
