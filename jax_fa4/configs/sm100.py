"""Blackwell's forward, one row a line: registers by role, and the share of exponentials that are emulated.

No such GPU was at hand: the rows are those of the published kernel, its tuning is not repeated here.
"""

from __future__ import annotations

import dataclasses
import itertools

from jax_fa4.configs.blackwell import Q_TILES, TILE_N, TILE_ROWS, ForwardSm100Config, kv_stages_that_fit
from jax_fa4.configs.config import MMA_COLUMNS
from jax_fa4.configs.decode import CombineConfig
from jax_fa4.configs.grouped import GroupedSm100Config
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = ["FORWARD", "all_configs", "decode", "forward", "grouped_forward"]


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
GROUPED_REGISTERS = (184, 80, 64)  # the load warps find the address of every 16 bytes themselves
WIDEST_PAIR = 128  # columns of Q up to which two tiles leave room for three slots of K and V
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))


def forward(spec: AttentionSpec, arch: str = "sm_100a") -> ForwardSm100Config | None:
    """The forward kernel of a spec, or None where there is none."""
    row = _row(spec, arch)
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


def grouped_forward(spec: AttentionSpec, q_len: int, arch: str = "sm_100a") -> GroupedSm100Config | None:
    """The kernel of grouped heads of a spec where that saves tiles of short queries; None elsewhere."""
    tile_m, rows = Q_TILES * TILE_ROWS, q_len * spec.group
    saves_tiles = 0 < q_len < tile_m and -(-rows // tile_m) < spec.group
    return _grouped(spec, arch, rows, is_split=False) if saves_tiles else None


def decode(spec: AttentionSpec, rows: int = 1, arch: str = "sm_100a") -> GroupedSm100Config | None:
    """The kernel of grouped heads of a spec that cuts keys in splits, for about so many rows of a kv head."""
    return _grouped(spec, arch, rows, is_split=True)


def _grouped(spec: AttentionSpec, arch: str, rows: int, *, is_split: bool) -> GroupedSm100Config | None:
    row, mask = _row(spec, arch), spec.mask
    elsewhere = mask.has_segments or mask.has_dense or mask.has_cu_seqlens or spec.bias_dtype or spec.is_fused
    elsewhere = elsewhere or spec.has_batched_scalars or (spec.page_size is not None and not is_split)
    if row is None or elsewhere or spec.dtype not in DTYPES:
        return None
    columns, v_columns = (-(-d // MMA_COLUMNS) * MMA_COLUMNS for d in (spec.head_dim, spec.head_dim_v))
    q_tiles = Q_TILES if rows > TILE_ROWS and columns <= WIDEST_PAIR else 1
    return GroupedSm100Config(
        arch=arch,
        kernel="decode" if is_split else "grouped",
        dtype=spec.dtype,  # type: ignore[arg-type]
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        tile_m=q_tiles * TILE_ROWS,
        tile_n=TILE_N,
        kv_stages=kv_stages_that_fit(columns, v_columns, q_tiles=q_tiles),
        has_left=mask.has_left,
        has_right=mask.has_right,
        has_q_offset=mask.has_q_offset and (mask.has_left or mask.has_right),  # else there is nothing to shift
        has_q_lengths=mask.has_q_lengths,
        has_kv_lengths=mask.has_kv_lengths or spec.page_size is not None,
        has_softcap=spec.has_softcap,
        has_sinks=spec.has_sinks,
        out_by_tma=False,
        is_split=is_split,
        page_size=spec.page_size,
        softmax_registers=GROUPED_REGISTERS[0],
        correction_registers=GROUPED_REGISTERS[1],
        other_registers=GROUPED_REGISTERS[2],
        exp2_period=row.exp2_period,
        exp2_first=row.exp2_first,
    )


def _row(spec: AttentionSpec, arch: str) -> Row | None:
    rows = (
        row
        for (row_arch, d, e), row in FORWARD.items()
        if row_arch == arch and spec.head_dim <= d and spec.head_dim_v <= e
    )
    return next(rows, None)


def all_configs(arch: str = "sm_100a") -> tuple[ForwardSm100Config | CombineConfig, ...]:
    """What calls mostly ask for; the functions above give others, compiled when they are first needed."""
    sides = (False, True)
    specs = [
        AttentionSpec(
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            group=1,
            mask=MaskSpec(has_left=has_left, has_right=has_right),
        )
        for (head_dim, head_dim_v), dtype, has_left, has_right in itertools.product(HEAD_DIMS, DTYPES, sides, sides)
    ]
    forwards = [config for spec in specs if (config := forward(spec, arch))]
    decodes = [kernel for spec in specs if (few := decode(spec, arch=arch)) for kernel in few.kernels]
    return tuple(dict.fromkeys([*forwards, *decodes]))
