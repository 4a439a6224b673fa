"""The launch plan for few queries: kernels in one call, with scratch that is a result of the call like out and lse.

schedule  offsets, lengths               -> q_schedule: the tiles of packed queries
decode    q, k, v                        -> partial_out, partial_lse: one result a split of the keys; split_counts
combine   partial_out, partial_lse       -> out, lse

Where splits are few the CTAs of a cluster make those of a tile and merge them: decode has out and lse itself.

Where keys lie in pages, the batch is an axis of every array: no batch axis is common to all, since the pool has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_fa4.configs import (
    SCHEDULE_FIELDS,
    CombineConfig,
    Config,
    DecodeConfig,
    GroupedSm100Config,
    PointerParam,
    ScheduleConfig,
)
from jax_fa4.configs.decode import COMBINE_WARPS, TILE_ROWS
from jax_fa4.configs.schedule import num_slots
from jax_fa4.plan.axes import OFFSETS, SEQUENCE_LENGTHS, Axes
from jax_fa4.plan.bind import SCALARS, SEGMENT_ENDS, Buffers, Kernel, axes_of
from jax_fa4.plan.expr import Expr, ExprLike, as_expr, ceil_div, maximum, multiprocessors
from jax_fa4.plan.plan import Launch, Plan
from jax_fa4.spec import Layout

__all__ = ["decode", "operand_names", "page_axes", "result_names"]

ARRAYS = ("q", "k", "v")
RESULTS = ("out", "lse")
SCRATCH = ("partial_out", "partial_lse", "split_counts", "q_schedule")
CTAS_PER_PLACE = 32  # at least, if there are splits for them: they end at different times
POOLS = {"k": Axes("kord", "orkd"), "v": Axes("kore", "orke")}
TABLES = {True: Axes("kbj", "kbj"), False: Axes("bj", "bj", batched=False)}  # by whether XLA may split the call


def operand_names(config: DecodeConfig | GroupedSm100Config, schedule: ScheduleConfig | None = None) -> tuple[str, ...]:
    """The call's operands in order."""
    main = config.kernels[0]
    params = (*main.params, *(() if schedule is None else schedule.params))
    pointers = dict.fromkeys(param.name for param in params if isinstance(param, PointerParam))
    others = [name for name in pointers if name not in (*ARRAYS, *RESULTS, *SCRATCH, "sinks")]
    return (*ARRAYS, *others, *(("sinks",) if config.has_sinks else ()))


def result_names(configs: Iterable[DecodeConfig | GroupedSm100Config]) -> tuple[str, ...]:
    """The results in order of a call that any of `configs` may serve: out and lse, then scratch."""
    names = {param.name for config in configs for param in config.kernels[0].params}
    return (*RESULTS, *(name for name in SCRATCH if name in names))


def page_axes(
    config: DecodeConfig | GroupedSm100Config,
    schedule: ScheduleConfig | None,
    layout: Layout,
    results: Sequence[str],
    *,
    splits: bool,
) -> dict[str, Axes]:
    """Axes of all arrays of a call whose keys lie in pages; `splits`: XLA may give each device some kv heads."""
    others = {"page_table": TABLES[splits]}
    if schedule is not None:
        lengths = SEQUENCE_LENGTHS[splits]
        others |= {"cu_seqlens_q": OFFSETS[splits], "q_lengths": lengths, "kv_lengths": lengths}
    names = [name for name in (*operand_names(config, schedule), *results) if name not in (*SCALARS, "k", "v")]
    axes = {name: others.get(name) or axes_of(name, layout) for name in names}
    with_batch = {name: Axes("kb" + a.logical[1:], "b" + a.memory) if a.batched else a for name, a in axes.items()}
    return {**with_batch, **POOLS, "page_table": TABLES[splits]}


def decode(
    config: DecodeConfig | GroupedSm100Config,
    kernels: Sequence[Kernel],
    layout: Layout,
    axes: Mapping[str, Axes] | None = None,
    schedule: ScheduleConfig | None = None,
    *,
    results: Sequence[str],
    num_splits: int,
) -> Plan:
    """The plan of a call whose q, k, v and out lie in memory as `layout` says.

    `kernels`: of `schedule`, if there is one, and of `config.kernels`; `axes` are `page_axes` of a call with pages, or
    those of a mask and a bias; `results`: `result_names` of all configs of the call; `num_splits`: of a tile at most.
    """
    buffers = _Buffers(operand_names(config, schedule), results, config, layout, axes, num_splits=num_splits)
    configs: list[Config] = [*(() if schedule is None else (schedule,)), *config.kernels]
    launches = [buffers.launch_of(c, kernel) for c, kernel in zip(configs, kernels, strict=True)]
    return Plan(arch=config.arch, operands=buffers.operands, results=buffers.results, launches=tuple(launches))


