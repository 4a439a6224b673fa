"""Types of operands and results under explicit meshes and inside `shard_map`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_fa4.operands import Operands
from jax_fa4.spec import AttentionSpec

__all__ = ["automatic", "check_varying", "clean", "lse_aval", "out_aval", "promote", "spread_kv_heads"]


def promote(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes all arrays vary over the union of their manual axes.

    Done outside the primitives, so that transposition sums the cotangent of an array that was replicated.
    """
    varying = [jax.typeof(a).mat.varying for a in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(union - own), to="varying") if union - own else a
        for a, own in zip(arrays, varying, strict=True)
    ]


def check_varying(avals: Sequence[Any]) -> None:
    """Raises TypeError unless all operands vary over the same manual axes."""
    varying = {aval.mat.varying for aval in avals}
    if len(varying) > 1:
        raise TypeError(f"operands must vary over the same mesh axes, got {sorted(map(sorted, varying))}")


def out_aval(q: Any, v: Any) -> Any:
    """[*B, T, N, E] in q's dtype, sharded as q is."""
    return q.update(
        shape=(*q.shape[:-1], v.shape[-1]),
        weak_type=False,
        sharding=q.sharding.update(spec=P(*_axes(q)[:-1], None)),
    )


def lse_aval(q: Any) -> Any:
    """[*B, N, T] in accumulator precision, sharded as q is."""
    *batch, seq, heads, _ = _axes(q)
    return q.update(
        shape=(*q.shape[:-3], q.shape[-2], q.shape[-3]),
        dtype=jnp.dtype("float64" if q.dtype == jnp.float64 else "float32"),
        weak_type=False,
        sharding=q.sharding.update(spec=P(*batch, heads, seq)),
    )


def clean(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of plain JAX code, traced without shardings and manual axes: XLA partitions what it lowers to."""

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        def plain(avals: Sequence[Any]) -> list[Any]:
            return [jax.core.ShapedArray(a.shape, a.dtype) for a in avals]

        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return rule(ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out)), *args, **params)

    return lower


def automatic(function: Callable[..., Any], results: Sequence[jax.Array]) -> Callable[..., Any]:
    """Plain JAX code whose explicit mesh axes are automatic while it is traced; it returns arrays like `results`."""
    if jax.sharding.AxisType.Explicit not in jax.typeof(results[0]).sharding.mesh.axis_types:
        return function
    return jax.sharding.auto_axes(function, out_sharding=tuple(jax.typeof(r).sharding.spec for r in results))


def spread_kv_heads(x: Operands, spec: AttentionSpec) -> tuple[Operands, AttentionSpec]:
    """Repeats kv heads until they divide over the mesh axes that shard the query heads; no copy where they do already.

    Known only under an explicit mesh: with automatic axes the caller repeats them, or XLA gathers the queries.
    """
    heads = _axes(jax.typeof(x.q))[-2]
    mesh = jax.typeof(x.q).sharding.mesh
    if heads is None or mesh.empty:
        return x, spec
    ways = math.prod(mesh.shape[name] for name in (heads if isinstance(heads, tuple) else (heads,)))
    repeats = ways // math.gcd(ways, x.k.shape[-2])
    if repeats == 1:
        return x, spec

    def spread(a: jax.Array) -> jax.Array:
        *rest, _, dim = _axes(jax.typeof(a))
        whole = jax.sharding.reshard(a, P(*rest, None, dim))
        return jax.sharding.reshard(jnp.repeat(whole, repeats, axis=-2), P(*rest, heads, dim))

    return x._replace(k=spread(x.k), v=spread(x.v)), dataclasses.replace(spec, group=spec.group // repeats)


def _axes(aval: Any) -> tuple[Any, ...]:
    """The mesh axes of every dimension; None where it is not sharded, or only automatically."""
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))
