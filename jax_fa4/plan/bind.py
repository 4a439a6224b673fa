"""What the plans of all calls share: their buffers by name, and kernel parameters bound to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_fa4.configs import (
    SCHEDULE_FIELDS,
    BackwardConfig,
    Config,
    DecodeConfig,
    GroupedSm100Config,
    KernelConfig,
    KernelParam,
    MapParam,
    PointerParam,
    ScalarParam,
    ScoresConfig,
)
from jax_fa4.configs.schedule import num_slots
from jax_fa4.plan.axes import (
    FUSED,
    FUSED_PARTS,
    KEY_BLOCKS,
    KEY_PARTS,
    KEY_SUMS,
    KV_IDS,
    KV_SCHEDULE,
    LSE,
    PARTIAL_LSE,
    PARTIAL_OUT,
    PER_SEQUENCE,
    Q_IDS,
    Q_SCHEDULE,
    QUERY_BLOCKS,
    QUERY_COUNTS,
    QUERY_SUMS,
    QUERY_TURNS,
    ROW_STATISTICS,
    SCALAR,
    SINKS,
    SPLIT_COUNTS,
    TILE_SUMS,
    VALUE_PARTS,
    Axes,
    key_axes,
    query_axes,
    value_axes,
)
from jax_fa4.plan.expr import Expr, ExprLike, as_expr, ceil_div, dim, maximum, minimum, multiprocessors
from jax_fa4.plan.limits import DTYPES
from jax_fa4.plan.params import Param, Pointer, Scalar, TensorMap
from jax_fa4.plan.plan import BufferSpec, Launch
from jax_fa4.spec import Layout

__all__ = ["SCALARS", "SEGMENT_ENDS", "Buffers", "Kernel", "axes_of"]

SEGMENT_ENDS = 4  # of two ranges of blocks that rules/segments.py finds for a tile
SCALARS = ("softmax_scale", "window_left", "window_right", "softcap")
FLOATS = ("lse", "dlse", "sinks", "dbias_rows", "dsoftcap_parts")
INTEGERS = ("cu_seqlens_q", "cu_seqlens_kv", "q_lengths", "kv_lengths", "q_schedule", "kv_schedule", "key_blocks")
ARRAYS = {
    "qkv": FUSED,
    "dqkv": FUSED,
    "q_offset": PER_SEQUENCE,
    "q_lengths": PER_SEQUENCE,
    "kv_lengths": PER_SEQUENCE,
    "sinks": SINKS,
    "q_segment_ids": Q_IDS,
    "kv_segment_ids": KV_IDS,
    "key_blocks": KEY_BLOCKS,
    "query_blocks": QUERY_BLOCKS,
    "lse_log2": ROW_STATISTICS,
    "delta": ROW_STATISTICS,
    "dq_sum": QUERY_SUMS,
    "dq_turn": QUERY_TURNS,
    "dq_done": QUERY_COUNTS,
    "dk_sum": KEY_PARTS,
    "dv_sum": VALUE_PARTS,
    "dbias_rows": KEY_SUMS,
    "dsoftcap_parts": TILE_SUMS,
    "partial_out": PARTIAL_OUT,
    "partial_lse": PARTIAL_LSE,
    "split_counts": SPLIT_COUNTS,
    "q_schedule": Q_SCHEDULE,
    "kv_schedule": KV_SCHEDULE,
}


class Kernel(NamedTuple):
    """What a plan says of a binary."""

    key: str
    entry: str


class Buffer(NamedTuple):
    """One buffer of the call: its number and its axes."""

    number: int
    axes: Axes
    part: int = 0  # of a fused array


def axes_of(name: str, layout: Layout) -> Axes:
    """Axes of a named operand or result; a gradient has those of its array, a mask or a bias its own in each call."""
    q, k, v, out = query_axes(layout), key_axes(layout), value_axes(layout), query_axes(layout, "e")
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": LSE}
    arrays |= {f"d{array}": axes for array, axes in arrays.items()}
    return SCALAR if name in SCALARS else {**arrays, **ARRAYS}[name]


class Buffers:
    """Operands and results of a call by name, and what plans say of them."""

    def __init__(
        self,
        operands: Sequence[str],
        results: Sequence[str],
        config: KernelConfig | BackwardConfig | DecodeConfig,
        layout: Layout,
        others: Mapping[str, Axes] | None = None,
    ) -> None:
        """`config`: of the call's main kernel; `others`: axes that `axes_of` doesn't know, as of a mask and a bias."""
        self.config = config
        self.tile_n = config.tile_n
        others = others or {}
        self.buffers = {
            name: Buffer(i, others.get(name) or axes_of(name, layout)) for i, name in enumerate((*operands, *results))
        }
        for i, (name, axes) in enumerate(FUSED_PARTS.items()):
            for prefix in ("", "d"):
                if whole := self.buffers.get(f"{prefix}qkv"):
                    self.buffers[prefix + name] = Buffer(whole.number, axes, i)
        self.operands = tuple(self._spec(name) for name in operands)
        self.results = tuple(self._spec(name) for name in results)
        self.extents = self._extents()

    def _extents(self) -> dict[str, ExprLike]:
        """The kernels' names for sizes."""
        config, q, k, v = self.config, self.buffers["q"], self.buffers["k"], self.buffers["v"]
        assert not isinstance(config, DecodeConfig), "whose calls have sizes of their own"
        kv_heads = q.axes.size(q.number, "k")
        q_len = q.axes.size(q.number, "t")
        extents: dict[str, ExprLike] = {
            "q_len": q_len,
            "q_tiles": self.tiles_of_a_head(),
            "padded_q_len": ceil_div(q_len, config.tile_m) * config.tile_m,
            "kv_len": k.axes.size(k.number, "s"),
            "q_heads": kv_heads * q.axes.size(q.number, "g"),
            "kv_heads": kv_heads,
            "batch": q.axes.batch(q.number),
            "head_dim": q.axes.size(q.number, "d"),
            "head_dim_v": v.axes.size(v.number, "e"),
            "kv_tiles": ceil_div(k.axes.size(k.number, "s"), config.tile_n),
            "range": SEGMENT_ENDS,
        }
        if isinstance(config, BackwardConfig):
            extents |= {"sum_columns": config.sum_columns, "dq_parts": config.dq_parts}
            extents["dq_adders"] = extents["kv_tiles"] * as_expr(config.tile_adders)
        if "dk_sum" in self.buffers:
            number, axes, _ = self.buffers["dk_sum"]
            padded = extents["kv_tiles"] * as_expr(config.tile_n)
            extents |= {"head_splits": axes.size(number, "l"), "padded_kv_len": padded}
            extents["dq_adders"] *= extents["head_splits"]
        for name, row_and_head in (("q", "tg"), ("out", "tg"), ("dq", "tg"), ("dk", "sk"), ("dv", "sk")):
            if name in self.buffers:
                number, axes, _ = self.buffers[name]
                steps = dict(zip(("batch", "row", "head"), ("", *row_and_head), strict=True))
                extents |= {f"{name}_{what}_stride": axes.stride(number, letter) for what, letter in steps.items()}
        extents |= self.dense_extents()
        if "dbias" in self.buffers:
            extents |= self._shares(extents)
        if "cu_seqlens_q" in self.buffers:
            extents |= self._packed_extents(extents)
        return extents

    def _shares(self, extents: Mapping[str, ExprLike]) -> dict[str, ExprLike]:
        """How many parts a bias has, each summed apart, and how many CTAs share the queries of a tile of keys.

        Where a part is of one head alone, one CTA has them all and loads its keys once.
        """
        number, axes, _ = self.buffers["bias"]
        if axes.batched:
            batches, heads = axes.batch(number), axes.size(number, "k") * axes.size(number, "g")
        else:
            batches, heads = (dim(number, axis) for axis in (-4, -3))
        everything = as_expr(extents["batch"]) * extents["q_heads"]
        heads_a_part = everything // maximum(batches * heads, 1)
        shares = minimum((heads_a_part - 1) * extents["q_tiles"], extents["q_tiles"])
        return {"bias_batches": batches, "bias_heads": heads, "query_shares": maximum(shares, 1)}

    def _packed_extents(self, extents: Mapping[str, ExprLike]) -> dict[str, ExprLike]:
        number, axes, _ = self.buffers["cu_seqlens_q"]
        offsets = axes.size(number, "i")
        entry_step = axes.size(number, "k") if "k" in axes.logical else as_expr(1)
        entries = extents["batch"] * entry_step
        config = self.config
        assert not isinstance(config, DecodeConfig), "which knows no packed sequences"
        q_slots = num_slots(extents["q_len"], offsets, config.tile_m)
        kv_slots = num_slots(extents["kv_len"], offsets, config.tile_n)
        return {
            "sequences": offsets - 1,
            "entry_step": entry_step,
            "offsets_size": entries * offsets,
            "lengths_size": entries * (offsets - 1),
            "q_slots": q_slots,
            "q_slot_rows": q_slots * config.tile_m,
            "q_places": extents["batch"] * q_slots + 1,
            "kv_slots": kv_slots,
            "kv_places": extents["batch"] * kv_slots + 1,
            "fields": SCHEDULE_FIELDS,
        }

    def query_ctas(self, config: KernelConfig) -> Expr:
        """A CTA, or a cluster, for each tile; or as many as run at a time where each computes several."""
        tiles, ctas = self.query_tiles(), config.cluster_ctas
        if config.walks:
            at_a_time = multiprocessors()  # one CTA fits on each; packed tiles are not fewer than `query_tiles`
            tiles = minimum(tiles, at_a_time if ctas == 1 else maximum(at_a_time // ctas, 1))
        elif config.has_cu_seqlens:
            tiles = self.listed_tiles()
        return tiles if ctas == 1 else tiles * ctas

    def one_cta(self) -> Expr:
        """A CTA, where there are heads to list tiles for."""
        return minimum(self.query_heads(), 1)

    def query_slots(self) -> Expr:
        """A CTA for each place that a tile of queries may have, of each query head."""
        return self.extents["q_slots"] * self.query_heads()

    def query_heads(self) -> Expr:
        """Query heads of all batch entries."""
        return as_expr(self.extents["q_heads"]) * self.extents["batch"]

    def listed_keys(self, config: BackwardConfig) -> Expr:
        """A cluster for each tile that a schedule of keys may have, of each kv head."""
        return (self.extents["kv_places"] - as_expr(1)) * self.extents["kv_heads"] * config.cluster_ctas

    def listed_tiles(self) -> Expr:
        """A CTA for each tile that a schedule of queries may have, of each query head."""
        return (self.extents["q_places"] - as_expr(1)) * self.extents["q_heads"]

    def tiles_of_a_head(self) -> Expr:
        """Tiles of queries of a query head, or of those of a whole group."""
        assert not isinstance(self.config, DecodeConfig), "which counts its tiles itself"
        number, axes, _ = self.buffers["q"]
        rows = axes.size(number, "t")
        if isinstance(self.config, GroupedSm100Config):
            rows *= axes.size(number, "g")
        return ceil_div(rows, self.config.tile_m)

    def query_tiles(self) -> Expr:
        """A CTA for each tile of queries of each query head, or of those of a whole group."""
        heads = "kv_heads" if isinstance(self.config, GroupedSm100Config) else "q_heads"
        return self.tiles_of_a_head() * self.extents[heads] * self.extents["batch"]

    def dense_extents(self) -> dict[str, ExprLike]:
        """Strides and sizes of a mask and a bias."""
        names = [name for name in ("mask", "bias") if name in self.buffers]
        return {key: size for name in names for key, size in _dense_extents(name, self.buffers[name]).items()}

    def key_tiles(self) -> Expr:
        """A CTA for each tile of keys of each kv head."""
        return as_expr(self.extents["kv_tiles"]) * self.extents["kv_heads"] * self.extents["batch"]

    def backward_ctas(self, config: BackwardConfig) -> Expr:
        """A cluster for each tile of keys of each kv head, or a CTA for each share of the query heads."""
        ctas = self.key_tiles() * config.cluster_ctas
        return ctas * self.extents["head_splits"] if config.splits_heads else ctas

    def score_tiles(self, config: ScoresConfig) -> Expr:
        """A CTA for each tile of keys of each query head, or of what of a bias is summed apart."""
        extents = self.extents
        if config.has_cu_seqlens:
            return (extents["kv_places"] - as_expr(1)) * extents["q_heads"]
        if config.kept == "tiles":
            parts = as_expr(extents["query_shares"]) * extents["bias_heads"] * extents["bias_batches"]
            return parts * extents["kv_tiles"]
        return as_expr(extents["kv_tiles"]) * extents["q_heads"] * extents["batch"]

    def launch(self, config: Config, kernel: Kernel, tiles: Expr, *, programmatic: bool = False) -> Launch:
        """The launch of one of the call's kernels; a programmatic one waits itself for what it reads."""
        return Launch(
            cubin=kernel.key,
            entry=kernel.entry,
            grid=(tiles, 1, 1),
            block=config.threads,
            cluster=(getattr(config, "cluster_ctas", 1), 1, 1),
            smem_bytes=config.smem_bytes,
            programmatic=programmatic,
            params=tuple(self._bind(param) for param in config.params),
        )

    def _spec(self, name: str) -> BufferSpec:
        axes = self.buffers[name].axes
        dims: Mapping[str, int | str | None] = {
            "f": len(FUSED_PARTS),
            "d": self.config.head_dim,
            "e": self.config.head_dim_v,
            "t": "T",
            "s": "S",
            "S": None,
            "g": "G",
            "p": "P",
            "w": getattr(self.config, "sum_columns", None),
            "u": getattr(self.config, "dq_parts", None),
            "m": None,
            "c": SEGMENT_ENDS,
            "b": None,
            "n": None,
            "x": 1,
            "y": 1,
            "z": 1,
            "l": "L",
            "j": None,
            "o": "O",
            "r": getattr(self.config, "page_size", None),
            "i": "I",
            "a": None,
            "v": None,
            "h": None,
            "q": SCHEDULE_FIELDS,
        }
        dtypes = {param.name: param.dtype for param in self.config.params if not isinstance(param, ScalarParam)}
        other = "float32" if name in FLOATS else "int32" if name in INTEGERS else self.config.dtype
        dtype = dtypes.get(name) or dtypes.get(name.removeprefix("d")) or other  # a gradient has that of its array
        batched = bool(axes.logical) and axes.batched
        shape = tuple(dims[axis] for axis in (axes.logical[1:] if batched else axes.logical))
        return BufferSpec(name=name, dtype=dtype, shape=shape, batched=batched)

    def _bind(self, param: KernelParam) -> Param:
        match param:
            case MapParam():
                return self._tensor_map(param)
            case PointerParam():
                itemsize = DTYPES[param.dtype].itemsize
                size = math.prod((as_expr(self.extents[name]) for name in param.dims), start=as_expr(itemsize))
                return Pointer(buffer=self.buffers[param.name].number, extent=size, align=param.pointee_align)
            case ScalarParam():
                return Scalar(dtype="i64" if param.dtype == "int64" else "i32", value=self.extents[param.name])

    def _tensor_map(self, param: MapParam) -> TensorMap:
        """Rows lie apart by the sequence's stride, heads by the innermost head axis's, batches by all axes."""
        index, axes, part = self.buffers[param.name]
        letters = {"q_len": "t", "kv_len": "s", "q_heads": "g", "kv_heads": "k", "batch": ""}
        letters |= {"page_size": "r", "num_pages": "o"}
        outer = param.dims[1:]  # the innermost is contiguous
        dims: list[ExprLike] = [axes.size(index, axes.logical[-1]), *(self.extents[name] for name in outer)]
        strides = tuple(axes.stride(index, letters[name]) * 2 for name in outer)
        return TensorMap(
            buffer=index,
            dtype=param.dtype,
            dims=tuple(dims),
            strides=strides,
            box=param.box,
            offset=part * axes.stride(index, "f") * 2 if part else 0,
            swizzle=param.swizzle,  # type: ignore[arg-type]  # one of the widths that exist
            l2_promotion=param.l2_promotion,  # type: ignore[arg-type]
        )


def _dense_extents(name: str, buffer: Buffer) -> dict[str, ExprLike]:
    """Strides of a mask or a bias, 0 where it has one element for all, and its number of elements."""
    index, axes, _ = buffer
    batch = "" if axes.batched else "b"
    steps = {"batch": batch, "head": "g" if axes.batched else "n", "row": "t"}
    strides: dict[str, ExprLike] = {
        f"{name}_{what}_stride": axes.stride(index, letter) if letter in axes.logical else 0
        for what, letter in steps.items()
    }
    whole = axes.stride(index, "")
    return {**strides, f"{name}_size": axes.batch(index) * whole if axes.batched else whole}
