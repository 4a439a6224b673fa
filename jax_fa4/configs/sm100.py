"""Blackwell's forward, one row a line: tiles, registers by role, and the share of exponentials that are emulated.

No such GPU was at hand: the rows are those of the published kernel, its tuning is not repeated here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_fa4.configs.blackwell import TILE_N, TILE_ROWS, ForwardSm100Config
from jax_fa4.configs.decode import CombineConfig
from jax_fa4.configs.features import common_specs, fields_of, first_that_fits, has_known_dtypes, packs_with_others
from jax_fa4.configs.grouped import GroupedSm100Config, lanes_copy
from jax_fa4.spec import AttentionSpec

__all__ = ["FORWARD", "all_configs", "decode", "forward", "grouped_forward"]

MIN_STAGES = 2  # of K and V together, with which a config is made before it is given all that fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Registers of a thread by role, and which exponentials are emulated."""

    softmax: int
    correction: int
    others: int
    exp2_period: int = 0
    exp2_first: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """Of a config."""
        return {
            "softmax_registers": self.softmax,
            "correction_registers": self.correction,
            "other_registers": self.others,
            "exp2_period": self.exp2_period,
            "exp2_first": self.exp2_first,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Choices for head dims up to one: of a CTA alone, and of a pair that multiplies as one, where there are pairs."""

    alone: Tuning
    pair: Tuning | None = None
    q_tiles: int = 2
    is_persistent: bool = False  # where all tiles visit the same keys: O has room beside Q


FORWARD = {  # by architecture: up to (head_dim, head_dim_v); the first row that fits
    "sm_100a": {
        (88, 88): Row(
            alone=Tuning(softmax=200, correction=64, others=48, exp2_period=16, exp2_first=1), is_persistent=True
        ),
        (128, 128): Row(
            alone=Tuning(softmax=192, correction=80, others=48, exp2_period=16, exp2_first=1),
            pair=Tuning(softmax=184, correction=80, others=64, exp2_period=10, exp2_first=1),
            is_persistent=True,
        ),
        (192, 128): Row(
            alone=Tuning(softmax=184, correction=80, others=64, exp2_period=32, exp2_first=1),
            pair=Tuning(softmax=184, correction=80, others=64, exp2_period=16, exp2_first=0),
        ),
        (256, 256): Row(
            alone=Tuning(softmax=240, correction=160, others=64, exp2_period=14, exp2_first=0),
            pair=Tuning(softmax=240, correction=160, others=64, exp2_period=14, exp2_first=0),
            q_tiles=1,
        ),
    },
    "sm_103a": {  # its special-function units are twice as fast
        (88, 88): Row(alone=Tuning(softmax=176, correction=80, others=80), is_persistent=True),
        (128, 128): Row(
            alone=Tuning(softmax=176, correction=80, others=80),
            pair=Tuning(softmax=176, correction=80, others=80),
            is_persistent=True,
        ),
        (192, 128): Row(
            alone=Tuning(softmax=176, correction=80, others=80), pair=Tuning(softmax=176, correction=80, others=80)
        ),
        (256, 256): Row(
            alone=Tuning(softmax=240, correction=160, others=64),
            pair=Tuning(softmax=240, correction=160, others=64),
            q_tiles=1,
        ),
    },
}
GROUPED_REGISTERS = {  # where two tiles leave few: the load warps find the address of every 16 bytes themselves
    "softmax_registers": 184,
    "correction_registers": 80,
    "other_registers": 64,
}
WIDEST_TILES = 128  # columns of Q up to which two tiles leave room for three slots of K and V
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def forward(spec: AttentionSpec, arch: str = "sm_100a") -> ForwardSm100Config | None:
    """The forward kernel of a spec, or None where there is none."""
    elsewhere = spec.has_batched_scalars or spec.page_size is not None or packs_with_others(spec)
    row = first_that_fits(FORWARD[arch], spec)
    if row is None or elsewhere or not has_known_dtypes(spec):
        return None
    config = ForwardSm100Config(
        arch=arch,
        kernel="forward",
        tile_m=row.q_tiles * TILE_ROWS,
        tile_n=TILE_N,
        kv_stages=MIN_STAGES,
        out_by_tma=not spec.mask.has_cu_seqlens,
        **row.alone.fields,
        **fields_of(spec),
    )
    # a pair visits the keys that either CTA's queries see: where tiles differ, two tiles each would see too much
    if (
        row.pair
        and not config.has_kv_lengths
        and not config.has_cu_seqlens
        and not (config.visits_differ and row.q_tiles == 2)
    ):
        config = dataclasses.replace(config, cta_group=2, tile_m=2 * config.tile_m, **row.pair.fields)
    has_elements = config.has_softcap or config.has_mask or config.bias is not None  # spill in a loop over tiles
    is_persistent = row.is_persistent and not config.visits_differ and not has_elements
    return dataclasses.replace(config, schedule="static" if is_persistent else "single").fitted()


def grouped_forward(spec: AttentionSpec, q_len: int, arch: str = "sm_100a") -> GroupedSm100Config | None:
    """The kernel of grouped heads of a spec where that saves tiles of short queries; None elsewhere."""
    tile_m, rows = 2 * TILE_ROWS, q_len * spec.group
    saves_tiles = 0 < q_len < tile_m and -(-rows // tile_m) < spec.group
    return _grouped(spec, arch, rows, is_split=False) if saves_tiles else None


def decode(spec: AttentionSpec, rows: int = 1, arch: str = "sm_100a") -> GroupedSm100Config | None:
    """The kernel of grouped heads of a spec that cuts keys in splits, for about so many rows of a kv head."""
    return _grouped(spec, arch, rows, is_split=True)


def _grouped(spec: AttentionSpec, arch: str, rows: int, *, is_split: bool) -> GroupedSm100Config | None:
    row, mask = first_that_fits(FORWARD[arch], spec), spec.mask
    elsewhere = mask.has_segments or mask.has_dense or mask.has_cu_seqlens or spec.bias_dtype or spec.is_fused
    elsewhere = elsewhere or spec.has_batched_scalars or (spec.page_size is not None and not is_split)
    by_lanes = lanes_copy(spec.page_size)
    if row is None or elsewhere or not has_known_dtypes(spec) or (by_lanes and row.q_tiles == 1):
        return None  # lanes need a third slot, for which there is no room
    q_tiles = row.q_tiles if rows > TILE_ROWS and spec.head_dim <= WIDEST_TILES else 1
    fields = fields_of(spec)
    fields["has_kv_lengths"] = spec.mask.has_kv_lengths or spec.page_size is not None
    return GroupedSm100Config(
        arch=arch,
        kernel="decode" if is_split else "grouped",
        tile_m=q_tiles * TILE_ROWS,
        tile_n=TILE_N,
        kv_stages=MIN_STAGES + by_lanes,
        out_by_tma=False,
        is_split=is_split,
        page_size=spec.page_size,
        **{**row.alone.fields, **(GROUPED_REGISTERS if row.q_tiles == 2 else {})},
        **fields,
    ).fitted()


def all_configs(arch: str = "sm_100a") -> tuple[ForwardSm100Config | CombineConfig, ...]:
    """What calls mostly ask for; the functions above give others, compiled when they are first needed."""
    specs = tuple(common_specs(HEAD_DIMS))
    forwards = [config for spec in specs if (config := forward(spec, arch))]
    decodes = [kernel for spec in specs if (few := decode(spec, arch=arch)) for kernel in few.kernels]
    return tuple(dict.fromkeys([*forwards, *decodes]))
