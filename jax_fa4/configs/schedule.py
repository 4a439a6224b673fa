"""The kernel that lists the tiles of packed sequences for the kernels that compute them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from jax_fa4.configs.features import feature_names
from jax_fa4.configs.params import KernelParam, PointerParam, ScalarParam
from jax_fa4.spec import MaskSpec

__all__ = ["SCHEDULE_FIELDS", "ScheduleConfig", "num_slots", "schedule_param"]

THREADS = 1024
CLASSES = 2048  # of work
WARPS = 32
SCHEDULE_FIELDS = 8  # numbers that a schedule has of a tile

Side = Literal["q", "kv"]
Order = Literal["tiles", "sequences", "slots"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Tiles of `tile_m` rows of one side, which see blocks of `tile_n` rows of the other.

    The flags are those of queries that see keys. No length, offset, batch, number of sequences or window value is part
    of it, and no dtype or head dim.
    """

    arch: str
    kernel: Literal["schedule"] = "schedule"
    side: Side
    order: Order
    tile_m: int
    tile_n: int
    row_step: int | None = None  # the tile that is not full is a sequence's first, and all start at multiples of it
    has_left: bool = False
    has_right: bool = False
    has_q_lengths: bool = False
    has_kv_lengths: bool = False
    pages_keys: bool = False  # which have no offsets: each sequence has its own, and place for kv_len of them

    @classmethod
    def of(cls, config: Any, mask: MaskSpec, *, side: Side, order: Order, row_step: int | None = None) -> Self:
        """For the kernel of a config: a list of its tiles of queries or, for the keys that a backward sums, of keys."""
        tiles = (config.tile_m, config.tile_n)
        tile_m, tile_n = tiles if side == "q" else reversed(tiles)
        return cls(
            arch=config.arch,
            side=side,
            order=order,
            tile_m=tile_m,
            tile_n=tile_n,
            row_step=row_step,
            has_left=config.has_left and order != "slots",  # which are the same for every window
            has_right=config.has_right and order != "slots",
            has_q_lengths=mask.has_q_lengths,
            has_kv_lengths=mask.has_kv_lengths,
        )

    @classmethod
    def of_pages(cls, config: Any, mask: MaskSpec, *, tile_m: int) -> Self:
        """For queries whose keys lie in pages."""
        return cls(
            arch=config.arch,
            side="q",
            order="tiles",
            tile_m=tile_m,
            tile_n=config.tile_n,
            has_left=config.has_left,
            has_right=config.has_right,
            has_q_lengths=mask.has_q_lengths,
            has_kv_lengths=True,
            pages_keys=True,
        )

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        return "_".join(["jax_fa4", self.kernel, self.arch, self.side, self.order, *feature_names(self)])

    @property
    def sees_left(self) -> bool:
        """Whether a tile's rows see only some of the other side's rows before their place."""
        return self.has_left if self.side == "q" else self.has_right

    @property
    def sees_right(self) -> bool:
        """Whether a tile's rows see only some of the other side's rows after their place."""
        return self.has_right if self.side == "q" else self.has_left

    @property
    def threads(self) -> int:
        """Of the CTA."""
        return THREADS

    @property
    def smem_bytes(self) -> int:
        """A number for each class of work and each warp, and one for all."""
        return 4 * (CLASSES + WARPS + 1)

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        optional = (
            (self.has_q_lengths, PointerParam(name="q_lengths", dtype="int32", dims=("lengths_size",))),
            (self.has_kv_lengths, PointerParam(name="kv_lengths", dtype="int32", dims=("lengths_size",))),
            (self.has_left, PointerParam(name="window_left", dtype="int32")),
            (self.has_right, PointerParam(name="window_right", dtype="int32")),
        )
        return (
            PointerParam(name="cu_seqlens_q", dtype="int32", dims=("offsets_size",)),
            *(() if self.pages_keys else (PointerParam(name="cu_seqlens_kv", dtype="int32", dims=("offsets_size",)),)),
            *(param for present, param in optional if present),
            schedule_param(self.side),
            *(ScalarParam(name=name) for name in ("q_len", "kv_len", "sequences", "batch", "entry_step")),
        )


def schedule_param(side: Side) -> PointerParam:
    """The list of tiles of queries or keys."""
    name, rows = ("q_schedule", "q_places") if side == "q" else ("kv_schedule", "kv_places")
    return PointerParam(name=name, dtype="int32", dims=(rows, "fields"), pointee_align=16)  # type: ignore[arg-type]


def num_slots(rows: Any, offsets: Any, tile_m: Any) -> Any:
    """Places that the tiles of a batch entry's packed sequences have (kernels/core/packed.py).

    Of so many rows and offsets, which are one more than sequences: numbers, or expressions of a plan.
    """
    return rows // tile_m + (offsets + 1)
