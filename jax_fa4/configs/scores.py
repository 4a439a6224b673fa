"""The kernel that computes the gradients of scores once more, for what scores depend on beside q and k."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from jax_fa4.configs.backward import WARPGROUPS, BackwardConfig, KeysConfig, PostprocessConfig, PreprocessConfig
from jax_fa4.configs.config import (
    MBARRIER_BYTES,
    SMEM_LIMIT,
    WARPGROUP,
    WARPGROUP_ROWS,
    KernelConfig,
    check_registers,
    round_up,
)
from jax_fa4.configs.decode import CombineConfig, DecodeConfig
from jax_fa4.configs.features import feature_names, feature_params
from jax_fa4.configs.params import KernelParam, PointerParam, ScalarParam
from jax_fa4.configs.schedule import ScheduleConfig, schedule_param

__all__ = ["Config", "ScoresConfig", "score_configs"]

FLOAT_BYTES = 4
WARPS = WARPGROUPS * WARPGROUP // 32  # that compute
WARP_ROWS = WARPGROUP_ROWS * 32 // WARPGROUP
STAGED_PITCH = 40  # floats from one of its rows to the next: writes of neighbouring rows go to different banks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresConfig(KeysConfig):
    """A CTA owns `tile_n` keys, half of them for each of two consumer warpgroups, and walks over tiles of queries.

    `kept` is what it makes of the gradients ds of their scores:

        tiles   their sum over what a bias with a row for each query has one element for: batch entries, query heads
        rows    their sum over queries, for a bias with one row for all of them
        total   the sum of ds times the derivative of its score by the softcap

    Raises ValueError where shared memory forbids it.
    """

    kernel: Literal["backward_scores"] = "backward_scores"
    kept: Literal["tiles", "rows", "total"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tile_m, self.tile_n) != (WARPGROUP_ROWS, WARPGROUPS * WARPGROUP_ROWS):
            raise ValueError(f"tile_m and tile_n must be 64 and 128, got {self.tile_m} and {self.tile_n}")
        if self.bias is None and not self.has_softcap:
            raise ValueError("there must be a bias or a softcap, got neither")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"{self.name} needs {self.smem_bytes} bytes of smem, {SMEM_LIMIT} exist")
        check_registers(self.threads, producer=self.producer_registers)

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        return "_".join(["jax_fa4", self.kernel, self.kept, self.arch, self.dtype, self.dims, *feature_names(self)])

    @property
    def producer_registers(self) -> int:
        """A thread of the producer warpgroup keeps so many: addresses of lengths and windows, beside ring states."""
        return 40

    @property
    def columns(self) -> int:
        """Of q and k in shared memory: head_dim, padded to whole slabs."""
        return round_up(self.head_dim, self.slab)

    @property
    def staged_floats(self) -> int:
        """Of each consumer warp, on their way out: 32 columns of its rows of a tile, or numbers that warps sum."""
        return WARP_ROWS * STAGED_PITCH if self.kept == "tiles" else WARPGROUP_ROWS

    @property
    def staged_bytes(self) -> int:
        """Of all consumer warps."""
        return WARPS * self.staged_floats * FLOAT_BYTES

    @property
    def q_stages(self) -> int:
        """Of q and of dout: two if there is room."""
        return 2 if self._bytes(2, 1) <= SMEM_LIMIT else 1

    @property
    def kv_stages(self) -> int:
        """Of k and of v: two if there is room and a CTA sees more than one head's."""
        return 2 if self.kept == "tiles" and self._bytes(2, 2) <= SMEM_LIMIT else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self._bytes(self.q_stages, self.kv_stages)

    @property
    def has_padding(self) -> bool:
        """Whether queries may be in no sequence."""
        return self.has_q_lengths or self.has_cu_seqlens

    @property
    def result(self) -> PointerParam:
        """What it writes."""
        match self.kept:
            case "tiles":
                size = 4 if self.bias == "float32" else 2
                return PointerParam(name="dbias", dtype=self.bias or "", dims=("bias_size",), pointee_align=size)
            case "rows":
                return PointerParam(name="dbias_rows", dtype="float32", dims=("batch", "q_heads", "kv_len"))
            case "total":
                tiles = "kv_slots" if self.has_cu_seqlens else "kv_tiles"
                return PointerParam(name="dsoftcap_parts", dtype="float32", dims=("batch", "q_heads", tiles))  # type: ignore[arg-type]

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        shares = ("bias_batches", "bias_heads", "query_shares") if self.kept == "tiles" else ()
        return (
            self.tensor_map("q", self.tile_m),
            self.tensor_map("dout", self.tile_m),
            *(self.tensor_map(name, WARPGROUP_ROWS) for name in ("k", "v")),
            *self.statistics,
            self.result,
            *((schedule_param("kv"),) if self.has_cu_seqlens else ()),
            *feature_params(self, ranges="key_blocks", tiles="q_tiles"),
            *(ScalarParam(name=name) for name in ("q_len", "kv_len", "q_heads", "kv_heads", "batch")),
            *(ScalarParam(name=name) for name in shares),  # type: ignore[arg-type]
            *((ScalarParam(name="q_slots"),) if self.has_cu_seqlens else ()),
        )

    def _bytes(self, q_stages: int, kv_stages: int) -> int:
        tiles = q_stages * (self.q_bytes + self.dout_bytes) + kv_stages * (self.k_bytes + self.v_bytes)
        return tiles + self.staged_bytes + 2 * 2 * (q_stages + kv_stages) * MBARRIER_BYTES


def score_configs(main: BackwardConfig, wrt: Collection[str], *, bias_has_rows: bool) -> tuple[ScoresConfig, ...]:
    """The kernels that a backward has beside those of `main` for the gradients of some operands.

    `bias_has_rows`: the bias has a row for each query.
    """
    names = {field.name for field in dataclasses.fields(ScoresConfig)} - {"kernel", "kept", "deterministic"}
    shared = {field.name: getattr(main, field.name) for field in dataclasses.fields(main) if field.name in names}
    kept: list[Literal["tiles", "rows", "total"]] = []
    if "bias" in wrt:
        kept.append("tiles" if bias_has_rows else "rows")
    if "softcap" in wrt:
        kept.append("total")
    return tuple(ScoresConfig(kept=each, **shared) for each in kept)


Config = (
    KernelConfig
    | BackwardConfig
    | PreprocessConfig
    | PostprocessConfig
    | ScoresConfig
    | DecodeConfig
    | CombineConfig
    | ScheduleConfig
)
