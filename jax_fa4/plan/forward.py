"""The forward's launch plan: one kernel, its parameters bound to the call's buffers."""

from __future__ import annotations

from jax_fa4.configs import KernelConfig
from jax_fa4.plan.bind import Buffers, Kernel, scalars_of
from jax_fa4.plan.plan import Plan
from jax_fa4.spec import Layout

__all__ = ["RESULTS", "forward", "operand_names"]

RESULTS = ("out", "lse")


def operand_names(config: KernelConfig) -> tuple[str, ...]:
    """The call's operands in order."""
    return ("q", "k", "v", *scalars_of(config))


def forward(config: KernelConfig, kernel: Kernel, layout: Layout) -> Plan:
    """The plan of a forward call whose q, k, v and out lie in memory as `layout` says."""
    buffers = Buffers(operand_names(config), RESULTS, config, layout)
    return Plan(
        arch=config.arch,
        operands=buffers.operands,
        results=buffers.results,
        launches=(buffers.launch(config, kernel, buffers.query_tiles()),),
    )
