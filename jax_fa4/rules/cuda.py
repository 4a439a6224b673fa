"""Lowerings to kernels, on NVIDIA GPUs or emulated; a GPU without one for the call runs blockwise JAX and warns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_fa4 import blockwise, cubins, export, scheduling
from jax_fa4.configs import (
    SCHEDULE_FIELDS,
    Config,
    DecodeConfig,
    GroupedSm100Config,
    backward_config,
    backward_schedules,
    decode_config,
    forward_config,
    query_schedule,
    score_configs,
)
from jax_fa4.configs.backward import BackwardConfig
from jax_fa4.configs.decode import MAX_PADDED_PARTIAL_ROWS, MAX_PARTIAL_ROWS, max_splits, merge_of, prefers_decode
from jax_fa4.configs.head_splits import head_splits
from jax_fa4.configs.schedule import num_slots
from jax_fa4.operands import Operands
from jax_fa4.plan import Plan, backward, decode, encode, encode_images, forward
from jax_fa4.plan.axes import OFFSETS, SEQUENCE_LENGTHS, Axes
from jax_fa4.plan.bind import Kernel, axes_of
from jax_fa4.rules import emulated
from jax_fa4.rules.launch import Result, launch
from jax_fa4.rules.logical import (
    dense_operand,
    from_query_heads,
    logical,
    paged,
    query_heads,
    sequence_operand,
    undo_logical,
)
from jax_fa4.rules.pack import always_linear, unpack
from jax_fa4.rules.scores import delta_of, of_bias, of_scale, of_sinks, of_softcap
from jax_fa4.rules.sharding import clean
from jax_fa4.spec import AttentionSpec
from jax_fa4.support import warn_fallback, warn_untried, why_no_gradient, why_unsupported

__all__ = ["BACKWARD", "FORWARD", "KernelCall", "kernel_or", "unless_emulated", "unless_kernel_asked"]

Lowering = Callable[..., Any]
_C = TypeVar("_C")


class Target(NamedTuple):
    """What a program is lowered for."""

    archs: tuple[str, ...]  # "sm_90a"
    embeds: bool = False  # an exported program carries its cubins
    splits: bool = False  # XLA may give each device a part of the call
    emulates: bool = False  # the host runs the PTX of the kernels


class KernelCall(NamedTuple):
    """What kernels do for a primitive, as a function of JAX, and why they can't: a reason or None."""

    function: Callable[..., list[jax.Array]]
    why_not: Callable[[AttentionSpec, str, Mapping[str, Any]], str | None]  # spec, architecture, other parameters


def kernel_or(blockwise: Lowering, call: KernelCall) -> Lowering:
    """The lowering for cuda: kernels unless there are none or the user asked for XLA."""

    def lower(ctx: Any, *args: Any, spec: AttentionSpec, **params: Any) -> Any:
        target = _target(ctx)
        if spec.implementation == "xla":
            return blockwise(ctx, *args, spec=spec, **params)
        if reasons := _why_not(spec, target.archs, lambda arch: call.why_not(spec, arch, params)):
            _fall_back(spec, reasons[0])
            return blockwise(ctx, *args, spec=spec, **params)
        if spec.implementation is None:
            _warn_of_untried(target.archs)
        return _lowered(call)(ctx, *args, spec=spec, target=target, **params)

    return lower


def unless_emulated(lowering: Lowering, call: KernelCall) -> Lowering:
    """`lowering` for any platform, unless the user asked for the emulator."""

    def lower(ctx: Any, *args: Any, spec: AttentionSpec, **params: Any) -> Any:
        if spec.implementation != "emulate":
            return lowering(ctx, *args, spec=spec, **params)
        arch = export.target_archs()[0]
        if reason := call.why_not(spec, arch, params):
            raise NotImplementedError(f"implementation='emulate': {reason}")
        return _lowered(call)(ctx, *args, spec=spec, target=Target((arch,), emulates=True), **params)

    return lower


def _lowered(call: KernelCall) -> Lowering:
    return clean(mlir.lower_fun(call.function, multiple_results=True))


def _why_not(spec: AttentionSpec, archs: tuple[str, ...], why_not: Callable[[str], str | None]) -> list[str]:
    """What keeps a program for `archs` from launching kernels."""
    reasons = [reason for arch in archs if (reason := why_not(arch))]
    if spec.mask.has_segments and len(archs) > 1:  # a kernel is told which key blocks a tile visits: a matter of tiles
        names = " and ".join(archs)
        reasons.append(f"jax_fa4 has kernels for segment ids in programs for one architecture, not for {names}")
    return reasons


