"""Blackwell's forward, one row a line: tiles, registers by role, and the share of exponentials that are emulated.

No such GPU was at hand: the rows are those of the published kernel, its tuning is not repeated here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_fa4.configs.blackwell import TILE_N, TILE_ROWS, ForwardSm100Config, Schedule
from jax_fa4.configs.decode import CombineConfig
from jax_fa4.configs.features import common_specs, fields_of, first_that_fits, has_known_dtypes, packs_with_others
from jax_fa4.configs.grouped import GroupedSm100Config
from jax_fa4.configs.schedule import ScheduleConfig
from jax_fa4.spec import AttentionSpec

__all__ = ["FORWARD", "all_configs", "decode", "forward", "grouped_forward"]

MIN_STAGES = 2  # of K and V together, with which a config is made before it is given all that fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registers:
    """Of a thread, by role."""

    softmax: int
    correction: int
    others: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning(Registers):
    """Registers, and which exponentials are emulated."""

    exp2_period: int = 0
    exp2_first: int = 0

    def but(self, registers: Registers) -> Tuning:
        """The same with other registers."""
        return dataclasses.replace(self, **dataclasses.asdict(registers))

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
    is_persistent: bool = False  # O has room beside Q: a CTA may compute tile after tile


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
LONE_TILE = Registers(softmax=240, correction=80, others=64)  # what one query tile leaves
GROUPED = Registers(softmax=184, correction=80, others=64)  # load warps find the address of every 16 bytes themselves
# Where correction finds more than the bounds of one tile: with the registers of head dim 64 segments spill 17 words, a
# loop over tiles that the hardware deals out 4.
FINDING = Registers(softmax=192, correction=80, others=48)
WIDEST_TILES = 128  # columns of Q up to which two tiles leave room for three slots of K and V, and for segments
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def forward(spec: AttentionSpec, arch: str = "sm_100a", *, takes_over: bool = False) -> ForwardSm100Config | None:
    """The forward kernel of a spec, or None where there is none.

    `takes_over`: CTAs take over tiles of those that have not started, where a kernel can.
    """
    elsewhere = spec.has_batched_scalars or spec.page_size is not None or packs_with_others(spec)
    row = first_that_fits(FORWARD[arch], spec)
    if row is None or elsewhere or not has_known_dtypes(spec):
        return None
    is_lone, alone = row.q_tiles == 1, row.alone
    has_wide_segments = spec.mask.has_segments and spec.head_dim > WIDEST_TILES
    if not is_lone and (_reads_elements(spec) or has_wide_segments):
        is_lone, alone = True, alone.but(LONE_TILE)
    elif not is_lone and spec.mask.has_segments:
        alone = alone.but(FINDING)
    config = ForwardSm100Config(
        arch=arch,
        kernel="forward",
        tile_m=TILE_ROWS if is_lone else row.q_tiles * TILE_ROWS,
        tile_n=TILE_N,
        kv_stages=MIN_STAGES,
        out_by_tma=not spec.mask.has_cu_seqlens,
        **alone.fields,
        **fields_of(spec),
    )
    # a pair visits the keys that either CTA's queries see: where tiles differ, two tiles each would see too much
    if (
        row.pair
        and config.q_tiles == row.q_tiles
        and not config.has_kv_lengths
        and not config.has_cu_seqlens
        and not (config.visits_differ and row.q_tiles == 2)
    ):
        config = dataclasses.replace(config, cta_group=2, tile_m=2 * config.tile_m, **row.pair.fields)
    schedule = _schedule(row, config, takes_over)
    if schedule == "dynamic" and config.cta_group == 1:
        config = dataclasses.replace(config, **alone.but(FINDING).fields)
    return dataclasses.replace(config, schedule=schedule).fitted()


def _schedule(row: Row, config: ForwardSm100Config, takes_over: bool) -> Schedule:
    has_elements = config.has_softcap or config.has_mask or config.bias is not None  # spill in a loop over tiles
    if not row.is_persistent or has_elements:
        return "single"
    if takes_over and not config.has_kv_lengths and not config.has_cu_seqlens:
        return "dynamic"
    return "single" if config.visits_differ else "static"


def grouped_forward(spec: AttentionSpec, q_len: int, arch: str = "sm_100a") -> GroupedSm100Config | None:
    """The kernel of grouped heads of a spec where that saves tiles of short queries; None elsewhere."""
    rows = q_len * spec.group
    config = _grouped(spec, arch, rows, is_split=False) if 0 < q_len < 2 * TILE_ROWS else None
    return config if config and -(-rows // config.tile_m) < spec.group else None


def decode(spec: AttentionSpec, rows: int = 1, arch: str = "sm_100a") -> GroupedSm100Config | None:
    """The kernel of grouped heads of a spec that cuts keys in splits, for about so many rows of a kv head."""
    return _grouped(spec, arch, rows, is_split=True)


def _grouped(spec: AttentionSpec, arch: str, rows: int, *, is_split: bool) -> GroupedSm100Config | None:
    row = first_that_fits(FORWARD[arch], spec)
    # a schedule lists tiles of one head; parts of a fused array have their queries beside the keys, so many of both
    elsewhere = spec.mask.has_cu_seqlens or spec.is_fused
    elsewhere = elsewhere or spec.has_batched_scalars or (spec.page_size is not None and not is_split)
    if row is None or elsewhere or not has_known_dtypes(spec):
        return None
    is_lone = rows <= TILE_ROWS or spec.head_dim > WIDEST_TILES or _reads_elements(spec) or spec.mask.has_segments
    q_tiles = 1 if is_lone else row.q_tiles
    tuning = row.alone if row.q_tiles == 1 else row.alone.but(LONE_TILE if is_lone else GROUPED)
    fields = fields_of(spec)
    fields["has_kv_lengths"] = spec.mask.has_kv_lengths or spec.page_size is not None
    return GroupedSm100Config(
        arch=arch,
        kernel="decode" if is_split else "grouped",
        tile_m=q_tiles * TILE_ROWS,
        tile_n=TILE_N,
        kv_stages=MIN_STAGES,
        out_by_tma=False,
        is_split=is_split,
        page_size=spec.page_size,
        **tuning.fields,
        **fields,
    ).fitted()


def _reads_elements(spec: AttentionSpec) -> bool:
    """Whether softmax reads an element for each score, whose addresses take the registers of a second query tile."""
    return spec.mask.has_dense or spec.bias_dtype is not None


def all_configs(arch: str = "sm_100a") -> tuple[ForwardSm100Config | CombineConfig | ScheduleConfig, ...]:
    """What calls mostly ask for; the functions above give others, compiled when they are first needed."""
    specs = tuple(common_specs(HEAD_DIMS))
    forwards = [config for spec in specs if (config := forward(spec, arch))]
    packs = [config for spec in specs if (config := forward(_packed(spec), arch))]
    schedules = [
        ScheduleConfig.of(config, spec.mask, side="q", order="tiles") for spec, config in zip(specs, packs, strict=True)
    ]
    groups = [config for spec in specs if (config := _grouped(spec, arch, 2 * TILE_ROWS, is_split=False))]
    decodes = [kernel for spec in specs if (few := decode(spec, arch=arch)) for kernel in few.kernels]
    return tuple(dict.fromkeys([*forwards, *packs, *schedules, *groups, *decodes]))


def _packed(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, has_cu_seqlens=True))
