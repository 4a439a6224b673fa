"""The forward's launch plan: one kernel, its parameters bound to the call's buffers."""

from __future__ import annotations

from collections.abc import Mapping

from jax_fa4.configs import KernelConfig, PointerParam
from jax_fa4.plan.axes import Axes
from jax_fa4.plan.bind import Buffers, Kernel
from jax_fa4.plan.plan import Plan
from jax_fa4.spec import Layout

__all__ = ["RESULTS", "forward", "operand_names"]

ARRAYS = ("q", "k", "v")
RESULTS = ("out", "lse")


def operand_names(config: KernelConfig, *, is_fused: bool = False) -> tuple[str, ...]:
    """The call's operands in order; q, k and v are one if fused."""
    arrays = ("qkv",) if is_fused else ARRAYS
    pointers = (param.name for param in config.params if isinstance(param, PointerParam))
    return (*arrays, *(name for name in pointers if name not in (*ARRAYS, *RESULTS)))


def forward(
    config: KernelConfig,
    kernel: Kernel,
    layout: Layout,
    dense: Mapping[str, Axes] | None = None,
    *,
    is_fused: bool = False,
) -> Plan:
    """The plan of a forward call; q, k, v and out lie in memory as `layout` says, mask and bias as `dense` does."""
    buffers = Buffers(operand_names(config, is_fused=is_fused), RESULTS, config, layout, dense)
    return Plan(
        arch=config.arch,
        operands=buffers.operands,
        results=buffers.results,
        launches=(buffers.launch(config, kernel, buffers.query_ctas(config)),),
    )
