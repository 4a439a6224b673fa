"""The lowering for NVIDIA GPUs: our kernel where there is one, else blockwise JAX with a warning or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_fa4 import cubins, export
from jax_fa4.configs import forward_config
from jax_fa4.plan import encode, encode_images, forward
from jax_fa4.rules.launch import Result, launch
from jax_fa4.rules.logical import dense_operand, logical
from jax_fa4.rules.pack import unpack
from jax_fa4.rules.sharding import clean
from jax_fa4.spec import AttentionSpec
from jax_fa4.support import warn_fallback, why_unsupported

__all__ = ["blockwise_only", "forward_lowering", "unless_kernel_asked"]

Lowering = Callable[..., Any]


class Target(NamedTuple):
    """What a program is lowered for."""

    archs: tuple[str, ...]  # "sm_90a"
    embeds: bool  # an exported program carries its cubins
    splits: bool  # XLA may give each device a part of the call


def forward_lowering(blockwise: Lowering) -> Lowering:
    """The forward's lowering for cuda; `blockwise` is that of every other platform."""

    def lower(ctx: Any, *args: Any, fields: tuple[str, ...], spec: AttentionSpec) -> Any:
        target = _target(ctx)
        if spec.implementation == "xla":
            return blockwise(ctx, *args, fields=fields, spec=spec)
        if reasons := [reason for arch in target.archs if (reason := why_unsupported(spec, arch))]:
            _fall_back(spec, reasons[0])
            return blockwise(ctx, *args, fields=fields, spec=spec)
        rule = clean(mlir.lower_fun(_forward, multiple_results=True))
        return rule(ctx, *args, fields=fields, spec=spec, target=target)

    return lower


def unless_kernel_asked(blockwise: Lowering) -> Lowering:
    """The lowering of platforms that have no kernels."""

    def lower(ctx: Any, *args: Any, spec: AttentionSpec, **params: Any) -> Any:
        if spec.implementation == "kernel":
            platforms = " and ".join(ctx.module_context.platforms)
            raise NotImplementedError(f"implementation='kernel' needs an NVIDIA GPU, this program is for {platforms}")
        return blockwise(ctx, *args, spec=spec, **params)

    return lower


def blockwise_only(blockwise: Lowering, what: str) -> Lowering:
    """The cuda lowering of something that has no kernel at all yet."""

    def lower(ctx: Any, *args: Any, spec: AttentionSpec, **params: Any) -> Any:
        if spec.implementation != "xla":
            _fall_back(spec, f"jax_fa4 has no {_target(ctx).archs[0]} kernel for {what}")
        return blockwise(ctx, *args, spec=spec, **params)

    return lower


def _fall_back(spec: AttentionSpec, reason: str) -> None:
    if spec.implementation == "kernel":
        raise NotImplementedError(f"implementation='kernel': {reason}")
    warn_fallback(reason)


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
    """Operands in logical order, the custom call, and its results in the primitive's order."""
    configs = [forward_config(spec, arch) for arch in target.archs]
    binaries = [cubins.get(config) for config in configs]
    x = unpack(fields, args)
    dense = {
        name: dense_operand(a, x, splits=target.splits)
        for name in ("mask", "bias")
        if (a := getattr(x, name)) is not None
    }
    dense_axes = {name: axes for name, (_, axes) in dense.items()}
    plans = [
        forward.forward(config, forward.Kernel(cubin.key, cubin.entry), spec.layout, dense_axes)
        for config, cubin in zip(configs, binaries, strict=True)
    ]
    for cubin, plan in zip(binaries, plans, strict=True):
        cubins.check_params(cubin, plan.launches[0])
        cubins.register(cubin)

    names = forward.operand_names(configs[0])
    axes = [dense_axes.get(name) or forward.axes_of(name, spec.layout) for name in names]
    batch, (t, n), e = x.q.shape[:-3], x.q.shape[-3:-1], x.v.shape[-1]
    kv_heads = x.k.shape[-2]
    out_axes, lse_axes = (forward.axes_of(name, spec.layout) for name in forward.RESULTS)
    results = (
        Result(out_axes, (*batch, kv_heads, t, spec.group, e), spec.dtype),
        Result(lse_axes, (*batch, kv_heads, spec.group, t), "float32"),
    )
    images = encode_images({c.key: c.image for c in binaries}) if target.embeds else None
    out, lse = launch(
        [dense[name][0] if name in dense else logical(name, x, configs[0]) for name in names],
        axes,
        results,
        plan=encode(plans),
        images=images,
    )
    return [jnp.moveaxis(out, -4, -3).reshape(*batch, t, n, e), lse.reshape(*batch, n, t)]
