"""On a GPU every gradient of what a kernel computes comes from kernels, over all pairs of features."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import launcher, testing
from jax_fa4.cubins import Cubin
from jax_fa4.rules import cuda
from jax_fa4.testing import Cell

from ..pairwise import pairwise

pytestmark = pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks")
SHARED: dict[str, tuple[Any, ...]] = {
    "head_dims": ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)),
    "dtype": ("bfloat16", "float16"),
    "bounds": ({}, {"causal": True}, {"window": (3, 1)}, {"window": (3, None)}),
    "group": (1, 3),
    "softcap": (None, 2.5),
    "sinks": (False, True),
    "deterministic": (False, True),
    "mapped": (False, True),
}
FACTORS = SHARED | {
    "layout": ("BTNH", "BNTH"),
    "bias": (None, "full", "keys", "shared"),
    "mask": (None, "full"),
    "segments": (None, 2),
    "q_offset": (None, 3),
    "lengths": ({}, {"q_lengths": (2, 5)}, {"kv_lengths": (0, 9)}),
}
LENGTHS = ({}, {"q_lengths": (2, 1)}, {"kv_lengths": (0, 4)})
PACKED = SHARED | {"offsets": ({}, {"cu_seqlens_kv": (0, 4, 9)}), "lengths": LENGTHS}
DIFFERENTIABLE = ("q", "k", "v", "softmax_scale", "softcap", "sinks", "bias")


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """What a program holds of a kernel is its name."""

    def named(config: Any) -> Cubin:
        key, sizes = f"{abs(hash(config)):064x}", {"smem_bytes": config.smem_bytes, "threads": config.threads}
        names = {"key": key, "recipe": key, "entry": config.name, "arch": config.arch, "config": repr(config)}
        return Cubin(**names, **sizes, dsl_version="", params=(), image=b"", ptx_zlib=b"")

    monkeypatch.setattr(cuda.cubins, "get", named)
    monkeypatch.setattr(cuda.cubins, "check_params", lambda cubin, launch: None)
    monkeypatch.setattr(cuda.cubins, "register", lambda cubin: None)


def name(row: dict[str, Any]) -> str:
    return "-".join(f"{factor}={value}" for factor, value in row.items() if value)


def lowered(call, x: dict[str, Any], mapped: bool) -> str:
    """The program that gives all gradients of a call, for each entry if q is `mapped`."""
    wrt = {name: jnp.asarray(x[name]) for name in DIFFERENTIABLE if x.get(name) is not None}
    rest = {name: value for name, value in x.items() if name not in wrt}

    def gradients(wrt):
        return jax.grad(lambda wrt: sum(a.sum().astype(jnp.float32) for a in call(**wrt, **rest, return_lse=True)))(wrt)

    if mapped:
        axes = {name: 0 if name == "q" else None for name in wrt}
        gradients, wrt = jax.vmap(gradients, (axes,)), wrt | {"q": jnp.stack([wrt["q"]] * 2)}
    return jax.jit(gradients).trace(wrt).lower(lowering_platforms=("cuda",)).as_text()


def assert_kernels_alone(text: str) -> None:
    assert text.count(f"@{launcher.TARGET}(") == 2  # the forward and the backward
    assert "stablehlo.dot_general" not in text
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=name)
def test_gradients_of_attention(row):
    row = dict(row)
    (head_dim, head_dim_v), mapped, deterministic = (row.pop(key) for key in ("head_dims", "mapped", "deterministic"))
    bounds, lengths = row.pop("bounds"), row.pop("lengths")
    cell = Cell(batch=(2,), q=5, k=9, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v, **bounds, **lengths, **row)
    x = {"softmax_scale": np.float32(0.3), **testing.random(cell)}
    assert_kernels_alone(lowered(functools.partial(jax_fa4.attention, deterministic=deterministic), x, mapped))


@pytest.mark.parametrize("row", pairwise(PACKED), ids=name)
def test_gradients_of_packed_sequences(row):
    (head_dim, head_dim_v), heads = row["head_dims"], 2 * row["group"]
    shapes = {"q": (5, heads, head_dim), "k": (9, 2, head_dim), "v": (9, 2, head_dim_v), "sinks": (heads,)}
    x = {key: np.ones(shape, testing.np_dtype(row["dtype"])) for key, shape in shapes.items()}
    x["sinks"] = x["sinks"].astype(np.float32) if row["sinks"] else None
    integers = {"cu_seqlens_q": (0, 2, 5), **row["offsets"], **row["lengths"]}
    x |= {key: np.array(value, np.int32) for key, value in integers.items()}
    x |= {"softmax_scale": np.float32(0.3), "softcap": row["softcap"] and np.float32(row["softcap"]), **row["bounds"]}
    call = functools.partial(jax_fa4.attention_varlen, deterministic=row["deterministic"])
    assert_kernels_alone(lowered(call, x, row["mapped"]))
