"""Comparisons, PTX ISA 9.7.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_fa4.emulator.decode import Form, Pure, family
from jax_fa4.emulator.rounding import bf16_value, flush
from jax_fa4.emulator.text.module import Pair

Compare = Callable[[Any, Any], Any]

ORDERED: dict[str, Compare] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _ordered_not_equal(a, b):
    return (a < b) | (a > b)


OPPOSITES: dict[str, Compare] = {
    "eq": _ordered_not_equal,
    "lt": np.greater_equal,
    "le": np.greater,
    "gt": np.less_equal,
    "ge": np.less,
}


def _unordered(name: str) -> Compare:
    """True if the comparison holds or an operand is NaN."""
    if name == "ne":
        return np.not_equal
    opposite = OPPOSITES[name]
    return lambda a, b: ~opposite(a, b)


def _comparison(form: Form, is_float: bool) -> Compare:
    names = [*ORDERED, *UNSIGNED_NAMES, *(f"{name}u" for name in ORDERED), "num", "nan"]
    name = form.take(*names)
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name in UNSIGNED_NAMES:
        return ORDERED[UNSIGNED_NAMES[name]]
    if name not in ORDERED:
        return _unordered(name[:-1])
    return _ordered_not_equal if is_float and name == "ne" else ORDERED[name]


@family("setp")
def setp(form: Form) -> Pure:
    """p[|q] = (a cmp b) [op c]; q is made from the complement of the comparison."""
    types = form.types()
    kind = types[0]
    ftz = form.has("ftz")
    compare = _comparison(form, kind in ("f32", "f64", "f16", "bf16"))
    combine = form.take(*COMBINE, default="none")
    form.end()
    if ftz:
        exact = compare
        compare = lambda a, b: exact(flush(a), flush(b))  # noqa: E731
    if kind == "bf16":
        wide = compare
        compare = lambda a, b: wide(bf16_value(a), bf16_value(b))  # noqa: E731
    target = form.operands[0]
    inputs = [form.src(1, kind), form.src(2, kind)]
    if combine != "none":
        inputs.append(form.src(3, "pred"))
    names = [target.first, target.second] if isinstance(target, Pair) else [target]
    outputs = [(form.dst(name, "pred"), "pred") for name in names]
    if combine == "none" and len(outputs) == 1:
        return form.pure(compare, outputs, inputs)
    join = COMBINE.get(combine)

    def both(a, b, *c):
        holds = compare(a, b)
        pair = (holds, ~holds)
        return tuple(x if join is None else join(x, c[0]) for x in pair)

    if len(outputs) == 1:
        return form.pure(lambda *arguments: both(*arguments)[0], outputs, inputs)
    return form.pure(both, outputs, inputs)


@family("set")
def set_value(form: Form) -> Pure:
    """All ones, or 1.0, where the comparison holds."""
    result, kind = form.types()
    compare = _comparison(form, kind in ("f32", "f64"))
    form.end()

    def value(a, b):
        holds = compare(a, b)
        return holds.astype(np.float32) if result == "f32" else np.where(holds, np.uint32(0xFFFFFFFF), np.uint32(0))

    output = "f32" if result == "f32" else "b32"
    return form.pure(value, [(form.dst(0, output), output)], [form.src(1, kind), form.src(2, kind)])
