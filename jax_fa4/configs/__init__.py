"""Which kernel serves a spec, and everything about it that its compilation needs. Imports no compiler."""

from __future__ import annotations

from jax_fa4.configs import sm90
from jax_fa4.configs.config import KernelConfig
from jax_fa4.configs.params import KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.spec import AttentionSpec

__all__ = ["KernelConfig", "KernelParam", "MapParam", "PointerParam", "ScalarParam", "all_configs", "forward_config"]

TABLES = {"sm_90a": sm90.forward}
ALL = {"sm_90a": sm90.all_configs}


def forward_config(spec: AttentionSpec, arch: str) -> KernelConfig | None:
    """The forward kernel for `spec` on `arch` ("sm_90a"), or None where there is none yet.

    Layout, group, determinism and implementation select nothing: one kernel serves all of them.
    """
    elsewhere = spec.has_batched_scalars or spec.mask.has_cu_seqlens or spec.page_size is not None
    return None if elsewhere or arch not in TABLES else TABLES[arch](spec)


def all_configs(arch: str) -> tuple[KernelConfig, ...]:
    """Every kernel for `arch`, one of TABLES, in a fixed order: what a prebuilt set consists of."""
    return ALL[arch]()
