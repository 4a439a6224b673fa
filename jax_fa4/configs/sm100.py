"""Blackwell's forward, one row a line: registers by role, and the share of exponentials that are emulated.

No such GPU was at hand: the rows are those of the published kernel, its tuning is not repeated here.
"""

from __future__ import annotations

import dataclasses
import itertools

from jax_fa4.configs.blackwell import Q_TILES, TILE_N, TILE_ROWS, ForwardSm100Config, kv_stages_that_fit
from jax_fa4.configs.config import MMA_COLUMNS
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = ["FORWARD", "all_configs", "forward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Choices for head dims up to one."""

    registers: tuple[int, int, int]  # of a thread: softmax, correction, others
    exp2_period: int
    exp2_first: int


DTYPES = ("bfloat16", "float16")
BIASES = (None, "float32", "bfloat16", "float16")
FORWARD = {  # architecture, up to (head_dim, head_dim_v); the first row that fits
    ("sm_100a", 88, 88): Row(registers=(200, 64, 48), exp2_period=16, exp2_first=1),
    ("sm_100a", 128, 128): Row(registers=(192, 80, 48), exp2_period=16, exp2_first=1),
    ("sm_100a", 192, 128): Row(registers=(184, 80, 64), exp2_period=16, exp2_first=0),
    # its special-function units are twice as fast
    ("sm_103a", 192, 128): Row(registers=(176, 80, 80), exp2_period=0, exp2_first=0),
}
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))


def forward(spec: AttentionSpec, arch: str = "sm_100a") -> ForwardSm100Config | None:
    """The forward kernel of a spec, or None where there is none."""
    rows = (
        row
        for (row_arch, d, e), row in FORWARD.items()
        if row_arch == arch and spec.head_dim <= d and spec.head_dim_v <= e
    )
    row = next(rows, None)
    mask = spec.mask
    elsewhere = spec.has_batched_scalars or mask.has_cu_seqlens or spec.page_size is not None
    if row is None or elsewhere or spec.dtype not in DTYPES or spec.bias_dtype not in BIASES:
        return None
    padded = (-(-d // MMA_COLUMNS) * MMA_COLUMNS for d in (spec.head_dim, spec.head_dim_v))
    return ForwardSm100Config(
        arch=arch,
        kernel="forward",
        dtype=spec.dtype,  # type: ignore[arg-type]
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        tile_m=Q_TILES * TILE_ROWS,
        tile_n=TILE_N,
        kv_stages=kv_stages_that_fit(*padded),
        has_left=mask.has_left,
        has_right=mask.has_right,
        has_q_offset=mask.has_q_offset and (mask.has_left or mask.has_right),  # else there is nothing to shift
        has_q_lengths=mask.has_q_lengths,
        has_kv_lengths=mask.has_kv_lengths,
        has_segments=mask.has_segments,
        has_mask=mask.has_dense,
        has_softcap=spec.has_softcap,
        has_sinks=spec.has_sinks,
        bias=spec.bias_dtype,  # type: ignore[arg-type]
        softmax_registers=row.registers[0],
        correction_registers=row.registers[1],
        other_registers=row.registers[2],
        exp2_period=row.exp2_period,
        exp2_first=row.exp2_first,
    )


def all_configs(arch: str = "sm_100a") -> tuple[ForwardSm100Config, ...]:
    """What calls mostly ask for; `forward` gives others, compiled when they are first needed."""
    sides = (False, True)
    specs = (
        AttentionSpec(
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            group=1,
            mask=MaskSpec(has_left=has_left, has_right=has_right),
        )
        for (head_dim, head_dim_v), dtype, has_left, has_right in itertools.product(HEAD_DIMS, DTYPES, sides, sides)
    )
    return tuple(config for spec in specs if (config := forward(spec, arch)))
