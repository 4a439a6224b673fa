"""The backward's launch plan: three kernels in one call, with scratch that is a result of the call like the gradients.

preprocess    out, dout, lse, dlse                       -> lse_log2, delta; zeros -> dq_sum
main          q, k, v, dout, lse_log2, delta             -> dk, dv; added to dq_sum
postprocess   dq_sum                                     -> dq
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_fa4.configs import BackwardConfig, PointerParam
from jax_fa4.plan.axes import Axes
from jax_fa4.plan.bind import Buffers, Kernel
from jax_fa4.plan.plan import Plan
from jax_fa4.spec import Layout

__all__ = ["backward", "operand_names", "result_names"]

SCRATCH = ("dq_sum", "dq_tiles", "lse_log2", "delta", "dq_turn")


def operand_names(config: BackwardConfig, *, is_fused: bool = False) -> tuple[str, ...]:
    """The call's operands in order; q, k and v are one if fused."""
    arrays = ("qkv",) if is_fused else ("q", "k", "v")
    pointers = (param.name for param in config.params if isinstance(param, PointerParam))
    return (*arrays, "out", "lse", "dout", "dlse", *(name for name in pointers if name not in SCRATCH))


def result_names(config: BackwardConfig, *, is_fused: bool = False) -> tuple[str, ...]:
    """The call's results in order: gradients, then scratch."""
    used = {param.name for param in config.params}
    return (*(("dqkv",) if is_fused else ("dq", "dk", "dv")), *(name for name in SCRATCH if name in used))


def backward(
    config: BackwardConfig,
    kernels: Sequence[Kernel],
    layout: Layout,
    dense: Mapping[str, Axes] | None = None,
    *,
    is_fused: bool = False,
) -> Plan:
    """The plan of a backward call; `kernels`: of `config.kernels`.

    Queries, keys, values and their gradients lie in memory as `layout` says, mask and bias as `dense` does.
    """
    operands, results = operand_names(config, is_fused=is_fused), result_names(config, is_fused=is_fused)
    buffers = Buffers(operands, results, config, layout, dense)
    return Plan(
        arch=config.arch,
        operands=buffers.operands,
        results=buffers.results,
        launches=(
            buffers.launch(config.preprocess, kernels[0], buffers.query_tiles()),
            buffers.launch(config, kernels[1], buffers.key_tiles()),
            buffers.launch(config.postprocess, kernels[2], buffers.query_tiles()),
        ),
    )
