"""The lowering for implementation="emulate": a callback to this host, which runs the kernel's PTX in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_fa4 import cubins, emulate, export
from jax_fa4.configs import forward_config
from jax_fa4.operands import Operands
from jax_fa4.plan import forward
from jax_fa4.rules.pack import unpack
from jax_fa4.rules.sharding import clean
from jax_fa4.spec import AttentionSpec
from jax_fa4.support import why_unsupported

__all__ = ["unless_emulated"]

Lowering = Callable[..., Any]
HostArray = np.ndarray[Any, Any]


def unless_emulated(lowering: Lowering) -> Lowering:
    """The forward's lowering for any platform: `lowering`, unless the user asked for the emulator."""

    def lower(ctx: Any, *args: Any, spec: AttentionSpec, **params: Any) -> Any:
        if spec.implementation != "emulate":
            return lowering(ctx, *args, spec=spec, **params)
        arch = export.target_archs()[0]
        if reason := why_unsupported(spec, arch):
            raise NotImplementedError(f"implementation='emulate': {reason}")
        config = forward_config(spec, arch)
        assert config is not None, "why_unsupported has been asked"
        if unknown := sorted(set(forward.operand_names(config)) - set(emulate.OPERANDS)):
            raise NotImplementedError(f"implementation='emulate' does not take {', '.join(unknown)} yet")
        cubins.get(config)  # compiled now, so that what fails doesn't fail in the callback
        rule = clean(mlir.lower_fun(_forward, multiple_results=True))
        return rule(ctx, *args, spec=spec, arch=arch, **params)

    return lower


def _forward(*args: jax.Array, fields: tuple[str, ...], spec: AttentionSpec, arch: str) -> list[jax.Array]:
    def run(*arrays: Any) -> tuple[HostArray, HostArray]:
        return _emulate(unpack(fields, [np.asarray(a) for a in arrays]), spec, arch)

    x = unpack(fields, args)
    out = jax.ShapeDtypeStruct((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype)
    lse = jax.ShapeDtypeStruct((*x.q.shape[:-3], x.q.shape[-2], x.q.shape[-3]), np.float32)
    return list(jax.pure_callback(run, (out, lse), *args))


def _emulate(x: Operands, spec: AttentionSpec, arch: str) -> tuple[HostArray, HostArray]:
    """out [*B, T, N, E] and lse [*B, N, T] of operands that are numpy arrays, in memory as the layout has them."""

    def in_layout(a: Any) -> Any:
        return a if spec.layout == "BTNH" else np.swapaxes(a, -3, -2)

    result = emulate.forward(
        *(in_layout(a) for a in (x.q, x.k, x.v)),
        spec=spec,
        arch=arch,
        softmax_scale=float(x.softmax_scale),
        window_left=0 if x.window_left is None else int(x.window_left),
        window_right=0 if x.window_right is None else int(x.window_right),
    )
    return in_layout(result.out), result.lse
