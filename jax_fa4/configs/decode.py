"""All that the two kernels for few queries are compiled from: one makes partial results of splits, one combines them.

A CTA packs the query heads that share a kv head, and as many queries as fit, into the 64 rows of a wgmma.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jax_fa4.configs.config import (
    HEAD_DIM_LIMIT,
    MBARRIER_BYTES,
    SMEM_LIMIT,
    WARPGROUP,
    WARPGROUP_ROWS,
    BlockConfig,
    KernelConfig,
    swizzle_bytes,
)
from jax_fa4.configs.features import feature_names
from jax_fa4.configs.params import Extent, KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.configs.schedule import schedule_param
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = [
    "COMBINE_WARPS",
    "MERGES",
    "CombineConfig",
    "DecodeConfig",
    "decode",
    "max_splits",
    "merge_of",
    "min_split_keys",
    "prefers_decode",
]

SMEM_PER_SM = 228 * 1024  # bytes, of which every CTA takes RESERVED more than it asks for
RESERVED = 1024
MAX_SPLITS = 128
MAX_STAGES = 8
MIN_SPLIT_KEYS, MAX_SPLIT_KEYS = 1024, 4096  # as kernels/core/splits.py says
ROWS_PER_MIN_SPLIT = 32
FEW_SPLITS = 8
MAX_CLUSTERED_CTAS = 64
MIN_KEYS = 256  # with fewer the forward kernel is as fast, and is one launch
MIN_KEYS_OF_TILES = 4096  # the same of several tiles
# The forward kernel's rows to theirs, from where on they are faster: 8k keys, batch 8, 1.9 to 2.9 at 8, 1.5 to 1.9 at 4
# to 5.3, 1.0 to 1.2 at 2.7; batch 1 with 4 kv heads 1.6 to 2.4, 0.9 to 2.1, 0.9 to 1.2 (H200, d128, 2026-11-30)
EMPTY_ROWS = 4
COMBINE_WARPS = 4
FLOAT_BYTES = 4
MAX_PARTIAL_ROWS = 1 << 19  # of packed queries, times splits: 256 MiB of float32 with head dim 128
MAX_PADDED_PARTIAL_ROWS = 1 << 16  # of each sequence that has a length of its own: 32 MiB
TILE_ROWS = WARPGROUP_ROWS  # queries times heads of a group
DTYPES = ("bfloat16", "float16")
Merge = Literal["cluster", "few", "many"]
MERGES: tuple[Merge, ...] = ("cluster", "few", "many")
SPLIT_COUNTS = PointerParam(name="split_counts", dtype="int32", dims=("batch", "kv_heads", "q_len"))
SINKS = PointerParam(name="sinks", dtype="float32", dims=("batch", "q_heads"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineConfig:
    """A warp merges some columns of the partial results of a query of a head, fewer where splits are many."""

    arch: str
    kernel: Literal["combine"] = "combine"
    dtype: Literal["bfloat16", "float16"]
    head_dim_v: int
    has_q_lengths: bool = False
    has_many_splits: bool = False
    has_split_counts: bool = False  # and so knows which queries are padding
    has_sinks: bool = False

    @classmethod
    def of(cls, config: Any, *, has_many_splits: bool = True, has_split_counts: bool = False) -> CombineConfig:
        """What merges the splits of a config's kernel, which may count them."""
        return cls(
            arch=config.arch,
            dtype=config.dtype,
            head_dim_v=config.head_dim_v,
            has_many_splits=has_many_splits,
            has_q_lengths=config.has_q_lengths and not has_split_counts,
            has_split_counts=has_split_counts,
            has_sinks=config.has_sinks,
        )

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        return "_".join(["jax_fa4", self.kernel, self.arch, self.dtype, f"d{self.head_dim_v}", *feature_names(self)])

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return COMBINE_WARPS * 32

    @property
    def smem_bytes(self) -> int:
        """None: an SM has none left beside two CTAs of the decode kernel."""
        return 0

    @property
    def ctas_per_sm(self) -> int:
        """So many that one has room beside two CTAs of the decode kernel, which have 168 registers a thread."""
        return 6

    @property
    def lane_columns(self) -> int:
        """Neighbouring ones, that a lane adds up."""
        return 2 if self.has_many_splits else 4

    @property
    def in_flight(self) -> int:
        """Splits that a warp reads at a time: one by one each would take as long as all."""
        return 16 if self.has_many_splits else FEW_SPLITS

    @property
    def row_warps(self) -> int:
        """What makes all columns."""
        return -(-self.head_dim_v // (32 * self.lane_columns))

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        rows: tuple[Extent, ...] = ("batch", "kv_heads", "num_splits", "q_len", "group")
        optional = (
            (self.has_q_lengths, PointerParam(name="q_lengths", dtype="int32", dims=("batch", "kv_heads"))),
            (self.has_split_counts, SPLIT_COUNTS),
            (self.has_sinks, SINKS),
        )
        extents: tuple[Extent, ...] = ("q_len", "q_heads", "kv_heads", "batch", "num_splits")
        out: tuple[Extent, ...] = ("batch", "q_len", "q_heads", "head_dim_v")
        return (
            PointerParam(name="partial_out", dtype="float32", dims=(*rows, "head_dim_v"), pointee_align=16),
            PointerParam(name="partial_lse", dtype="float32", dims=rows),
            PointerParam(name="out", dtype=self.dtype, dims=out, pointee_align=16),
            PointerParam(name="lse", dtype="float32", dims=("batch", "q_heads", "q_len")),
            *(param for present, param in optional if present),
            *strides("out"),
            *(ScalarParam(name=name) for name in extents),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(BlockConfig):
    """One compiled kernel; no length, batch, head count, group, scale or window value is part of it.

    Stages are as many as let two CTAs share an SM where the head dims allow it. With `page_size` keys and values lie in
    pages. `has_cu_seqlens`: offsets are those of queries, and a schedule knows all lengths. `merge` says who merges the
    splits of a tile: the CTAs of the cluster that make one each, or a kernel for few or for many. Raises ValueError
    where shared memory or an instruction forbids it.
    """

    kernel: Literal["decode"] = "decode"
    page_size: int | None = None
    has_softcap: bool = False
    has_sinks: bool = False
    merge: Merge = "few"

    def __post_init__(self) -> None:
        if self.arch != "sm_90a":
            raise ValueError(f"arch must be sm_90a, got {self.arch}")
        self._check_call()
        if self.tile_n not in (64, 128):
            raise ValueError(f"tile_n must be 64 or 128, got {self.tile_n}")
        if self.kv_stages < 1:
            raise ValueError(f"kv_stages must be at least 1, got {self.kv_stages}")
        if self.page_size is not None and not (self.page_size > 0 and (self.has_kv_lengths or self.has_cu_seqlens)):
            raise ValueError(f"page_size must be positive and come with lengths, got {self.page_size}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"kv_stages={self.kv_stages} needs {self.smem_bytes} bytes of smem, {SMEM_LIMIT} exist")
        if self.has_clusters and self.kept_bytes > self.kv_stages * self.v_bytes:
            raise ValueError(f"{self.kept_bytes} bytes of results don't fit where {self.kv_stages} stages of V were")

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        features = [name for name in feature_names(self) if name != "sinks"]
        features += [] if self.page_size is None else [f"page{self.page_size}"]
        features += ["cluster"] if self.has_clusters else []
        return "_".join(["jax_fa4", self.kernel, self.arch, self.dtype, self.dims, *features])

    @property
    def kernels(self) -> tuple[DecodeConfig] | tuple[DecodeConfig, CombineConfig]:
        """In the order of their launches. A sink joins where everything is summed."""
        if self.has_clusters:
            return (self,)
        main = dataclasses.replace(self, has_sinks=False, merge="few")
        return main, CombineConfig.of(self, has_many_splits=self.merge == "many", has_split_counts=True)

    @property
    def has_clusters(self) -> bool:
        """The CTAs of a cluster merge what they make."""
        return self.merge == "cluster"

    @property
    def threads(self) -> int:
        """Of a CTA: a consumer warpgroup and a warp that loads."""
        return WARPGROUP + 32

    @property
    def ctas_per_sm(self) -> int:
        """How many the shared memory of an SM holds; two are enough."""
        return min(SMEM_PER_SM // (self.smem_bytes + RESERVED), 2)

    @property
    def q_bytes(self) -> int:
        """Of the Q tile."""
        return WARPGROUP_ROWS * self.columns * self.element_bytes

    @property
    def stage_bytes(self) -> int:
        """Of one stage of both rings, with a full and an empty barrier for each."""
        return self.k_bytes + self.v_bytes + 4 * MBARRIER_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: Q and both rings. Tiles are multiples of 2048 bytes, so nothing is padded."""
        return self.q_bytes + self.kv_stages * self.stage_bytes

    @property
    def kept_columns(self) -> int:
        """Floats from one row's results to the next, which other banks have: out and lse."""
        return self.head_dim_v + 8

    @property
    def kept_bytes(self) -> int:
        """Of a split's results that lie in shared memory."""
        return self.tile_rows * self.kept_columns * FLOAT_BYTES

    @property
    def tile_rows(self) -> int:
        """Rows that surely share a CTA: queries times heads of a group."""
        return TILE_ROWS

    @property
    def box_rows(self) -> int:
        """Keys that one copy moves: a block, or as much of it as surely lies in one page."""
        return self.tile_n if self.page_size is None else math.gcd(self.page_size, self.tile_n)

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""

        def tensor_map(name: str, head_dim: Extent, columns: int) -> MapParam:
            swizzle = swizzle_bytes(columns * self.element_bytes)
            rows: tuple[Extent, ...] = ("kv_len", "kv_heads", "batch")
            if self.page_size is not None:
                rows = ("page_size", "kv_heads", "num_pages")
            box = (swizzle // self.element_bytes, self.box_rows, 1, 1)
            # each byte is read once: fetching more than is asked for costs 0.3% (H200)
            return MapParam(
                name=name, dtype=self.dtype, dims=(head_dim, *rows), box=box, swizzle=swizzle, l2_promotion=0
            )

        lengths: tuple[Extent, ...] = ("batch", "kv_heads")
        rows: tuple[Extent, ...] = ("batch", "kv_heads", "num_splits", "q_len", "group")
        q: tuple[Extent, ...] = ("batch", "q_len", "q_heads", "head_dim")
        partial_results = (
            PointerParam(name="partial_out", dtype="float32", dims=(*rows, "head_dim_v"), pointee_align=16),
            PointerParam(name="partial_lse", dtype="float32", dims=rows),
            SPLIT_COUNTS,
        )
        results = (
            PointerParam(name="out", dtype=self.dtype, dims=(*q[:-1], "head_dim_v"), pointee_align=16),
            PointerParam(name="lse", dtype="float32", dims=("batch", "q_heads", "q_len")),
        )
        optional = (
            (self.has_left, PointerParam(name="window_left", dtype="int32")),
            (self.has_right, PointerParam(name="window_right", dtype="int32")),
            (self.has_softcap, PointerParam(name="softcap", dtype="float32")),
            (self.has_q_offset, PointerParam(name="q_offset", dtype="int32", dims=lengths)),
            (self.has_q_lengths, PointerParam(name="q_lengths", dtype="int32", dims=lengths)),
            (self.has_kv_lengths, PointerParam(name="kv_lengths", dtype="int32", dims=lengths)),
            (self.has_sinks, SINKS),
            (self.page_size is not None, PointerParam(name="page_table", dtype="int32", dims=("page_table_size",))),
        )
        extents: tuple[Extent, ...] = ("q_len", "kv_len", "q_heads", "kv_heads", "batch", "num_splits")
        pages: list[KernelParam] = [
            ScalarParam(name="page_table_head_stride", dtype="int64", size=8, align=8),
            ScalarParam(name="page_slots"),
            ScalarParam(name="num_pages"),
        ]
        return (
            tensor_map("k", "head_dim", self.columns),
            tensor_map("v", "head_dim_v", self.v_columns),
            PointerParam(name="q", dtype=self.dtype, dims=q, pointee_align=16),
            *(results if self.has_clusters else partial_results),
            *((schedule_param("q"),) if self.has_cu_seqlens else ()),
            PointerParam(name="softmax_scale", dtype="float32"),
            *(param for present, param in optional if present),
            *strides("q"),
            *(ScalarParam(name=name) for name in extents),
            *(strides("out") if self.has_clusters else ()),
            *(pages if self.page_size is not None else ()),
        )


def strides(array: str) -> tuple[ScalarParam, ...]:
    """Elements of an array from one batch entry, query and head to the next."""
    return tuple(
        ScalarParam(name=f"{array}_{axis}_stride", dtype="int64", size=8, align=8)  # type: ignore[arg-type]
        for axis in ("batch", "row", "head")
    )


def min_split_keys(rows: int) -> int:
    """The fewest keys of a split of a sequence that has more, for so many rows: queries times heads of a group."""
    return MIN_SPLIT_KEYS * -(-rows // ROWS_PER_MIN_SPLIT)


def max_splits(rows: int, kv_len: int, kv_heads: int = 1) -> int:
    """The most splits of a sequence with so many rows a kv head, which may have so many keys."""
    shortest = min_split_keys(rows)
    longest = max(min(512 * kv_heads, MAX_SPLIT_KEYS), MIN_SPLIT_KEYS) * -(-rows // ROWS_PER_MIN_SPLIT)
    return min(max(min(-(-kv_len // shortest), FEW_SPLITS), -(-kv_len // longest)), MAX_SPLITS)


def merge_of(num_splits: int, tiles: int | None) -> Merge:
    """Who merges the splits of so many tiles (None: any number), which have so many each at most.

    A cluster spares a launch, but waits until there is room for all its CTAs side by side: 1.05 with 64 CTAs, 0.97 with
    128, 0.83 with 256 (8k keys a sequence, H200, 2026-11-30). One CTA has not to wait.
    """
    if num_splits > FEW_SPLITS:
        return "many"
    few_tiles = num_splits == 1 or (tiles is not None and num_splits * tiles <= MAX_CLUSTERED_CTAS)
    return "cluster" if few_tiles else "few"


def prefers_decode(few: DecodeConfig | Any, whole: KernelConfig | None, q_len: int, group: int, kv_len: int) -> bool:
    """Whether the kernels for few queries, with config `few`, are faster than the forward kernel, with config `whole`.

    They are where queries are few and keys many: for one tile the keys are split; several, in which all heads of a
    group share a row's place, are worth it while the forward's tiles, of one head each, would be mostly empty.
    """
    if q_len * group <= few.tile_rows:
        return kv_len >= MIN_KEYS
    if whole is None or not isinstance(few, DecodeConfig):
        return False
    rows = TILE_ROWS * -(-q_len // (TILE_ROWS // group))
    whole_rows = group * whole.tile_m * -(-q_len // whole.tile_m)
    return kv_len >= MIN_KEYS_OF_TILES and whole_rows >= EMPTY_ROWS * rows


def decode(spec: AttentionSpec) -> DecodeConfig | None:
    """The kernels of a spec, or None where there are none."""
    others = dataclasses.replace(
        spec.mask, has_left=False, has_right=False, has_q_offset=False, has_q_lengths=False, has_kv_lengths=False
    )
    if spec.page_size is not None:  # packed queries
        others = dataclasses.replace(others, has_cu_seqlens=False)
    if spec.dtype not in DTYPES or spec.bias_dtype or spec.is_fused or spec.has_batched_scalars or others != MaskSpec():
        return None
    if spec.group > WARPGROUP_ROWS or max(spec.head_dim, spec.head_dim_v) > HEAD_DIM_LIMIT:
        return None
    return _config(spec, tile_n=128 if max(spec.head_dim, spec.head_dim_v) <= 64 else 64)


def _config(spec: AttentionSpec, tile_n: int) -> DecodeConfig:
    """As many stages as let two CTAs share an SM or, if that would leave fewer than three, as one CTA can have.

    Two have 168 registers a thread each, which wider keys than such stages hold would spill.
    """
    mask = spec.mask

    def config(kv_stages: int) -> DecodeConfig:
        return DecodeConfig(
            arch="sm_90a",
            dtype=spec.dtype,  # type: ignore[arg-type]
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            tile_n=tile_n,
            kv_stages=kv_stages,
            page_size=spec.page_size,
            has_left=mask.has_left,
            has_right=mask.has_right,
            has_q_offset=mask.has_q_offset and (mask.has_left or mask.has_right),  # else there is nothing to shift
            has_q_lengths=mask.has_q_lengths and not mask.has_cu_seqlens,
            has_kv_lengths=(mask.has_kv_lengths or spec.page_size is not None) and not mask.has_cu_seqlens,
            has_cu_seqlens=mask.has_cu_seqlens,
            has_softcap=spec.has_softcap,
            has_sinks=spec.has_sinks,
        )

    one = config(1)
    halves, whole = ((limit - one.q_bytes) // one.stage_bytes for limit in (SMEM_PER_SM // 2 - RESERVED, SMEM_LIMIT))
    return config(min(halves if halves >= 3 else whole, MAX_STAGES))
