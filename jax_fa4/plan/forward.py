"""The forward's launch plan: its kernel, behind one that lists the tiles where sequences are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_fa4.configs import KernelConfig, PointerParam, ScheduleConfig
from jax_fa4.plan.axes import Axes
from jax_fa4.plan.bind import Buffers, Kernel
from jax_fa4.plan.plan import Plan
from jax_fa4.spec import Layout

__all__ = ["forward", "operand_names", "result_names"]

ARRAYS = ("q", "k", "v")
RESULTS = ("out", "lse")
SCRATCH = ("q_schedule",)


def operand_names(
    config: KernelConfig, schedule: ScheduleConfig | None = None, *, is_fused: bool = False
) -> tuple[str, ...]:
    """The call's operands in order; q, k and v are one if fused."""
    arrays = ("qkv",) if is_fused else ARRAYS
    params = (*config.params, *(() if schedule is None else schedule.params))
    pointers = dict.fromkeys(param.name for param in params if isinstance(param, PointerParam))
    return (*arrays, *(name for name in pointers if name not in (*ARRAYS, *RESULTS, *SCRATCH)))


def result_names(config: KernelConfig) -> tuple[str, ...]:
    """The call's results in order: out and lse, then scratch."""
    return (*RESULTS, *(SCRATCH if config.has_cu_seqlens else ()))


def forward(
    config: KernelConfig,
    kernels: Sequence[Kernel],
    layout: Layout,
    others: Mapping[str, Axes] | None = None,
    schedule: ScheduleConfig | None = None,
    *,
    is_fused: bool = False,
) -> Plan:
    """The plan of a forward call; `kernels`: of `schedule`, if there is one, and of `config`.

    q, k, v and out lie in memory as `layout` says, others as `others` does: a mask, a bias, offsets and lengths.
    """
    operands = operand_names(config, schedule, is_fused=is_fused)
    buffers = Buffers(operands, result_names(config), config, layout, others)
    *_, main = kernels
    waits = schedule is not None and config.waits_for_schedule
    first = () if schedule is None else (buffers.launch(schedule, kernels[0], buffers.one_cta()),)
    return Plan(
        arch=config.arch,
        operands=buffers.operands,
        results=buffers.results,
        launches=(*first, buffers.launch(config, main, buffers.query_ctas(config), programmatic=waits)),
    )
