"""On a GPU every gradient of what a kernel computes comes from kernels, over all pairs of features."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import launcher, testing
from jax_fa4.testing import Cell

from ..pairwise import pairwise
from . import h200

pytestmark = [
    pytest.mark.skipif(not launcher.register(), reason="needs the FFI library, which this installation lacks"),
    pytest.mark.usefixtures("no_compiler"),
]
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


FUSED = {name: FACTORS[name] for name in ("dtype", "bounds", "softcap", "sinks", "deterministic", "mapped")}
FUSED |= {"head_dim": (64, 96, 192, 256), "kv_lengths": (None, (0, 5))}


@pytest.mark.parametrize("row", pairwise(FUSED), ids=name)
def test_gradients_of_a_fused_array(row):
    x = {"q": np.ones((2, 5, 3, 4, row["head_dim"]), testing.np_dtype(row["dtype"])), **row["bounds"]}
    x |= {"sinks": np.zeros(4, np.float32)} if row["sinks"] else {}
    x |= {"kv_lengths": np.array(row["kv_lengths"], np.int32)} if row["kv_lengths"] else {}
    x |= {"softmax_scale": np.float32(0.3), "softcap": row["softcap"] and np.float32(row["softcap"])}

    def call(q, **options):
        return jax_fa4.attention_qkv(q, deterministic=row["deterministic"], **options)

    assert_kernels_alone(lowered(call, x, row["mapped"]))


@pytest.mark.skipif(h200.why_absent() is not None, reason=str(h200.why_absent()))
@pytest.mark.parametrize(
    "features",
    [
        {"bias": "full", "causal": True},
        {"segments": 2, "sinks": True, "head_dim": 128},
        {"mask": "full", "softcap": 2.5},
    ],
    ids=name,
)
def test_gradients_of_sharded_batch_and_heads(features):
    x = testing.random(Cell(**{"q": 5, "k": 9, "head_dim": 64, "group": 3, "dtype": "bfloat16", **features}))
    options = {key: x.pop(key) for key in ("causal", "softcap") if key in x}
    heads = P("d", None, "m")
    specs = {"q": heads, "k": heads, "v": heads, "bias": P("d", "m"), "mask": P("d", "m"), "sinks": P("m")}
    specs |= dict.fromkeys(("q_segment_ids", "kv_segment_ids"), P("d"))
    mesh = h200.mesh((2, 2), ("d", "m"))
    x = {key: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, specs[key])) for key, a in x.items()}
    wrt = {key: x.pop(key) for key in DIFFERENTIABLE if key in x}

    def gradients(wrt, rest):
        return jax.grad(lambda wrt: jax_fa4.attention(**wrt, **rest, **options).sum().astype(jnp.float32))(wrt)

    hlo = jax.jit(gradients).lower(wrt, x).compile().as_text()
    assert hlo.count(f'custom_call_target="{launcher.TARGET}"') == 2
    assert not re.search(r" (dot|while|all-gather|all-to-all|collective-permute)\(", hlo)
