"""Which kernel serves a spec, and everything about it that its compilation needs. Imports no compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jax_fa4.configs import decode, sm90, sm100
from jax_fa4.configs.backward import BackwardConfig, PostprocessConfig, PreprocessConfig
from jax_fa4.configs.config import KernelConfig
from jax_fa4.configs.decode import CombineConfig, DecodeConfig
from jax_fa4.configs.grouped import GroupedSm100Config
from jax_fa4.configs.params import KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.configs.schedule import SCHEDULE_FIELDS, ScheduleConfig
from jax_fa4.configs.scores import Config, ScoresConfig, score_configs
from jax_fa4.spec import AttentionSpec

__all__ = [
    "SCHEDULE_FIELDS",
    "BackwardConfig",
    "CombineConfig",
    "Config",
    "DecodeConfig",
    "GroupedSm100Config",
    "KernelConfig",
    "KernelParam",
    "MapParam",
    "PointerParam",
    "PostprocessConfig",
    "PreprocessConfig",
    "ScalarParam",
    "ScheduleConfig",
    "ScoresConfig",
    "all_configs",
    "backward_config",
    "backward_schedules",
    "decode_config",
    "forward_config",
    "query_schedule",
    "score_configs",
]

FORWARD: dict[str, Callable[..., KernelConfig | None]] = {
    "sm_90a": lambda spec, *, takes_over: sm90.forward(spec),
    "sm_100a": sm100.forward,
    "sm_103a": functools.partial(sm100.forward, arch="sm_103a"),
}
PACKED = ("sm_90a", "sm_100a", "sm_103a")  # whose kernels take packed sequences
GROUPED: dict[str, Callable[[AttentionSpec, int], GroupedSm100Config | None]] = {
    "sm_100a": functools.partial(sm100.grouped_forward, arch="sm_100a"),
    "sm_103a": functools.partial(sm100.grouped_forward, arch="sm_103a"),
}
DECODE: dict[str, Callable[[AttentionSpec, int], DecodeConfig | GroupedSm100Config | None]] = {
    "sm_90a": lambda spec, rows: decode.decode(spec),
    "sm_100a": functools.partial(sm100.decode, arch="sm_100a"),
    "sm_103a": functools.partial(sm100.decode, arch="sm_103a"),
}
BACKWARD = {"sm_90a": sm90.backward}
ALL: dict[str, Callable[[], tuple[Config, ...]]] = {
    "sm_90a": sm90.all_configs,
    "sm_100a": sm100.all_configs,
    "sm_103a": functools.partial(sm100.all_configs, "sm_103a"),
}


def forward_config(
    spec: AttentionSpec, arch: str, q_len: int | None = None, *, takes_over: bool = False
) -> KernelConfig | None:
    """The forward kernel for `spec` on `arch` ("sm_90a"), or None where there is none yet.

    Layout, determinism and implementation select nothing: one kernel serves all of them. Where `q_len` is known and
    short, a kernel may be better whose tiles hold the queries of all heads of a group. `takes_over`: CTAs take over
    tiles of those that have not started, where the kernel can.
    """
    if arch not in FORWARD or _is_elsewhere(spec) or (spec.mask.has_cu_seqlens and arch not in PACKED):
        return None
    grouped = GROUPED[arch](spec, q_len) if q_len is not None and arch in GROUPED else None
    return grouped or FORWARD[arch](spec, takes_over=takes_over)


def decode_config(spec: AttentionSpec, arch: str, rows: int = 1) -> DecodeConfig | GroupedSm100Config | None:
    """The kernels for few queries of `spec` on `arch`, or None where there are none; layout selects nothing.

    `rows`: about how many a kv head has, queries times heads of its group. Keys in pages have no other kernels;
    `decode.prefers_decode` says when other calls are better off with them.
    """
    return DECODE[arch](spec, rows) if arch in DECODE else None


def query_schedule(spec: AttentionSpec, config: KernelConfig | DecodeConfig) -> ScheduleConfig | None:
    """The kernel that lists the tiles for the forward kernel of a spec with packed sequences; None: it has none."""
    if not config.has_cu_seqlens:
        return None
    if isinstance(config, DecodeConfig):
        return ScheduleConfig.of_pages(config, spec.mask, tile_m=config.tile_rows // spec.group)
    return ScheduleConfig.of(config, spec.mask, side="q", order="tiles", row_step=config.row_step)


def backward_schedules(spec: AttentionSpec, config: BackwardConfig) -> tuple[ScheduleConfig, ...]:
    """What lists places of queries, then tiles of keys, for the kernels of a backward with packed sequences, or none.

    Tiles of a sequence's keys follow each other, so that they may wait for earlier ones.
    """
    if not config.has_cu_seqlens:
        return ()
    return (
        ScheduleConfig.of(config, spec.mask, side="q", order="slots"),
        ScheduleConfig.of(config, spec.mask, side="kv", order="sequences"),
    )


def backward_config(spec: AttentionSpec, arch: str) -> BackwardConfig | None:
    """The kernels of the backward of `spec` on `arch`, or None where there are none yet.

    Layout, group, sinks and implementation select nothing.
    """
    if arch not in BACKWARD or _is_elsewhere(spec):
        return None
    return BACKWARD[arch](spec)


def _is_elsewhere(spec: AttentionSpec) -> bool:
    return spec.has_batched_scalars or spec.page_size is not None


def all_configs(arch: str) -> tuple[Config, ...]:
    """Every kernel for `arch`, one of ALL, in a fixed order: what a prebuilt set consists of."""
    return ALL[arch]()
