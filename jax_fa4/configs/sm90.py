"""Hopper's tiles, one row a line: what was chosen for a head dim, and the evidence."""

from __future__ import annotations

import dataclasses
import itertools

from jax_fa4.configs.config import KernelConfig
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = ["FORWARD", "all_configs", "forward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Choices for one pair of head dims."""

    tile_m: int
    tile_n: int
    kv_stages: int


DTYPES = ("bfloat16", "float16")
FORWARD = {  # (head_dim, head_dim_v)
    (64, 64): Row(tile_m=192, tile_n=128, kv_stages=2),
    (128, 128): Row(tile_m=128, tile_n=128, kv_stages=2),
}


def forward(spec: AttentionSpec) -> KernelConfig | None:
    """The forward kernel of a spec that has nothing but a window, or None where the table has no row for it."""
    row = FORWARD.get((spec.head_dim, spec.head_dim_v))
    if row is None or spec.dtype not in DTYPES:
        return None
    return KernelConfig(
        arch="sm_90a",
        kernel="forward",
        dtype=spec.dtype,  # type: ignore[arg-type]
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        has_left=spec.mask.has_left,
        has_right=spec.mask.has_right,
        **dataclasses.asdict(row),
    )


def all_configs() -> tuple[KernelConfig, ...]:
    """Every kernel that `forward` can give."""
    sides = (False, True)
    specs = (
        AttentionSpec(
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            group=1,
            mask=MaskSpec(has_left=has_left, has_right=has_right),
        )
        for (head_dim, head_dim_v), dtype, has_left, has_right in itertools.product(FORWARD, DTYPES, sides, sides)
    )
    return tuple(config for spec in specs if (config := forward(spec)))