def unless_kernel_asked(blockwise: Lowering) -> Lowering:
    """The lowering of platforms that have no kernels."""

    def lower(ctx: Any, *args: Any, spec: AttentionSpec, **params: Any) -> Any:
        if spec.implementation == "kernel":
            platforms = " and ".join(ctx.module_context.platforms)
            raise NotImplementedError(f"implementation='kernel' needs an NVIDIA GPU, this program is for {platforms}")
        return blockwise(ctx, *args, spec=spec, **params)

    return lower


def _fall_back(spec: AttentionSpec, reason: str) -> None:
    if spec.implementation == "kernel":
        raise NotImplementedError(f"implementation='kernel': {reason}")
    warn_fallback(reason)


def _warn_of_untried(archs: tuple[str, ...]) -> None:
    """Unless the user named the architecture."""
    for arch in archs:
        if arch not in (*export.PROVEN, *export.asked_archs()):
            warn_untried(arch)


def _target(ctx: Any) -> Target:
    """The architecture of the devices at hand; without one, or for export, what the user asked for."""
    module = ctx.module_context
    exports = module.lowering_parameters.for_export
    backend = module.backend
    is_gpu = backend is not None and backend.platform in ("gpu", "cuda")
    splits = _splits(module.axis_context)
    if is_gpu and not (exports and export.asked_archs()):
        return Target((_arch_of(backend.devices()[0]),), exports, splits)
    return Target(export.target_archs(), exports, splits)


