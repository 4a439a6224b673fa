"""vmap: one more leading batch axis for every operand, never a reshape, so that a sharded batch stays sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.interpreters import batching

from jax_fa4.spec import AttentionSpec

__all__ = ["batched_spec", "lead"]

ARRAYS = frozenset(
    {"qkv", "q", "k", "v", "out", "lse"}
)  # always have all batch axes; other operands may have 1 in their place
SCALARS = frozenset({"softmax_scale", "softcap", "window_left", "window_right"})


def lead(
    axis_data: Any,
    names: Sequence[str],
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    full: Iterable[str] = (),
) -> list[jax.Array]:
    """`args` with the mapped axis in front; those named in `full` get its size even where they are not mapped."""
    num_batch_axes = args[0].ndim - (dims[0] is not None) - (4 if names[0] == "qkv" else 3)
    whole = ARRAYS.union(full)

    def move(name: str, a: jax.Array, dim: int | None) -> jax.Array:
        if dim is None and name not in whole:
            return jax.lax.expand_dims(a, [0]) if a.ndim else a
        a = batching.bdim_at_front(a, dim, axis_data.size, axis_data.explicit_mesh_axis)
        is_vector = a.ndim == 1  # a scalar per mapped entry: the other batch axes have size 1
        return jax.lax.expand_dims(a, range(1, 1 + num_batch_axes)) if is_vector else a

    return [move(*each) for each in zip(names, args, dims, strict=True)]


def batched_spec(spec: AttentionSpec, fields: Sequence[str], dims: Sequence[int | None]) -> AttentionSpec:
    """The spec of operands once those with a dim are mapped; a scalar that is repeated still has one value."""
    maps_scalars = any(dim is not None for name, dim in zip(fields, dims, strict=False) if name in SCALARS)
    return dataclasses.replace(spec, has_batched_scalars=spec.has_batched_scalars or maps_scalars)
