"""The custom call: one primitive that runs a launch plan on buffers in logical order [*batch, kv_heads, ...].

XLA's batch partitioner gives all operands and results one sharding of their leading axes, so kv heads follow the batch
in every buffer that has axes at all. Memory keeps the user's layout: the call's layouts undo the transposition, which
XLA then compiles to bitcasts. Attributes hold no sizes, so a shard of the call is the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fa4 import launcher
from jax_fa4.plan.axes import Axes

__all__ = ["Result", "launch"]


class Result(NamedTuple):
    """One result of the call."""

    axes: Axes
    shape: tuple[int, ...]  # of the logical axes, batch included
    dtype: str


def launch(
    operands: Sequence[jax.Array],
    axes: Sequence[Axes],
    results: Sequence[Result],
    *,
    plan: bytes,
    images: bytes | None = None,
) -> list[jax.Array]:
    """Runs `plan` on operands in logical order; `images` embeds the cubins of an exported program."""
    num_batch_axes = operands[0].ndim - len(axes[0].logical)
    return launch_p.bind(
        *operands, axes=tuple(axes), results=tuple(results), num_batch_axes=num_batch_axes, plan=plan, images=images
    )


def _shape_rule(*avals, axes, results, num_batch_axes, plan, images):
    return [jax.core.ShapedArray(r.shape, jax.numpy.dtype(r.dtype)) for r in results]


def _cuda_lowering(ctx, *args, axes, results, num_batch_axes, plan, images):
    launcher.require()
    layouts = [a.layout(num_batch_axes) for a in (*axes, *(r.axes for r in results))]
    frontend = {"num_batch_dims": str(num_batch_axes + 1)}
    attributes = {"plan": plan} | ({} if images is None else {"images": images})
    lower = jax.ffi.build_ffi_lowering_function(
        launcher.TARGET,
        operand_layouts=layouts[: len(axes)],
        result_layouts=layouts[len(axes) :],
        extra_attributes={"mhlo.frontend_attributes": mlir.ir_attribute(frontend)},
    )
    op = lower(ctx, *args, **attributes)
    shapes = [a.shape for a in (*ctx.avals_in, *ctx.avals_out)]
    if all(
        isinstance(n, int) for shape in shapes for n in shape
    ):  # symbolic shapes bring operands that a rule can't name
        factors = [_factors(a, num_batch_axes) for a in (*axes, *(r.axes for r in results))]
        op.attributes["sdy.sharding_rule"] = _sharding_rule(factors, shapes, len(axes), num_batch_axes)
    return op.results


def _factors(axes: Axes, num_batch_axes: int) -> tuple[str, ...]:
    batched = axes.logical and axes.batched
    return (*(f"batch{i}" for i in range(num_batch_axes)), *axes.logical) if batched else tuple(axes.logical)


def _sharding_rule(factors, shapes, num_operands, num_batch_axes):
    """Shardy's rule: batch axes and kv heads may be sharded, everything else is replicated."""
    size = {f: n for names, shape in zip(factors, shapes, strict=True) for f, n in zip(names, shape, strict=True)}
    symbol = dict(zip(size, "ijklmnopqrstuvwxyz", strict=False))

    def side(terms):
        return ", ".join("[" + ", ".join(symbol[f] for f in names) + "]" for names in terms)

    shardable = factors[0][: num_batch_axes + 1]
    sizes = ", ".join(f"{symbol[f]}={n}" for f, n in size.items())
    fixed = ", ".join(symbol[f] for f in size if f not in shardable)
    return mlir.ir.Attribute.parse(
        f"#sdy.op_sharding_rule<({side(factors[:num_operands])})->({side(factors[num_operands:])})"
        f" {{{sizes}}} need_replication={{{fixed}}}, custom>"
    )


launch_p = Primitive("jax_fa4_launch")
launch_p.multiple_results = True
launch_p.def_abstract_eval(_shape_rule)
mlir.register_lowering(launch_p, _cuda_lowering, platform="cuda")
