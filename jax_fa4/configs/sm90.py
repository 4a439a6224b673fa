"""Hopper's tiles, one row a line: what was chosen for a head dim, and the evidence."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jax_fa4.configs.backward import BackwardConfig, Config
from jax_fa4.configs.config import KernelConfig
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = ["BACKWARD", "FORWARD", "all_configs", "backward", "forward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Choices for one pair of head dims."""

    tile_m: int
    tile_n: int
    kv_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardRow:
    """Choices for one pair of head dims. A tile has 128 x 64 elements of dq: a slab for each of two warpgroups."""

    tile_m: int
    tile_n: int
    q_stages: int
    dout_stages: int
    ds_stages: int


DTYPES = ("bfloat16", "float16")
FORWARD = {  # (head_dim, head_dim_v)
    (64, 64): Row(tile_m=192, tile_n=128, kv_stages=2),
    (128, 128): Row(tile_m=128, tile_n=128, kv_stages=2),
}
BACKWARD = {  # (head_dim, head_dim_v)
    (64, 64): BackwardRow(tile_m=128, tile_n=128, q_stages=2, dout_stages=2, ds_stages=2),
    (128, 128): BackwardRow(tile_m=64, tile_n=128, q_stages=2, dout_stages=2, ds_stages=2),
}


def forward(spec: AttentionSpec) -> KernelConfig | None:
    """The forward kernel of a spec that has nothing but a window, or None where the table has no row for it."""
    row = FORWARD.get((spec.head_dim, spec.head_dim_v))
    if row is None or spec.dtype not in DTYPES:
        return None
    return KernelConfig(kernel="forward", **_selected(spec), **dataclasses.asdict(row))


def backward(spec: AttentionSpec) -> BackwardConfig | None:
    """The backward kernels of a spec that has nothing but a window, or None where the table has no row for it."""
    row = BACKWARD.get((spec.head_dim, spec.head_dim_v))
    if row is None or spec.dtype not in DTYPES:
        return None
    return BackwardConfig(**_selected(spec), **dataclasses.asdict(row))


def _selected(spec: AttentionSpec) -> dict[str, Any]:
    """What a kernel takes over from its spec."""
    return {
        "arch": "sm_90a",
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "has_left": spec.mask.has_left,
        "has_right": spec.mask.has_right,
    }


def all_configs() -> tuple[Config, ...]:
    """Every kernel that `forward` and `backward` can give, each once."""
    sides = (False, True)
    specs = [
        AttentionSpec(
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            group=1,
            mask=MaskSpec(has_left=has_left, has_right=has_right),
        )
        for (head_dim, head_dim_v), dtype, has_left, has_right in itertools.product(
            FORWARD | BACKWARD, DTYPES, sides, sides
        )
    ]
    forwards = [config for spec in specs if (config := forward(spec))]
    backwards = [kernel for spec in specs if (config := backward(spec)) for kernel in config.kernels]
    return tuple(dict.fromkeys([*forwards, *backwards]))
