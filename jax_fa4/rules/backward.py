"""`tangent` and `backward` of attention: two linear primitives, each the other's transpose.

Both take the operands, the forward's results, and what they are linear in: tangents of the operands named in `wrt`, or
cotangents of the results. grad is forward, then backward; neither is run twice.
"""

from __future__ import annotations

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fa4 import blockwise
from jax_fa4.rules.batching import batched_spec, lead
from jax_fa4.rules.cuda import BACKWARD, kernel_or, unless_emulated
from jax_fa4.rules.derivatives import dense, jitted, linear_jvp_rule
from jax_fa4.rules.pack import fuse, slices, split, unpack
from jax_fa4.rules.sharding import check_varying, clean

__all__ = ["backward_p", "tangent_p"]

STATICS = ("fields", "wrt", "spec")


def _tangent_implementation(*args, fields, wrt, spec):
    out, lse, *linear = args[len(fields) :]
    tangents = split(dict(zip(wrt, linear, strict=True)))
    return blockwise.tangent(unpack(fields, args), blockwise.Results(out, lse), tangents)


def _tangent_shape_rule(*avals, fields, wrt, spec):
    check_varying(avals)
    return [a.update(weak_type=False) for a in avals[len(fields) : len(fields) + 2]]


def _tangent_transpose_rule(cotangents, *args, fields, wrt, spec):
    num_fixed = len(fields) + 2
    gradients = backward_p.bind(*args[:num_fixed], *map(dense, cotangents), fields=fields, wrt=wrt, spec=spec)
    linear = [g if ad.is_undefined_primal(a) else None for g, a in zip(gradients, args[num_fixed:], strict=True)]
    return [None] * num_fixed + linear


def _tangent_batching_rule(axis_data, args, dims, *, fields, wrt, spec):
    if all(d is None for d in dims):
        return tangent_p.bind(*args, fields=fields, wrt=wrt, spec=spec), [None, None]
    names = (*fields, "out", "lse", *wrt)
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    args = lead(axis_data, names, args, dims, full=mapped)  # an operand and its tangent keep equal shapes
    return tangent_p.bind(*args, fields=fields, wrt=wrt, spec=batched_spec(spec, fields, dims)), [0, 0]


def _backward_implementation(*args, fields, wrt, spec):
    out, lse, dout, dlse = args[len(fields) :]
    names = slices(wrt)
    gradients = blockwise.backward(
        unpack(fields, args), blockwise.Results(out, lse), blockwise.Results(dout, dlse), names
    )
    return fuse(dict(zip(names, gradients, strict=True)), wrt)


def _backward_shape_rule(*avals, fields, wrt, spec):
    check_varying(avals)
    of = dict(zip(fields, avals, strict=False))
    return [of[name].update(weak_type=False) for name in wrt]


def _backward_transpose_rule(cotangents, *args, fields, wrt, spec):
    num_fixed = len(fields) + 2
    tangents = tangent_p.bind(*args[:num_fixed], *map(dense, cotangents), fields=fields, wrt=wrt, spec=spec)
    linear = [t if ad.is_undefined_primal(a) else None for t, a in zip(tangents, args[num_fixed:], strict=True)]
    return [None] * num_fixed + linear


def _backward_batching_rule(axis_data, args, dims, *, fields, wrt, spec):
    if all(d is None for d in dims):
        return backward_p.bind(*args, fields=fields, wrt=wrt, spec=spec), [None] * len(wrt)
    per_entry = {name: a.ndim - (d is not None) for name, a, d in zip(fields, args, dims, strict=False)}
    # gradients are one per mapped entry, so the operands that have them can't keep 1 in place of the mapped axis
    args = lead(axis_data, (*fields, "out", "lse", "out", "lse"), args, dims, full=wrt)
    gradients = backward_p.bind(*args, fields=fields, wrt=wrt, spec=batched_spec(spec, fields, dims))
    squeezed = [jax.lax.squeeze(g, range(1 + per_entry[name], g.ndim)) for name, g in zip(wrt, gradients, strict=True)]
    return squeezed, [0] * len(wrt)


_tangent_lowering = clean(mlir.lower_fun(_tangent_implementation, multiple_results=True))
_blockwise_lowering = clean(mlir.lower_fun(_backward_implementation, multiple_results=True))
_cuda_lowering = unless_emulated(kernel_or(_blockwise_lowering, BACKWARD), BACKWARD)
_default_lowering = unless_emulated(_blockwise_lowering, BACKWARD)

tangent_p = Primitive("jax_fa4_tangent")
tangent_p.multiple_results = True
tangent_p.def_impl(jitted(tangent_p, *STATICS))
tangent_p.def_abstract_eval(_tangent_shape_rule)
ad.primitive_jvps[tangent_p] = linear_jvp_rule(tangent_p, _tangent_implementation)
ad.primitive_transposes[tangent_p] = _tangent_transpose_rule
batching.fancy_primitive_batchers[tangent_p] = _tangent_batching_rule
mlir.register_lowering(tangent_p, _tangent_lowering, inline=False)

backward_p = Primitive("jax_fa4_backward")
backward_p.multiple_results = True
backward_p.def_impl(jitted(backward_p, *STATICS))
backward_p.def_abstract_eval(_backward_shape_rule)
ad.primitive_jvps[backward_p] = linear_jvp_rule(backward_p, _backward_implementation)
ad.primitive_transposes[backward_p] = _backward_transpose_rule
batching.fancy_primitive_batchers[backward_p] = _backward_batching_rule
mlir.register_lowering(backward_p, _default_lowering, inline=False)
mlir.register_lowering(backward_p, _cuda_lowering, platform="cuda", inline=False)
