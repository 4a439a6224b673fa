"""The backward's launch plan: some kernels in one call, with scratch that is a result of the call like the gradients.

schedules     offsets, lengths                           -> q_schedule, kv_schedule; only of packed sequences
preprocess    out, dout, lse, dlse                       -> lse_log2, delta; zeros -> dq_sum or dq_turn, dq_done
main          q, k, v, dout, lse_log2, delta             -> dk, dv; stored in dq_sum or added to it; counted in dq_done
postprocess   dq_sum                                     -> dq
              dk_sum, dv_sum                             -> dk, dv; only if CTAs share the query heads of a kv head
scores        q, k, v, dout, lse_log2, delta             -> dbias, dbias_rows or dsoftcap_parts; only if asked for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_fa4.configs import BackwardConfig, Config, PointerParam, ScheduleConfig, ScoresConfig
from jax_fa4.plan.axes import Axes
from jax_fa4.plan.bind import Buffers, Kernel
from jax_fa4.plan.plan import Plan
from jax_fa4.spec import Layout

__all__ = ["backward", "operand_names", "result_names"]

GRADIENTS = ("dq", "dk", "dv")
OF_SCORES = ("dbias", "dbias_rows", "dsoftcap_parts")
SCRATCH = ("dq_sum", "lse_log2", "delta", "dq_turn", "dq_done", "q_schedule", "kv_schedule", "dk_sum", "dv_sum")


def operand_names(
    config: BackwardConfig,
    schedules: Sequence[ScheduleConfig] = (),
    scores: Sequence[ScoresConfig] = (),
    *,
    is_fused: bool = False,
) -> tuple[str, ...]:
    """The call's operands in order; q, k and v are one if fused."""
    arrays = ("qkv",) if is_fused else ("q", "k", "v")
    others: tuple[Config, ...] = (*scores, *schedules)
    params = (*config.params, *(param for each in others for param in each.params))
    pointers = dict.fromkeys(param.name for param in params if isinstance(param, PointerParam))
    read = (name for name in pointers if name not in (*SCRATCH, *GRADIENTS, *OF_SCORES))
    return (*arrays, "out", "lse", "dout", "dlse", *read)


def result_names(
    config: BackwardConfig, scores: Sequence[ScoresConfig] = (), *, is_fused: bool = False
) -> tuple[str, ...]:
    """The call's results in order: gradients, then scratch."""
    used = {param.name for param in (*config.preprocess.params, *config.params)}
    arrays = ("dqkv",) if is_fused else GRADIENTS
    return (*arrays, *(each.result.name for each in scores), *(name for name in SCRATCH if name in used))


def backward(
    config: BackwardConfig,
    kernels: Sequence[Kernel],
    layout: Layout,
    others: Mapping[str, Axes] | None = None,
    schedules: Sequence[ScheduleConfig] = (),
    scores: Sequence[ScoresConfig] = (),
    *,
    is_fused: bool = False,
) -> Plan:
    """The plan of a backward call; `kernels`: of `schedules`, then of `config.kernels`, then of `scores`.

    Queries, keys, values and their gradients lie in memory as `layout` says, others as `others` does: a mask, a bias,
    offsets and lengths.
    """
    operands = operand_names(config, schedules, scores, is_fused=is_fused)
    results = result_names(config, scores, is_fused=is_fused)
    buffers = Buffers(operands, results, config, layout, others)
    is_packed = config.has_cu_seqlens
    configs: tuple[Config, ...] = (*schedules, *config.kernels, *scores)
    queries = buffers.query_slots() if is_packed else buffers.query_tiles()
    grids = (
        *(buffers.one_cta() for _ in schedules),
        queries,
        buffers.listed_keys(config) if is_packed else buffers.backward_ctas(config),
        queries,
        *(buffers.key_tiles() for _ in config.key_postprocess),
        *(buffers.score_tiles(each) for each in scores),
    )
    # whether it waits itself for what kernels ahead of it write; ahead of the first are those of other calls
    waits = (
        *(i > 0 for i, _ in enumerate(schedules)),
        is_packed,
        not config.is_wide,
        *(True for _ in (config.postprocess, *config.key_postprocess)),
        *(False for _ in scores),
    )
    return Plan(
        arch=config.arch,
        operands=buffers.operands,
        results=buffers.results,
        launches=tuple(
            buffers.launch(each, kernel, grid, programmatic=programmatic)
            for each, kernel, grid, programmatic in zip(configs, kernels, grids, waits, strict=True)
        ),
    )
