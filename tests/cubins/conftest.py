"""A cache of its own for every test, and a stand-in compiler that needs no CuTe DSL."""

import dataclasses
import sys

import pytest

from jax_fa4.configs import MapParam, PointerParam
from jax_fa4.configs.sm90 import forward
from jax_fa4.cubins import build, cache, key, lookup
from jax_fa4.spec import AttentionSpec

DECLARATIONS = {
    MapParam: ".param .align 64 .b8 {name}[128]",
    PointerParam: ".param .u64 .ptr .global .align 4 {name}",
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    cubin: bytes
    ptx: str
    entry: str
    smem_bytes: int
    threads: int


class StandIn:
    """Compiles to PTX that has nothing but the config's parameters, and counts how often."""

    def __init__(self):
        self.count = 0

    def __call__(self, config):
        self.count += 1
        sys.stdout.write("noise of a compiler\n")
        entry = f"kernel_{config.kernel}_{config.dtype}"
        params = [
            DECLARATIONS.get(type(param), ".param .u32 {name}").format(name=f"{entry}_param_{n}")
            for n, param in enumerate(config.params)
        ]
        ptx = f".visible .entry {entry}({', '.join(params)})\n.reqntid {config.threads}, 1, 1\n{{ ret; }}\n"
        return Compiled(f"image {self.count} of {config}".encode(), ptx, entry, config.smem_bytes, config.threads)

    def compiler(self, version="4.8.1"):
        return build.Compiler(version=version, compile=self)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The user's cache directory, not yet made, in a process that has read and warned of nothing."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(lookup, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    key.sources_digest.cache_clear()  # a kernel may have been edited since the tests began
    return tmp_path / "cache"


@pytest.fixture
def forget(monkeypatch):
    """Makes this process forget every cubin that it has in memory."""
    return lambda: monkeypatch.setattr(lookup, "_memory", {})


@pytest.fixture
def stand_in():
    return StandIn()


@pytest.fixture
def config():
    return forward(AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, group=1))


@pytest.fixture
def other_config():
    return forward(AttentionSpec(dtype="float16", head_dim=64, head_dim_v=64, group=1))


@pytest.fixture
def cubin(config, stand_in):
    """A cubin that is stored nowhere."""
    return build.build(config, "0" * 64, stand_in.compiler())