def _splits(axis_context: Any) -> bool:
    """Whether XLA partitions the program: not on one device, nor where each has its own program (shard_map)."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is not None:
        return mesh.size > 1 and axis_context.manual_axes != frozenset(mesh.axis_names)
    return getattr(axis_context, "num_devices", 1) > 1


def _arch_of(device: jax.Device) -> str:
    return f"sm_{device.compute_capability.replace('.', '')}a"


def _forward(*args: jax.Array, fields: tuple[str, ...], spec: AttentionSpec, target: Target) -> list[jax.Array]:
    """The results of the primitive from those of the call."""
    x = unpack(fields, args)
    if not _has_queries(x):
        return list(blockwise.forward(x))
    if x.page_table is not None and (len(x.batch) > 1 or not _has_sizes(x)):
        _fall_back(spec, "jax_fa4 has no kernel for pages of keys under vmap or in symbolic shapes")
        return list(blockwise.forward(x))
    if x.page_table is not None or _prefers_decode(x, spec, target):
        return _decode(x, spec, target)
    q_len = x.q.shape[-3] if _has_sizes(x) else None
    takes_over = scheduling.takes_over()
    configs = [_present(forward_config(spec, arch, q_len, takes_over=takes_over)) for arch in target.archs]
    schedules = [query_schedule(spec, config) for config in configs]
    kernels = [_kernels([s, c] if s else [c]) for s, c in zip(schedules, configs, strict=True)]
    others, other_axes = _others(x, target)
    plans = [
        forward.forward(c, k.names, spec.layout, other_axes, s, is_fused=spec.is_fused)
        for s, c, k in zip(schedules, configs, kernels, strict=True)
    ]
    batch, (t, n), e = x.q.shape[:-3], x.q.shape[-3:-1], x.v.shape[-1]
    kv_heads = x.k.shape[-2]
    operands = {
        name: others[name] if name in others else logical(name, x, configs[0])
        for name in forward.operand_names(configs[0], schedules[0], is_fused=spec.is_fused)
    }
    results = {
        "out": ((*batch, kv_heads, t, spec.group, e), spec.dtype),
        "lse": ((*batch, kv_heads, spec.group, t), "float32"),
    }
    if x.cu_seqlens_q is not None:
        places = 1 + _num_tiles(t, min(config.tile_m for config in configs), x.cu_seqlens_q)
        results["q_schedule"] = ((*batch, kv_heads, places, SCHEDULE_FIELDS), "int32")
    out, lse, *_ = _call(operands, results, spec, kernels, plans, target, other_axes)
    return [from_query_heads(out), lse.reshape(*batch, n, t)]


def _num_tiles(rows: Any, tile: int, cu_seqlens: jax.Array | None) -> Any:
    """How many tiles the rows of a batch entry make, or how many places for tiles packed sequences have."""
    return -(-rows // tile) if cu_seqlens is None else num_slots(rows, cu_seqlens.shape[-1], tile)


def _has_queries(x: Operands) -> bool:
    """Whether there may be any: without queries, or heads of them, there is nothing to launch."""
    return not any(isinstance(size, int) and size == 0 for size in x.q.shape[-3:-1])


def _has_sizes(x: Operands) -> bool:
    """Whether the sizes that a decode plan depends on are known."""
    return all(isinstance(size, int) for size in (*x.q.shape[-3:-1], x.seqlen_k))


def _prefers_decode(x: Operands, spec: AttentionSpec, target: Target) -> bool:
    if not _has_sizes(x):
        return False
    q_len, group = x.q.shape[-3], spec.group
    configs = [(decode_config(spec, arch, q_len * group), forward_config(spec, arch, q_len)) for arch in target.archs]
    return all(few and prefers_decode(few, whole, q_len, group, x.seqlen_k) for few, whole in configs)


def _decode(x: Operands, spec: AttentionSpec, target: Target) -> list[jax.Array]:
    """The forward's results from the kernels for few queries; the others of the call are scratch."""
    rows = x.q.shape[-3] * spec.group
    configs = [_decode_config(spec, arch, rows) for arch in target.archs]
    schedules = [query_schedule(spec, c) if isinstance(c, DecodeConfig) else None for c in configs]
    batch, (t, n), e = x.q.shape[:-3], x.q.shape[-3:-1], x.v.shape[-1]
    kv_heads = x.k.shape[-2]
    num_splits = _num_splits(x, spec, 1 if target.splits else kv_heads)  # of fewer heads sequences have more
    places = _num_tiles(t, max(configs[0].tile_rows // spec.group, 1), x.cu_seqlens_q)
    tiles = places * math.prod((*batch, kv_heads))
    merge = merge_of(num_splits, tiles if len(configs) == 1 and isinstance(tiles, int) else None)
    configs = [dataclasses.replace(c, merge=merge) if isinstance(c, DecodeConfig) else c for c in configs]
    kernels = [_kernels([*([s] if s else []), *c.kernels]) for s, c in zip(schedules, configs, strict=True)]
    names = decode.result_names(configs)
    is_paged = x.page_table is not None
    others, axes = _others(x, target) if x.cu_seqlens_q is None else ({}, {})
    if is_paged:
        axes = decode.page_axes(configs[0], schedules[0], spec.layout, names, splits=target.splits)
    plans = [
        decode.decode(c, k.names, spec.layout, axes, s, results=names, num_splits=num_splits)
        for s, c, k in zip(schedules, configs, kernels, strict=True)
    ]
    operands = {
        name: others[name] if name in others else logical(name, x, configs[0])
        for name in decode.operand_names(configs[0], schedules[0])
    }
    lead = (*batch, kv_heads)
    if is_paged:
        operands = {name: paged(name, a, x, splits=target.splits) for name, a in operands.items()}
        lead = (kv_heads, *batch)
    made = {
        "out": ((*lead, t, spec.group, e), spec.dtype),
        "lse": ((*lead, spec.group, t), "float32"),
        "partial_out": ((*lead, num_splits, t, spec.group, e), "float32"),
        "partial_lse": ((*lead, t, spec.group, num_splits), "float32"),
        "split_counts": ((*lead, t), "int32"),
    }
    if x.cu_seqlens_q is not None:
        made["q_schedule"] = ((*lead, 1 + places, SCHEDULE_FIELDS), "int32")
    results = {name: made[name] for name in names}
    out, lse, *_ = _call(operands, results, spec, kernels, plans, target, axes)
    if is_paged:
        out, lse = jnp.moveaxis(out, 0, 1), jnp.moveaxis(lse, 0, 1)
    return [from_query_heads(out), lse.reshape(*batch, n, t)]


def _num_splits(x: Operands, spec: AttentionSpec, kv_heads: int) -> int:
    """The most splits of a sequence: with a length of its own it may have one row, and so be split the most."""
    t, n = x.q.shape[-3:-1]
    if x.cu_seqlens_q is not None:
        kv_len = x.seqlen_k // max(x.cu_seqlens_q.shape[-1] - 1, 1)
        splits = min(max_splits(1, kv_len, kv_heads), MAX_PARTIAL_ROWS // (t * n))
    elif x.q_lengths is not None:
        splits = min(max_splits(1, x.seqlen_k, kv_heads), MAX_PADDED_PARTIAL_ROWS // (t * n))
    else:
        splits = max_splits(t * spec.group, x.seqlen_k, kv_heads)
    return max(splits, 1)


def _backward(
    *args: jax.Array, fields: tuple[str, ...], wrt: tuple[str, ...], spec: AttentionSpec, target: Target
) -> list[jax.Array]:
    """The gradients by the operands `wrt` from the results of the call, some of which are scratch."""
    given = unpack(fields, args)
    if not _has_queries(given):
        return [jnp.zeros_like(getattr(given, name)) for name in wrt]
    x = _with_one_value(given)
    configs = [_present(backward_config(spec, arch)) for arch in target.archs]
    splits = _head_splits(x, configs[0]) if len(configs) == 1 else 1
    if splits > 1:
        configs = [dataclasses.replace(configs[0], splits_heads=True)]
    schedules = [backward_schedules(spec, config) for config in configs]
    bias_has_rows = x.bias is not None and x.bias.shape[-2] == x.q.shape[-3]
    scores = [score_configs(config, wrt, bias_has_rows=bias_has_rows) for config in configs]
    kernels = [_kernels([*s, *c.kernels, *g]) for s, c, g in zip(schedules, configs, scores, strict=True)]
    others, other_axes = _others(x, target)
    if "bias" in other_axes:
        other_axes["dbias"] = other_axes["bias"]
    plans = [
        backward.backward(c, k.names, spec.layout, other_axes, s, g, is_fused=spec.is_fused)
        for s, c, g, k in zip(schedules, configs, scores, kernels, strict=True)
    ]
    batch, t, kv_heads = x.q.shape[:-3], x.q.shape[-3], x.k.shape[-2]
    tile_m, tile_n = configs[0].tile_m, configs[0].tile_n
    tiles, key_tiles = _num_tiles(t, tile_m, x.cu_seqlens_q), _num_tiles(x.seqlen_k, tile_n, x.cu_seqlens_q)
    padded = tiles * tile_m
    out, lse, dout, dlse = args[len(fields) :]
    rows = (*batch, kv_heads, spec.group, t)
    arrays = always_linear(fields)
    known = {
        "out": query_heads(out, spec.group),
        "lse": lse.reshape(rows),
        "dout": query_heads(dout, spec.group),
        "dlse": dlse.reshape(rows),
    }
    known |= others
    operands = {
        name: known[name] if name in known else logical(name, x, configs[0])
        for name in backward.operand_names(configs[0], schedules[0], scores[0], is_fused=spec.is_fused)
    }
    of_scores = {
        "dbias": lambda: (operands["bias"].shape, operands["bias"].dtype.name),
        "dbias_rows": lambda: ((*rows[:-1], x.seqlen_k), "float32"),
        "dsoftcap_parts": lambda: ((*rows[:-1], key_tiles), "float32"),
    }
    results = {
        **{f"d{name}": (operands[name].shape, spec.dtype) for name in arrays},
        **{each.result.name: of_scores[each.result.name]() for each in scores[0]},
        "dq_sum": ((*rows[:-1], padded, configs[0].sum_columns), "float32"),
        "lse_log2": ((*rows[:-1], padded), "float32"),
        "delta": ((*rows[:-1], padded), "float32"),
    }
    if configs[0].turns:
        results["dq_turn"] = ((*rows[:-1], tiles, configs[0].dq_parts), "int32")
    if configs[0].done:
        results["dq_done"] = ((*batch, kv_heads), "int32")
    if x.cu_seqlens_q is not None:
        places = {"q_schedule": tiles, "kv_schedule": key_tiles}
        results |= {name: ((*batch, kv_heads, 1 + n, SCHEDULE_FIELDS), "int32") for name, n in places.items()}
    if splits > 1:
        rows = (*batch, kv_heads, splits, -(-x.seqlen_k // tile_n) * tile_n)
        results |= {f"d{name}_sum": ((*rows, operands[name].shape[-1]), "float32") for name in ("k", "v")}
    made = dict(zip(results, _call(operands, results, spec, kernels, plans, target, other_axes), strict=True))
    gradients = {name: undo_logical(name, made[f"d{name}"]) for name in arrays}
    if "softmax_scale" in wrt:
        gradients["softmax_scale"] = of_scale(given, _visited(made, configs[0]), tile_m)
    if "bias" in wrt:
        gradients["bias"] = of_bias(x, made, splits=target.splits)
    if "softcap" in wrt:
        gradients["softcap"] = of_softcap(given, made["dsoftcap_parts"])
    if "sinks" in wrt:
        delta = (
            made["delta"][..., :t] if x.cu_seqlens_q is None else delta_of(known["out"], known["dout"], known["dlse"])
        )
        gradients["sinks"] = of_sinks(x, known["lse"], delta)
    return [gradients[name] for name in wrt]


def _with_one_value(x: Operands) -> Operands:
    """Scalars that vmap has repeated for each entry, so that each has a gradient of its own, become scalars again."""
    scalars = {name: a for name in ("softmax_scale", "softcap") if (a := getattr(x, name)) is not None and a.ndim}
    return x._replace(**{name: a.max(initial=-jnp.inf) for name, a in scalars.items()})


def _visited(made: Mapping[str, jax.Array], config: BackwardConfig) -> jax.Array:
    """The sum of dq, with zeros in tiles of queries that see no key: kernels leave these as they are."""
    if not config.stores_dq:
        return made["dq_sum"]
    visited = jnp.repeat(made["dq_turn"][..., 0] > 0, config.tile_m, axis=-1)
    return jnp.where(visited[..., None], made["dq_sum"], 0)


def _head_splits(x: Operands, config: BackwardConfig) -> int:
    """How many CTAs share a kv head's query heads: 1 if it depends on sizes that are not known."""
    if not all(isinstance(size, int) for size in (*x.batch, *x.q.shape, *x.k.shape)):
        return 1
    (t, n), kv_heads = x.q.shape[-3:-1], x.k.shape[-2]
    entries = math.prod(x.batch) * kv_heads
    return head_splits(config, q_len=t, kv_len=x.seqlen_k, group=n // kv_heads, kv_heads=entries)


def _others(x: Operands, target: Target) -> tuple[dict[str, jax.Array], dict[str, Axes]]:
    """Operands as the call takes them whose axes depend on it: a mask, a bias, what is known of packed sequences."""

    def present(*names: str) -> dict[str, jax.Array]:
        return {name: a for name in names if (a := getattr(x, name)) is not None}

    splits = target.splits
    operands = {name: dense_operand(a, x, splits=splits) for name, a in present("mask", "bias").items()}
    if x.cu_seqlens_q is not None:
        offsets, lengths = present("cu_seqlens_q", "cu_seqlens_kv"), present("q_lengths", "kv_lengths")
        operands |= {name: sequence_operand(a, x, OFFSETS, splits=splits) for name, a in offsets.items()}
        operands |= {name: sequence_operand(a, x, SEQUENCE_LENGTHS, splits=splits) for name, a in lengths.items()}
    return {name: a for name, (a, _) in operands.items()}, {name: axes for name, (_, axes) in operands.items()}


def _decode_config(spec: AttentionSpec, arch: str, rows: int) -> DecodeConfig | GroupedSm100Config:
    config = decode_config(spec, arch, rows)
    assert config is not None, "the lowering has asked whether there is a kernel"
    return config


def _present(config: _C | None) -> _C:
    assert config is not None, "the lowering has asked whether there is a kernel"
    return config


class Kernels(NamedTuple):
    """The binaries of one call on one architecture, in the order of their launches."""

    cubins: list[cubins.Cubin]

    @property
    def names(self) -> list[Kernel]:
        """What a plan says of them."""
        return [Kernel(cubin.key, cubin.entry) for cubin in self.cubins]


def _kernels(configs: Iterable[Config]) -> Kernels:
    """The binaries of some configs, compiled if need be."""
    return Kernels([cubins.get(config) for config in configs])


def _call(
    operands: Mapping[str, jax.Array],
    results: Mapping[str, tuple[tuple[int, ...], str]],
    spec: AttentionSpec,
    kernels: Sequence[Kernels],
    plans: Sequence[Plan],
    target: Target,
    others: Mapping[str, Axes] | None = None,
) -> list[jax.Array]:
    """The custom call on operands in logical order; `results` gives shapes, in the call's order, and dtypes.

    `others`: axes of arrays that `axes_of` doesn't know.
    """
    binaries = [cubin for each in kernels for cubin in each.cubins]
    for cubin, step in zip(binaries, (step for plan in plans for step in plan.launches), strict=True):
        cubins.check_params(cubin, step)
    others = others or {}
    arrays = list(operands.values())
    axes_by_name = {name: others.get(name) or axes_of(name, spec.layout) for name in (*operands, *results)}
    axes = [axes_by_name[name] for name in operands]
    made = tuple(Result(axes_by_name[name], shape, dtype) for name, (shape, dtype) in results.items())
    if target.emulates:
        return emulated.launch(arrays, axes, made, plan=plans[0], ptx={c.key: c.ptx for c in binaries})
    for cubin in binaries:
        cubins.register(cubin)
    images = encode_images({c.key: c.image for c in binaries}) if target.embeds else None
    return launch(arrays, axes, made, plan=encode(plans), images=images)


FORWARD = KernelCall(_forward, lambda spec, arch, params: why_unsupported(spec, arch))
BACKWARD = KernelCall(_backward, lambda spec, arch, params: why_no_gradient(spec, arch))
