"""Attention forward as a primitive, and `attach`, the identity on its results that carries their derivative."""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fa4 import blockwise
from jax_fa4.operands import Operands
from jax_fa4.rules.backward import tangent_p
from jax_fa4.rules.batching import batched_spec, lead
from jax_fa4.rules.cuda import FORWARD, kernel_or, unless_emulated, unless_kernel_asked
from jax_fa4.rules.derivatives import dense, jitted, no_tangent
from jax_fa4.rules.pack import DIFFERENTIABLE, always_linear, pack, unpack
from jax_fa4.rules.sharding import check_varying, clean, lse_aval, out_aval, promote, spread_kv_heads
from jax_fa4.spec import AttentionSpec

__all__ = ["LSE_NAME", "OUT_NAME", "attach_p", "attend", "forward_p"]

OUT_NAME = "jax_fa4_out"  # for jax.checkpoint_policies.save_only_these_names; only both together spare the forward
LSE_NAME = "jax_fa4_lse"


@functools.partial(jax.jit, static_argnames="spec")
def attend(x: Operands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """out [*B, T, N, E] in q's dtype and lse [*B, N, T] in float32 (float64 for float64 operands), differentiable."""
    x, spec = spread_kv_heads(x, spec)
    fields, arrays = pack(x)
    arrays = promote(arrays)
    out, lse = forward_p.bind(*arrays, fields=fields, spec=spec)
    # named once, between the two: a policy then saves them for `attach`, and no derivative asks for the forward again
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return tuple(attach_p.bind(*arrays, out, lse, fields=fields, spec=spec))


def _implementation(*args, fields, spec):
    return blockwise.forward(unpack(fields, args))


def _shape_rule(*avals, fields, spec):
    check_varying(avals)
    x = unpack(fields, avals)
    return [out_aval(x.q, x.v), lse_aval(x.q)]


def _jvp_rule(primals, tangents, *, fields, spec):
    results = forward_p.bind(*primals, fields=fields, spec=spec)
    return results, [no_tangent(r) for r in results]  # `attach` has it


def _batching_rule(axis_data, args, dims, *, fields, spec):
    if all(d is None for d in dims):
        return forward_p.bind(*args, fields=fields, spec=spec), [None, None]
    args = lead(axis_data, fields, args, dims)
    return forward_p.bind(*args, fields=fields, spec=batched_spec(spec, fields, dims)), [0, 0]


def _attach_shape_rule(*avals, fields, spec):
    check_varying(avals)
    return list(avals[-2:])


def _attach_jvp_rule(primals, tangents, *, fields, spec):
    # the results, not the operands `out` and `lse`, go on: a second derivative must see q, k and v through them
    results = attach_p.bind(*primals, fields=fields, spec=spec)
    of = dict(zip(fields, tangents, strict=False))
    moving = [name for name in DIFFERENTIABLE if name in of and not isinstance(of[name], ad.Zero)]
    if not moving:
        return results, [no_tangent(r) for r in results]
    always = always_linear(fields)
    wrt = always + tuple(name for name in moving if name not in always)
    linear = [dense(of[name]) for name in wrt]
    return results, tangent_p.bind(*primals[: len(fields)], *results, *linear, fields=fields, wrt=wrt, spec=spec)


def _attach_batching_rule(axis_data, args, dims, *, fields, spec):
    if all(d is None for d in dims):
        return attach_p.bind(*args, fields=fields, spec=spec), [None, None]
    args = lead(axis_data, (*fields, "out", "lse"), args, dims)
    return attach_p.bind(*args, fields=fields, spec=batched_spec(spec, fields, dims)), [0, 0]


_blockwise_lowering = clean(mlir.lower_fun(_implementation, multiple_results=True))
_cuda_lowering = unless_emulated(kernel_or(_blockwise_lowering, FORWARD), FORWARD)
_default_lowering = unless_emulated(unless_kernel_asked(_blockwise_lowering), FORWARD)

forward_p = Primitive("jax_fa4_forward")
forward_p.multiple_results = True
forward_p.def_impl(jitted(forward_p, "fields", "spec"))
forward_p.def_abstract_eval(_shape_rule)
ad.primitive_jvps[forward_p] = _jvp_rule
batching.fancy_primitive_batchers[forward_p] = _batching_rule
mlir.register_lowering(forward_p, _default_lowering, inline=False)
mlir.register_lowering(forward_p, _cuda_lowering, platform="cuda", inline=False)

attach_p = Primitive("jax_fa4_attach")
attach_p.multiple_results = True
attach_p.def_impl(jitted(attach_p, "fields", "spec"))
attach_p.def_abstract_eval(_attach_shape_rule)
ad.primitive_jvps[attach_p] = _attach_jvp_rule
batching.fancy_primitive_batchers[attach_p] = _attach_batching_rule
mlir.register_lowering(attach_p, lambda ctx, *args, fields, spec: args[-2:])
