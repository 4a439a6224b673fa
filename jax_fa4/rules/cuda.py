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
from jax_fa4.plan.axes import Axes
from jax_fa4.rules.launch import Result, launch
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
    if is_gpu and not (exports and export.asked_archs()):
        return Target((_arch_of(backend.devices()[0]),), exports)
    return Target(export.target_archs(), exports)


def _arch_of(device: jax.Device) -> str:
    return f"sm_{device.compute_capability.replace('.', '')}a"


def _forward(*args: jax.Array, fields: tuple[str, ...], spec: AttentionSpec, target: Target) -> list[jax.Array]:
    """Operands in logical order, the custom call, and its results in the primitive's order."""
    configs = [config for arch in target.archs if (config := forward_config(spec, arch))]  # the caller saw one for each
    binaries = [cubins.get(config) for config in configs]
    plans = [
        forward.forward(config, forward.Kernel(cubin.key, cubin.entry), spec.layout)
        for config, cubin in zip(configs, binaries, strict=True)
    ]
    for cubin, plan in zip(binaries, plans, strict=True):
        cubins.check_params(cubin, plan.launches[0])
        cubins.register(cubin)

    x = unpack(fields, args)
    names = forward.operand_names(configs[0])
    axes = [forward.axes_of(name, spec.layout) for name in names]
    batch, (t, n), e = x.q.shape[:-3], x.q.shape[-3:-1], x.v.shape[-1]
    kv_heads = x.k.shape[-2]
    out_axes, lse_axes = (forward.axes_of(name, spec.layout) for name in forward.RESULTS)
    results = (
        Result(out_axes, (*batch, kv_heads, t, spec.group, e), spec.dtype),
        Result(lse_axes, (*batch, kv_heads, spec.group, t), "float32"),
    )
    images = encode_images({c.key: c.image for c in binaries}) if target.embeds else None
    out, lse = launch(
        [_to_logical(getattr(x, name), a, spec.group) for name, a in zip(names, axes, strict=True)],
        axes,
        results,
        plan=encode(plans),
        images=images,
    )
    return [jnp.moveaxis(out, -4, -3).reshape(*batch, t, n, e), lse.reshape(*batch, n, t)]


def _to_logical(a: jax.Array, axes: Axes, group: int) -> jax.Array:
    """[*B, T, N, D] to [*B, K, T, G, D], and [*B, S, K, D] to [*B, K, S, D]; the call's layout undoes it."""
    if axes.logical.startswith("kt"):
        *lead, n, dim = a.shape
        return jnp.moveaxis(a.reshape(*lead, n // group, group, dim), -3, -4)
    return jnp.moveaxis(a, -2, -3) if axes.logical else a
