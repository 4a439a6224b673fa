"""All that Blackwell's kernel of grouped heads is compiled from: query heads of a kv head share a tile's rows."""

from __future__ import annotations

import dataclasses
import math

from jax_fa4.configs.blackwell import TILE_N, TILE_ROWS, Barrier, ForwardSm100Config
from jax_fa4.configs.config import swizzle_bytes
from jax_fa4.configs.decode import CombineConfig, strides
from jax_fa4.configs.features import feature_params
from jax_fa4.configs.params import Extent, KernelParam, MapParam, PointerParam, ScalarParam

__all__ = ["GroupedSm100Config", "lanes_copy"]

LOAD_WARPS = 2
SMALLEST_BOX = 8  # keys that a tensor copy should move at least: a swizzle's pattern; lanes copy fewer
MAX_BLOCKS_AHEAD = 2


def lanes_copy(page_size: int | None) -> bool:
    """Whether lanes copy keys that lie in such pages, 16 bytes each, rather than TMA."""
    return _box_rows(page_size) < SMALLEST_BOX


def _box_rows(page_size: int | None) -> int:
    return TILE_N if page_size is None else math.gcd(page_size, TILE_N)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSm100Config(ForwardSm100Config):
    """A forward whose tiles hold the query heads of a kv head, for any group.

    `is_split`: a CTA makes the partial results of a split of the keys, which another kernel combines. With `page_size`
    keys and values lie in pages. Raises ValueError where shared memory, tensor memory or registers forbid it.
    """

    is_split: bool = False
    page_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out_by_tma or self.is_persistent:
            raise ValueError("grouped heads take out_by_tma=False and schedule=single")
        if self.page_size is not None and not (self.page_size > 0 and self.has_kv_lengths and self.is_split):
            raise ValueError(f"page_size must be positive and come with lengths and splits, got {self.page_size}")

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        pages = [] if self.page_size is None else [f"page{self.page_size}"]
        return "_".join([super().name, *pages])

    @property
    def kernels(self) -> tuple[GroupedSm100Config, CombineConfig]:
        """Both of a call with splits, in the order of their launches. A sink joins where everything is summed."""
        return dataclasses.replace(self, has_sinks=False), CombineConfig.of(self)

    @property
    def tile_rows(self) -> int:
        """Rows that surely share a CTA: queries times heads of a group."""
        return TILE_ROWS

    @property
    def box_rows(self) -> int:
        """Keys that one copy moves: a block, or as much of it as surely lies in one page."""
        return _box_rows(self.page_size)

    @property
    def gathers_keys(self) -> bool:
        """Whether lanes copy keys and values, 16 bytes each, rather than TMA."""
        return lanes_copy(self.page_size)

    @property
    def blocks_ahead(self) -> int:
        """Blocks of K or V that lanes ask for before they show an earlier one; 0: they wait for each.

        A product P V waits for its V and for the K behind it, so two slots more must exist.
        """
        return min(self.kv_stages - 2, MAX_BLOCKS_AHEAD)

    @property
    def load_warps(self) -> int:
        """Warps that load."""
        return LOAD_WARPS

    @property
    def clears_values(self) -> bool:
        """Whether rows of V beyond a sequence come into shared memory, where they may be NaN."""
        return self.has_kv_lengths and not self.gathers_keys

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier, in the order of shared memory."""
        lanes = {"arrivals": LOAD_WARPS, "arrives": f"load (1 a warp, {LOAD_WARPS})"}
        by_lanes = ("q.full", "kv.full") if self.gathers_keys else ("q.full",)
        return tuple(
            barrier._replace(**lanes) if barrier.name in by_lanes else barrier  # type: ignore[arg-type]
            for barrier in super().barriers
        )

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        extents: tuple[Extent, ...] = ("q_len", "kv_len", "q_heads", "kv_heads", "batch")
        return (
            *(() if self.gathers_keys else self._maps()),
            *self._results(),
            *feature_params(self, ranges="key_blocks", tiles="q_tiles"),
            *(ScalarParam(name=name) for name in extents),
            *self._rows("q", ("batch", "q_len", "q_heads", "head_dim")),
            *(self._pools() if self.gathers_keys else ()),
            *((ScalarParam(name="num_splits"),) if self.is_split else ()),
            *(self._pages() if self.page_size is not None else ()),
        )

    def _maps(self) -> tuple[KernelParam, ...]:
        def tensor_map(name: str, head_dim: Extent, columns: int) -> MapParam:
            swizzle = swizzle_bytes(columns * self.element_bytes)
            rows: tuple[Extent, ...] = ("kv_len", "kv_heads", "batch")
            if self.page_size is not None:
                rows = ("page_size", "kv_heads", "num_pages")
            box = (swizzle // self.element_bytes, self.box_rows, 1, 1)
            return MapParam(name=name, dtype=self.dtype, dims=(head_dim, *rows), box=box, swizzle=swizzle)

        return tensor_map("k", "head_dim", self.columns), tensor_map("v", "head_dim_v", self.v_columns)

    def _results(self) -> tuple[KernelParam, ...]:
        if self.is_split:
            rows: tuple[Extent, ...] = ("batch", "kv_heads", "num_splits", "q_len", "group")
            return (
                PointerParam(name="partial_out", dtype="float32", dims=(*rows, "head_dim_v"), pointee_align=16),
                PointerParam(name="partial_lse", dtype="float32", dims=rows),
            )
        out = self._rows("out", ("batch", "q_len", "q_heads", "head_dim_v"))
        return (*out, PointerParam(name="lse", dtype="float32", dims=("batch", "q_heads", "q_len")))

    def _rows(self, name: str, dims: tuple[Extent, ...]) -> tuple[KernelParam, ...]:
        return (PointerParam(name=name, dtype=self.dtype, dims=dims, pointee_align=16), *strides(name))

    def _pools(self) -> tuple[KernelParam, ...]:
        rows: tuple[Extent, ...] = ("num_pages", "page_size", "kv_heads")
        return (*self._rows("k", (*rows, "head_dim")), *self._rows("v", (*rows, "head_dim_v")))

    def _pages(self) -> tuple[KernelParam, ...]:
        return (
            PointerParam(name="page_table", dtype="int32", dims=("page_table_size",)),
            ScalarParam(name="page_table_head_stride", dtype="int64", size=8, align=8),
            ScalarParam(name="page_slots"),
            ScalarParam(name="num_pages"),
        )
