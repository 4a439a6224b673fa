"""The launch plan for few queries: two kernels in one call, with scratch that is a result of the call like out and lse.

decode    q, k, v                        -> partial_out, partial_lse: one result a split of the keys
combine   partial_out, partial_lse       -> out, lse

Where keys lie in pages, the batch is an axis of every array: no batch axis is common to all, since the pool has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_fa4.configs import DecodeConfig, GroupedSm100Config, PointerParam
from jax_fa4.configs.decode import MIN_CTAS, MIN_SPLIT_KEYS, ROWS_PER_MIN_SPLIT, TILE_ROWS
from jax_fa4.plan.axes import Axes
from jax_fa4.plan.bind import SCALARS, Buffers, Kernel, axes_of
from jax_fa4.plan.expr import Expr, ExprLike, ceil_div, maximum
from jax_fa4.plan.plan import Plan
from jax_fa4.spec import Layout

__all__ = ["RESULTS", "decode", "operand_names", "page_axes"]

ARRAYS = ("q", "k", "v")
SCRATCH = ("partial_out", "partial_lse")
RESULTS = ("out", "lse", *SCRATCH)
POOLS = {"k": Axes("kord", "orkd"), "v": Axes("kore", "orke")}
TABLES = {True: Axes("kbj", "kbj"), False: Axes("bj", "bj", batched=False)}  # by whether XLA may split the call


def operand_names(config: DecodeConfig | GroupedSm100Config) -> tuple[str, ...]:
    """The call's operands in order."""
    main, _ = config.kernels
    pointers = [param.name for param in main.params if isinstance(param, PointerParam)]
    others = [name for name in pointers if name not in (*ARRAYS, *SCRATCH)]
    return (*ARRAYS, *others, *(("sinks",) if config.has_sinks else ()))


def page_axes(config: DecodeConfig | GroupedSm100Config, layout: Layout, *, splits: bool) -> dict[str, Axes]:
    """Axes of all arrays of a call whose keys lie in pages; `splits`: XLA may give each device some kv heads."""
    names = [name for name in (*operand_names(config), *RESULTS) if name not in SCALARS]
    axes = {name: axes_of(name, layout) for name in names if name not in ("k", "v", "page_table")}
    with_batch = {name: Axes("kb" + a.logical[1:], "b" + a.memory) for name, a in axes.items()}
    return {**with_batch, **POOLS, "page_table": TABLES[splits]}


def decode(
    config: DecodeConfig | GroupedSm100Config,
    kernels: Sequence[Kernel],
    layout: Layout,
    axes: Mapping[str, Axes] | None = None,
) -> Plan:
    """The plan of a call whose q, k, v and out lie in memory as `layout` says; `kernels`: of `config.kernels`.

    `axes` are `page_axes` of a call with pages, or those of a mask and a bias.
    """
    buffers = _Buffers(operand_names(config), RESULTS, config, layout, axes)
    main, combine = config.kernels
    launches = (
        buffers.launch(main, kernels[0], buffers.split_tiles()),
        buffers.launch(combine, kernels[1], buffers.rows(), programmatic=True),
    )
    return Plan(arch=config.arch, operands=buffers.operands, results=buffers.results, launches=launches)


class _Buffers(Buffers):
    def split_tiles(self) -> Expr:
        """A CTA for every `cta_splits` splits of each tile of each kv head, or for every split."""
        splits = self.extents["num_splits"]
        if isinstance(self.config, DecodeConfig):
            splits = ceil_div(splits, self.extents["cta_splits"])
        return self._tiles() * splits

    def rows(self) -> Expr:
        """A CTA for every query of every head."""
        return self.extents["q_len"] * self._of("q", "g") * self.extents["kv_heads"] * self.extents["batch"]

    def _tiles(self) -> Expr:
        if isinstance(self.config, DecodeConfig):
            tiles = ceil_div(self._of("q", "t"), TILE_ROWS // self._of("q", "g"))
        else:
            tiles = self.tiles_of_a_head()
        number, axes, _ = self.buffers["q"]
        batch = self._of("q", "b") if "b" in axes.logical else axes.batch(number)
        return tiles * self._of("q", "k") * batch

    def _of(self, name: str, axis: str) -> Expr:
        number, axes, _ = self.buffers[name]
        return axes.size(number, axis)

    def _extents(self) -> dict[str, ExprLike]:
        group, kv_heads, q_len = (self._of("q", axis) for axis in "gkt")
        is_paged = "page_table" in self.buffers
        number, axes, _ = self.buffers["q"]
        extents: dict[str, ExprLike] = {
            "q_len": q_len,
            "group": group,
            "q_heads": kv_heads * group,
            "kv_heads": kv_heads,
            "batch": self._of("q", "b") if is_paged else axes.batch(number),
            "head_dim": self._of("q", "d"),
            "head_dim_v": self._of("out", "e"),
            "num_splits": self._of("partial_out", "l"),
            "cta_splits": maximum(self._tiles() * self._of("partial_out", "l") // MIN_CTAS, 1),
            "min_split_keys": ceil_div(q_len * group, ROWS_PER_MIN_SPLIT) * MIN_SPLIT_KEYS,
        }
        if not isinstance(self.config, DecodeConfig):
            extents |= {"q_tiles": self.tiles_of_a_head(), "range": 2, **self.dense_extents()}
        for name in ("q", "out"):
            number, axes, _ = self.buffers[name]
            for what, letter in (("batch", "b" if is_paged else ""), ("row", "t"), ("head", "g")):
                extents[f"{name}_{what}_stride"] = axes.stride(number, letter)
        return extents | (self._page_extents() if is_paged else {"kv_len": self._of("k", "s")})

    def _page_extents(self) -> dict[str, ExprLike]:
        slots, page_size, table = self._of("page_table", "j"), self._of("k", "r"), self.buffers["page_table"].axes
        one = slots * self._of("q", "b")
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
