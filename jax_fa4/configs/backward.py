"""All that the three kernels of a backward are compiled from, with what follows from it.

They run one after the other: preprocess makes two numbers a query, the main kernel sums dq in a float32 array, which
preprocess has zeroed or the first tile of keys stores, and writes dk and dv, postprocess scales and rounds dq. All
three cut the queries into tiles of `tile_m`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jax_fa4.configs.config import (
    MBARRIER_BYTES,
    MMA_COLUMNS,
    OTHER_REGISTERS,
    PRODUCER_REGISTERS,
    SMEM_LIMIT,
    SWIZZLE_BYTES,
    WARPGROUP,
    WARPGROUP_ROWS,
    ArrayConfig,
    check_registers,
    consumer_registers,
    round_up,
    rows_of,
)
from jax_fa4.configs.features import feature_names, feature_params
from jax_fa4.configs.params import Extent, KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.configs.schedule import schedule_param

__all__ = ["BackwardConfig", "KeysConfig", "PostprocessConfig", "PreprocessConfig"]

FLOAT_BYTES = 4
NARROW_LIMIT = 128  # head dims up to it leave a CTA registers for all of dk and dv of its keys, and scores beside them
WARPGROUPS = 2  # consumers: each holds half the keys of a tile
QUERY_EXTENTS: tuple[Extent, ...] = ("q_len", "q_heads", "batch")
KEY_EXTENTS: tuple[Extent, ...] = ("kv_len", "kv_heads", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig(ArrayConfig):
    """What the kernels of a backward share; no length, batch, head count, scale or window value is part of it."""

    tile_m: int
    deterministic: bool = False
    has_cu_seqlens: bool = False
    # The first tile of keys that a tile of queries sees stores dq, and others add to it. Where CTAs have several query
    # heads, one with a shorter tile would wait for the first one's next head: preprocess zeroes dq then, unless the
    # order matters anyway.
    stores_dq: bool = False
    # Who has added all that it adds to dq is counted, so that postprocess need not wait for the main kernel's end.
    counts_adders: bool = False

    def __post_init__(self) -> None:
        if self.arch != "sm_90a":
            raise ValueError(f"arch must be sm_90a, got {self.arch}")
        self._check_call()
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m must be 64 or 128, got {self.tile_m}")
        if self.columns < self.head_dim:
            raise ValueError(f"tile_m={self.tile_m} has room for head_dim {self.columns}, got {self.head_dim}")

    @property
    def slab(self) -> int:
        """Columns of one row of a swizzle atom."""
        return SWIZZLE_BYTES // self.element_bytes

    @property
    def turns(self) -> tuple[PointerParam, ...]:
        """How many tiles of keys have been added to each warpgroup's part of each tile of dq, if the order matters.

        If only which is the first matters, whether that has been stored.
        """
        tiles: Extent = "q_slots" if self.has_cu_seqlens else "q_tiles"
        dims: tuple[Extent, ...] = ("batch", "q_heads", tiles, "dq_parts")
        has_turns = self.deterministic or self.stores_dq
        return (PointerParam(name="dq_turn", dtype="int32", dims=dims),) if has_turns else ()

    @property
    def done(self) -> tuple[PointerParam, ...]:
        """How many of those that add to dq of a kv head's query heads have added all that they have, if they count.

        Packed sequences have theirs in the first batch entry's numbers, those of all entries together.
        """
        return (PointerParam(name="dq_done", dtype="int32", dims=("batch", "kv_heads")),) if self.counts_adders else ()

    @property
    def is_wide(self) -> bool:
        """Whether two CTAs, a cluster, share a tile of keys."""
        return max(self.head_dim, self.head_dim_v) > NARROW_LIMIT

    @property
    def key_ctas(self) -> int:
        """CTAs that share a tile of keys."""
        return 2 if self.is_wide else 1

    @property
    def tile_adders(self) -> int:
        """That add to dq for a tile of keys: a warp for each consumer warpgroup, or each of the CTAs that share it."""
        return self.key_ctas if self.is_wide else WARPGROUPS

    @property
    def dq_parts(self) -> int:
        """Parts of a tile of dq: one for each warpgroup of each of the CTAs that share a tile of keys."""
        return WARPGROUPS * self.key_ctas

    @property
    def columns(self) -> int:
        """Of q and k in shared memory: head_dim, padded to whole slabs, or so that each warpgroup has 64 rows or
        columns of a tile of dq.
        """
        if self.is_wide:
            return round_up(self.head_dim, self.slab)
        return WARPGROUPS * WARPGROUP_ROWS * self.slab // self.tile_m

    @property
    def v_columns(self) -> int:
        """Of v and dout in shared memory: head_dim_v, padded to whole slabs."""
        return round_up(self.head_dim_v, self.slab)

    @property
    def sum_columns(self) -> int:
        """Of a row of dq's sum: head_dim, padded to what warpgroups sum where those of two CTAs do."""
        return round_up(self.head_dim, self.slab) if self.is_wide else self.head_dim

    @property
    def dq_tile_floats(self) -> int:
        """Of one tile of queries in dq_sum."""
        return self.tile_m * self.sum_columns

    @property
    def dq_part_floats(self) -> int:
        """Of a warpgroup's part of that: 64 queries, of a tile of no more 64 columns, cut where head_dim ends."""
        return WARPGROUP_ROWS * (self.slab if self.tile_m == WARPGROUP_ROWS else self.sum_columns)

    @property
    def dq_sum(self) -> PointerParam:
        """The float32 array that dq is summed in: tiles in the order of the threads' registers.

        Of a tile, slabs of 64 queries follow each other; of a slab, blocks of eight columns; of a block, the threads of
        a warpgroup; of a thread, its two columns of one query, then of that eight rows below.
        """
        dims: tuple[Extent, ...] = ("batch", "q_heads", self.tile_rows, "sum_columns")
        return PointerParam(name="dq_sum", dtype="float32", dims=dims, pointee_align=16)

    @property
    def tile_rows(self) -> Extent:
        """Of what has a row for each query of each tile; tiles of packed sequences have places of their own."""
        return "q_slot_rows" if self.has_cu_seqlens else "padded_q_len"

    @property
    def statistics(self) -> tuple[PointerParam, ...]:
        """Two numbers a query."""
        dims: tuple[Extent, ...] = ("batch", "q_heads", self.tile_rows)
        return tuple(
            PointerParam(name=name, dtype="float32", dims=dims, pointee_align=16) for name in ("lse_log2", "delta")
        )

    @property
    def slots(self) -> tuple[ScalarParam, ...]:
        """How many places the tiles of a batch entry have, if sequences are packed."""
        return (ScalarParam(name="q_slots"),) if self.has_cu_seqlens else ()

    @property
    def q_bytes(self) -> int:
        """Of a tile of q."""
        return self.tile_m * self.columns * self.element_bytes

    @property
    def dout_bytes(self) -> int:
        """Of a tile of dout; one of out is as large."""
        return self.tile_m * self.v_columns * self.element_bytes

    def tensor_map(self, name: str, rows: int) -> MapParam:
        """The map of one array, whose copies move `rows` rows and one swizzle atom's columns."""
        columns: Extent = "head_dim_v" if name in ("v", "out", "dout", "dv") else "head_dim"
        extents = KEY_EXTENTS if name in ("k", "v", "dk", "dv") else QUERY_EXTENTS
        box = (self.slab, rows, 1, 1)
        return MapParam(name=name, dtype=self.dtype, dims=(columns, *extents), box=box, swizzle=SWIZZLE_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessConfig(TileConfig):
    """A CTA makes the statistics of `tile_m` queries of one head, a thread those of one; zeroes their dq or turns."""

    kernel: Literal["preprocess"] = "preprocess"

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        suffix = "_cu_seqlens" * self.has_cu_seqlens + "_deterministic" * self.deterministic
        suffix += "_zeros" * (not self.stores_dq)
        return f"jax_fa4_preprocess_{self.arch}_{self.dtype}_{self.dims}{suffix}"

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.tile_m

    @property
    def smem_bytes(self) -> int:
        """Tiles of out and dout, a full and an empty barrier."""
        return 2 * self.dout_bytes + 2 * MBARRIER_BYTES

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        return (
            self.tensor_map("out", self.tile_m),
            self.tensor_map("dout", self.tile_m),
            PointerParam(name="lse", dtype="float32", dims=("batch", "q_heads", "q_len")),
            PointerParam(name="dlse", dtype="float32", dims=("batch", "q_heads", "q_len")),
            *self.statistics,
            self.dq_sum,
            *self.turns,
            *self.done,
            *((schedule_param("q"),) if self.has_cu_seqlens else ()),
            *(ScalarParam(name=name) for name in ("q_len", "q_heads", "kv_heads")),
            *self.slots,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostprocessConfig(TileConfig):
    """A CTA turns the float32 dq of `tile_m` queries of one head into the result.

    Or so many keys' dk or dv, of whose parts it makes the sum first; head_dim is then that of the array.
    """

    kernel: Literal["postprocess"] = "postprocess"
    array: Literal["dq", "dk", "dv"] = "dq"

    @property
    def columns(self) -> int:
        """Of a tile in shared memory: whole slabs."""
        return round_up(self.head_dim, self.slab)

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        suffix = "_cu_seqlens" * self.has_cu_seqlens + f"_{self.array}" * (self.array != "dq")
        return f"jax_fa4_postprocess_{self.arch}_{self.dtype}_{self.dims}{suffix}"

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return WARPGROUP

    @property
    def smem_bytes(self) -> int:
        """The tile in the inputs' type."""
        return self.tile_m * self.columns * self.element_bytes

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        extents: tuple[Extent, ...] = ("q_len", "q_heads")
        if self.array != "dq":
            extents = ("kv_len", "kv_heads", "head_splits")
        dims: tuple[Extent, ...] = (*QUERY_EXTENTS, "head_dim")
        packed: tuple[KernelParam, ...] = ()
        if self.has_cu_seqlens:
            schedules = (schedule_param("q"), *((schedule_param("kv"),) if self.counts_adders else ()))
            packed = (*schedules, *rows_of("dq", self.dtype, dims))
        return (
            self.tensor_map(self.array, self.tile_m),
            self.dq_sum if self.array == "dq" else parts_param(self.array),
            *((PointerParam(name="softmax_scale", dtype="float32"),) if self.array != "dv" else ()),
            *(self.turns if self.array == "dq" else ()),
            *(ScalarParam(name=name) for name in extents),
            *(self._adders if self.array == "dq" else ()),
            *packed,
            *self.slots,
        )

    @property
    def _adders(self) -> tuple[KernelParam, ...]:
        if not self.counts_adders:
            return ()
        return (*self.done, ScalarParam(name="kv_heads"), ScalarParam(name="dq_adders"))


def parts_param(array: Literal["dk", "dv"]) -> PointerParam:
    """Parts of dk or dv in float32, one for each CTA that has some of a kv head's query heads.

    In tiles in the order of the threads' registers, as of dq.
    """
    columns: Extent = "head_dim" if array == "dk" else "head_dim_v"
    dims: tuple[Extent, ...] = ("batch", "kv_heads", "head_splits", "padded_kv_len", columns)
    return PointerParam(name=f"{array}_sum", dtype="float32", dims=dims, pointee_align=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeysConfig(TileConfig):
    """What the kernels share that make scores again: a CTA, or two, own `tile_n` keys and walk over tiles of q."""

    tile_n: int
    has_left: bool = False
    has_right: bool = False
    has_q_offset: bool = False
    has_q_lengths: bool = False
    has_kv_lengths: bool = False
    has_segments: bool = False
    has_mask: bool = False
    has_softcap: bool = False
    bias: Literal["float32", "bfloat16", "float16"] | None = None

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return WARPGROUPS

    @property
    def threads(self) -> int:
        """Of a CTA, the producer warpgroup included."""
        return (1 + self.warpgroups) * WARPGROUP

    @property
    def producer_registers(self) -> int:
        """A thread of the producer warpgroup keeps so many."""
        return PRODUCER_REGISTERS[WARPGROUPS]

    @property
    def consumer_registers(self) -> int:
        """A consumer thread gets so many: an equal part of what the producer leaves."""
        return consumer_registers(self.producer_registers, self.warpgroups)

    @property
    def k_steps(self) -> int:
        """Of MMA_COLUMNS, over the head dim that q and k share."""
        return -(-self.head_dim // MMA_COLUMNS)

    @property
    def v_steps(self) -> int:
        """Likewise of v and dout."""
        return -(-self.head_dim_v // MMA_COLUMNS)

    @property
    def k_bytes(self) -> int:
        """Of a tile of k."""
        return self.tile_n * self.columns * self.element_bytes

    @property
    def v_bytes(self) -> int:
        """Of a tile of v."""
        return self.tile_n * self.v_columns * self.element_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig(KeysConfig):
    """The main kernel: a CTA owns `tile_n` keys of one kv head, 64 for each of two consumer warpgroups.

    It walks over tiles of `tile_m` queries of all query heads that read this kv head, held in a ring of `q_stages` for
    q and one of `dout_stages` for dout; or of some of these heads, if `splits_heads`. A consumer holds k of the first
    `k_register_steps` steps of 16 columns in registers, and v likewise, so that products of scores read less of shared
    memory. Raises ValueError where shared memory, registers or an instruction forbid it.
    """

    kernel: Literal["backward"] = "backward"
    q_stages: int
    dout_stages: int
    ds_stages: int
    k_register_steps: int = 0
    v_register_steps: int = 0
    splits_heads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits_heads and (self.is_wide or self.has_cu_seqlens):
            raise ValueError("splits_heads is for head dims up to 128 without cu_seqlens")
        for name, steps in (("k_register_steps", self.k_steps), ("v_register_steps", self.v_steps)):
            most = 0 if self.is_wide else steps
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if self.tile_n != WARPGROUPS * WARPGROUP_ROWS:
            raise ValueError(f"tile_n must be {WARPGROUPS * WARPGROUP_ROWS}, got {self.tile_n}")
        if self.q_stages < 2:
            raise ValueError(f"q_stages must be at least 2, got {self.q_stages}")
        if self.dout_stages < 1:
            raise ValueError(f"dout_stages must be at least 1, got {self.dout_stages}")
        if self.ds_stages not in self.ds_stages_that_work:
            raise ValueError(f"ds_stages must be in {self.ds_stages_that_work}, got {self.ds_stages}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(
                f"q_stages={self.q_stages}, dout_stages={self.dout_stages} need {self.smem_bytes} bytes of smem, "
                f"{SMEM_LIMIT} exist"
            )
        check_registers(self.threads, **self.kept_registers)
        needed = self.accumulator_registers + self.other_registers
        if needed > self.consumer_registers:
            raise ValueError(
                f"tile_m={self.tile_m}, tile_n={self.tile_n}, head_dim={self.head_dim}, head_dim_v={self.head_dim_v} "
                f"need {needed} registers a thread, {self.consumer_registers} exist"
            )

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        features = feature_names(self)
        features += ["deterministic"] if self.deterministic else []
        features += ["splits"] if self.splits_heads else []
        return "_".join(["jax_fa4", self.kernel, self.arch, self.dtype, self.dims, *features])

    @property
    def kept_registers(self) -> dict[str, int]:
        """Of a thread, for the roles that give others away."""
        return {"producer": self.producer_registers}

    @property
    def other_registers(self) -> int:
        """What a consumer thread needs beside its accumulators."""
        return OTHER_REGISTERS

    @property
    def ds_stages_that_work(self) -> tuple[int, ...]:
        """With one, a step would wait for the one before."""
        return (2,)

    @property
    def preprocess(self) -> PreprocessConfig:
        """The kernel that runs before."""
        return PreprocessConfig(**self._shared())

    @property
    def postprocess(self) -> PostprocessConfig:
        """The kernel that runs after."""
        # it adds nothing
        return PostprocessConfig(**{**self._shared(), "deterministic": False})

    @property
    def key_postprocess(self) -> tuple[PostprocessConfig, ...]:
        """The kernels that make sums of the parts of dk and dv, if there are parts."""
        if not self.splits_heads:
            return ()
        whole = dataclasses.replace(self.postprocess, tile_m=self.tile_n, stores_dq=False)
        head_dims = {"dk": self.head_dim, "dv": self.head_dim_v}
        return tuple(
            dataclasses.replace(whole, array=array, head_dim=d, head_dim_v=d)  # type: ignore[arg-type]
            for array, d in head_dims.items()
        )

    @property
    def kernels(self) -> tuple[PreprocessConfig | BackwardConfig | PostprocessConfig, ...]:
        """All in the order of their launches."""
        return self.preprocess, self, self.postprocess, *self.key_postprocess

    @property
    def cluster_ctas(self) -> int:
        """Of the cluster that owns a tile of keys."""
        return self.key_ctas

    @property
    def dk_columns(self) -> int:
        """Of dk in registers: without padding."""
        return self.k_steps * MMA_COLUMNS

    @property
    def dv_columns(self) -> int:
        """Likewise of dv."""
        return self.v_steps * MMA_COLUMNS

    @property
    def weights_late(self) -> bool:
        """Whether p is made block by block beside ds, because the cap's slope must outlive it."""
        return self.has_softcap

    @property
    def accumulator_registers(self) -> int:
        """Of a consumer thread where most are alive: dk, dv, p and dp in float32, and what it holds of k and v."""
        held = (self.k_register_steps + self.v_register_steps) * MMA_COLUMNS
        return (self._elements_a_row + held * self.element_bytes // FLOAT_BYTES) * WARPGROUP_ROWS // WARPGROUP

    @property
    def row_bytes(self) -> int:
        """Of one statistic of a tile's queries."""
        return self.tile_m * FLOAT_BYTES

    @property
    def ds_bytes(self) -> int:
        """Of one stage of ds."""
        return self.tile_m * self.tile_n * self.element_bytes

    @property
    def dq_bytes(self) -> int:
        """Of a tile of dq in float32, if it leaves through shared memory."""
        return WARPGROUPS * self.dq_part_floats * FLOAT_BYTES

    @property
    def barrier_bytes(self) -> int:
        """A full and an empty barrier for k, for v and for each stage of both rings."""
        return 2 * (2 + self.q_stages + self.dout_stages) * MBARRIER_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        rings = self.q_stages * (self.q_bytes + self.row_bytes) + self.dout_stages * (self.dout_bytes + self.row_bytes)
        tiles = self.k_bytes + self.v_bytes + self.ds_stages * self.ds_bytes + self.dq_bytes
        return tiles + rings + self.barrier_bytes

    @property
    def has_padding(self) -> bool:
        """Whether keys may be in no sequence."""
        return self.has_kv_lengths or self.has_cu_seqlens

    @property
    def clears_queries(self) -> bool:
        """Whether what lies in a tile beyond the last query may be NaN."""
        return self.has_q_lengths or self.has_cu_seqlens

    @property
    def longest_first(self) -> bool:
        """Tiles differ in length only where the mask has a right edge and no left one."""
        return self.has_right and not self.has_left

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        keys = ("k", "v") if self.splits_heads else ("k", "v", "dk", "dv")
        return (
            self.tensor_map("q", self.tile_m),
            self.tensor_map("dout", self.tile_m),
            *(self.tensor_map(name, WARPGROUP_ROWS) for name in keys),
            *self.statistics,
            self.dq_sum,
            *self.turns,
            *self.done,
            *self._packed,
            *feature_params(self, ranges=None if self.deterministic else "query_blocks", tiles="kv_tiles"),
            *(ScalarParam(name=name) for name in ("q_len", "kv_len", "q_heads", "kv_heads", "batch")),
            *self._parts,
        )

    @property
    def _parts(self) -> tuple[KernelParam, ...]:
        return (parts_param("dk"), parts_param("dv"), ScalarParam(name="head_splits")) if self.splits_heads else ()

    @property
    def _packed(self) -> tuple[KernelParam, ...]:
        if not self.has_cu_seqlens:
            return ()
        columns: tuple[tuple[str, Extent], ...] = (("dk", "head_dim"), ("dv", "head_dim_v"))
        arrays = (rows_of(name, self.dtype, (*KEY_EXTENTS, dim)) for name, dim in columns)
        return (schedule_param("kv"), *(param for array in arrays for param in array), *self.slots)

    @property
    def _elements_a_row(self) -> int:
        """Of dk, dv, p and dp."""
        return self.dk_columns + self.dv_columns + 2 * self.tile_m

    def _shared(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(TileConfig)}
