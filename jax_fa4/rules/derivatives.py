"""What the rules of primitives with derivatives share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_fa4.rules.sharding import automatic

__all__ = ["dense", "is_moving", "jitted", "linear_jvp_rule", "no_tangent"]


def dense(tangent: Any) -> jax.Array:
    """A tangent or cotangent as an array, zeros where it is a symbolic zero."""
    return ad.instantiate_zeros(tangent)


def is_moving(tangent: Any) -> bool:
    """Whether a tangent is anything but a symbolic zero."""
    return not isinstance(tangent, ad.Zero)


def no_tangent(primal: jax.Array) -> Any:
    """The symbolic zero tangent of an array."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def jitted(primitive: Primitive, *statics: str) -> Callable[..., Any]:
    """What a primitive does outside of jit: compile itself, under `jax.disable_jit` too."""
    compiled = jax.jit(primitive.bind, static_argnames=statics)

    def run(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(*args, **params)

    return run


def linear_jvp_rule(primitive: Primitive, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The jvp rule of a primitive that is linear in its last operands, those after `fields`, out and lse.

    Tangents of the linear operands pass through the primitive itself, so they stay transposable to its partner;
    those of the others through the plain JAX implementation.
    """

    def rule(primals: Sequence[Any], tangents: Sequence[Any], *, fields: Sequence[str], **params: Any) -> Any:
        num_fixed = len(fields) + 2
        values = primitive.bind(*primals, fields=fields, **params)
        terms = []
        moving = [i for i in range(num_fixed) if is_moving(tangents[i])]
        if moving:

            def in_plain_jax(*args: Any) -> Any:
                return tuple(implementation(*args, fields=fields, **params))

            def of_moving(*args: Any) -> Any:
                at = list(primals)
                for i, a in zip(moving, args, strict=True):
                    at[i] = a
                return automatic(in_plain_jax, values)(*at)

            terms.append(jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1])
        if any(map(is_moving, tangents[num_fixed:])):
            terms.append(
                primitive.bind(*primals[:num_fixed], *map(dense, tangents[num_fixed:]), fields=fields, **params)
            )
        if not terms:
            return values, [no_tangent(v) for v in values]
        return values, [sum(each[1:], start=each[0]) for each in zip(*terms, strict=True)]

    return rule
