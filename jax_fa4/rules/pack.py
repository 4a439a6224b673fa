"""Operands as a flat list of arrays and their names, which is what a primitive takes.

Of a fused array [*B, T, 3, N, D] a primitive takes the array alone, and has its gradient; q, k and v are slices of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_fa4.operands import Operands

__all__ = ["DIFFERENTIABLE", "always_linear", "fuse", "pack", "slices", "split", "unpack"]

SLICES = ("q", "k", "v")
DIFFERENTIABLE = ("qkv", *SLICES, "softmax_scale", "softcap", "sinks", "bias")


def pack(x: Operands) -> tuple[tuple[str, ...], list[jax.Array]]:
    """Names and arrays of the present operands; an absent one never reaches XLA."""
    present = {name: a for name, a in zip(x._fields, x, strict=True) if a is not None}
    if "qkv" in present:
        present = {"qkv": present.pop("qkv"), **{name: a for name, a in present.items() if name not in SLICES}}
    return tuple(present), list(present.values())


def unpack(fields: Sequence[str], arrays: Sequence[Any]) -> Operands:
    """Undoes `pack`; takes the first of `arrays`, one a field, which may also be their types."""
    named = dict(zip(fields, arrays, strict=False))
    return Operands(**split(named), qkv=named.get("qkv"))


def always_linear(fields: Sequence[str]) -> tuple[str, ...]:
    """What every backward differentiates: a kernel makes the gradients of queries, keys and values in one go."""
    return ("qkv",) if "qkv" in fields else SLICES


def slices(names: Sequence[str]) -> tuple[str, ...]:
    """`names` with those of the slices in place of a fused array's."""
    return tuple(each for name in names for each in (SLICES if name == "qkv" else (name,)))


def split(named: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by name, with slices in place of a fused one."""
    rest = {name: a for name, a in named.items() if name != "qkv"}
    return {**dict(zip(SLICES, _slices_of(named["qkv"]), strict=True)), **rest} if "qkv" in named else rest


def fuse(named: Mapping[str, jax.Array], names: Sequence[str]) -> list[jax.Array]:
    """Undoes `split`: the arrays of `names`."""
    return [jnp.stack([named[each] for each in SLICES], axis=-3) if name == "qkv" else named[name] for name in names]


def _slices_of(qkv: Any) -> list[Any]:
    if not isinstance(qkv, jax.core.ShapedArray):
        return [qkv[..., i, :, :] for i in range(len(SLICES))]
    axes = tuple(qkv.sharding.spec)
    axes += (None,) * (qkv.ndim - len(axes))
    sharding = qkv.sharding.update(spec=P(*axes[:-3], *axes[-2:]))
    return [qkv.update(shape=(*qkv.shape[:-3], *qkv.shape[-2:]), sharding=sharding)] * len(SLICES)