class _Buffers(Buffers):
    def __init__(self, *args: Any, num_splits: int) -> None:
        self.num_splits = num_splits
        super().__init__(*args)

    @property
    def has_clusters(self) -> bool:
        """The CTAs of a cluster merge splits: there is no array of theirs."""
        return isinstance(self.config, DecodeConfig) and self.config.has_clusters

    def launch_of(self, config: Config, kernel: Kernel) -> Launch:
        """The launch of one of the call's kernels."""
        if isinstance(config, ScheduleConfig):
            return self.launch(config, kernel, self.one_cta())
        if isinstance(config, CombineConfig):
            return self.launch(config, kernel, self.rows(config), programmatic=True)
        launch = self.launch(config, kernel, self.split_tiles())
        return dataclasses.replace(launch, cluster=(self.num_splits, 1, 1)) if self.has_clusters else launch

    def split_tiles(self) -> Expr:
        """A CTA for every split of each tile of each kv head, or for several where tiles are many."""
        tiles, splits = self._tiles(), as_expr(self.extents["num_splits"])
        if isinstance(self.config, DecodeConfig) and not self.has_clusters:
            ctas = CTAS_PER_PLACE * self.config.ctas_per_sm * multiprocessors()
            splits = ceil_div(splits, maximum(tiles * splits // ctas, 1))
        return tiles * splits

    def rows(self, combine: CombineConfig) -> Expr:
        """As many warps as merge the splits of a query, for every query of every head."""
        rows = self.extents["q_len"] * self._of("q", "g") * self.extents["kv_heads"] * self.extents["batch"]
        return ceil_div(rows * combine.row_warps, COMBINE_WARPS)

    def _tiles(self) -> Expr:
        if "cu_seqlens_q" in self.buffers:
            return self.extents["q_slots"] * self._of("q", "k")
        if isinstance(self.config, DecodeConfig):
            tiles = ceil_div(self._of("q", "t"), self._tile_queries())
        else:
            tiles = self.tiles_of_a_head()
        number, axes, _ = self.buffers["q"]
        batch = self._of("q", "b") if "b" in axes.logical else axes.batch(number)
        return tiles * self._of("q", "k") * batch

    def _tile_queries(self) -> Expr:
        return TILE_ROWS // self._of("q", "g")

    def _of(self, name: str, axis: str) -> Expr:
        number, axes, _ = self.buffers[name]
        return axes.size(number, axis)

    def _extents(self) -> dict[str, ExprLike]:
        group, kv_heads, q_len = (self._of("q", axis) for axis in "gkt")
        is_paged = "page_table" in self.buffers
        number, axes, _ = self.buffers["q"]
        splits: ExprLike = self.num_splits if self.has_clusters else self._of("partial_out", "l")
        extents: dict[str, ExprLike] = {
            "q_len": q_len,
            "group": group,
            "q_heads": kv_heads * group,
            "kv_heads": kv_heads,
            "batch": self._of("q", "b") if is_paged else axes.batch(number),
            "head_dim": self._of("q", "d"),
            "head_dim_v": self._of("out", "e"),
            "num_splits": splits,
        }
        if not isinstance(self.config, DecodeConfig):
            extents |= {"q_tiles": self.tiles_of_a_head(), "range": SEGMENT_ENDS, **self.dense_extents()}
        for name in ("q", "out"):
            number, axes, _ = self.buffers[name]
            for what, letter in (("batch", "b" if is_paged else ""), ("row", "t"), ("head", "g")):
                extents[f"{name}_{what}_stride"] = axes.stride(number, letter)
        extents |= self._page_extents() if is_paged else {"kv_len": self._of("k", "s")}
        return extents | (self._schedule_extents() if "cu_seqlens_q" in self.buffers else {})

    def _schedule_extents(self) -> dict[str, ExprLike]:
        """Packed queries are one batch entry."""
        offsets, axes = self._of("cu_seqlens_q", "i"), self.buffers["cu_seqlens_q"].axes
        entries = self._of("q", "b") * (self._of("q", "k") if "k" in axes.logical else 1)
        slots = num_slots(self._of("q", "t"), offsets, self._tile_queries())
        return {
            "sequences": offsets - 1,
            "entry_step": 1,
            "offsets_size": entries * offsets,
            "lengths_size": entries * (offsets - 1),
            "q_slots": slots,
            "q_places": slots + 1,
            "fields": SCHEDULE_FIELDS,
        }

    def _page_extents(self) -> dict[str, ExprLike]:
        slots, page_size, table = self._of("page_table", "j"), self._of("k", "r"), self.buffers["page_table"].axes
        one = slots * self._of("q", "b")
        if "cu_seqlens_q" in self.buffers:  # a row of tables
            slots = slots // maximum(self._of("cu_seqlens_q", "i") - 1, 1)
        has_heads = "k" in table.logical
        return {
            "kv_len": slots * page_size,
            **{
                f"{name}_{what}_stride": self.buffers[name].axes.stride(self.buffers[name].number, letter)
                for name in ("k", "v")
                for what, letter in (("batch", "o"), ("row", "r"), ("head", "k"))
            },
            "page_size": page_size,
            "num_pages": self._of("k", "o"),
            "page_slots": slots,
            "page_table_size": one * self._of("q", "k") if has_heads else one,
            "page_table_head_stride": one if has_heads else 0,
        }
