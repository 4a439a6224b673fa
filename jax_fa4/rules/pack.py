"""Operands as a flat list of arrays and their names, which is what a primitive takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_fa4.operands import Operands

__all__ = ["ALWAYS_LINEAR", "DIFFERENTIABLE", "pack", "unpack"]

DIFFERENTIABLE = ("q", "k", "v", "softmax_scale", "softcap", "sinks", "bias")
ALWAYS_LINEAR = DIFFERENTIABLE[:3]  # a backward kernel makes dq, dk and dv in one go


def pack(x: Operands) -> tuple[tuple[str, ...], list[jax.Array]]:
    """Names and arrays of the present operands; an absent one never reaches XLA."""
    present = {name: a for name, a in zip(x._fields, x, strict=True) if a is not None}
    return tuple(present), list(present.values())


def unpack(fields: Sequence[str], arrays: Sequence[Any]) -> Operands:
    """Undoes `pack`; takes the first of `arrays`, one a field."""
    return Operands(**dict(zip(fields, arrays, strict=False)))
