"""Straight-line runs of pure instructions, turned into Python functions: one call a run instead of a loop over
instructions.

Each run becomes two functions, made when first needed: `full(v)` for a warp with all lanes executing, and `masked(v, m,
pairs)` with the executing lanes as bool [32] and, for f32x2 registers, bool [64].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_fa4.emulator.decode import Pure
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.slots import PAIRS

__all__ = ["PureStep", "Run"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PureStep:
    """A pure instruction in its place.

    Attributes:
      pure: what it computes.
      guard: slot of its predicate, and whether that is negated.
      inverts: (predicate, slot of its inverse) to refresh first.
      defined: (slot, register name) of shadows that must be set where it executes.
      defines: slots of shadows to set.
      copies: (from, to) shadows that travel with a copied register, instead of the two above.
    """

    pure: Pure
    guard: tuple[int, bool] | None = None
    inverts: tuple[tuple[int, int], ...] = ()
    defined: tuple[tuple[int, str], ...] = ()
    defines: tuple[int, ...] = ()
    copies: tuple[int, int] | None = None


class Run:
    """Consecutive pure instructions."""

    __slots__ = ("_full", "_masked", "_steps")

    def __init__(self, steps: Sequence[PureStep]):
        self._steps = tuple(steps)
        self._full: Callable[[list[Any]], None] | None = None
        self._masked: Callable[..., None] | None = None

    @property
    def full(self) -> Callable[[list[Any]], None]:
        """`full(v)` executes the run in all lanes."""
        if self._full is None:
            self._full = _compile(
                "v", [_full_statements(step, number) for number, step in enumerate(self._steps)], self._steps
            )
        return self._full

    @property
    def masked(self) -> Callable[..., None]:
        """`masked(v, m, pairs)` executes the run in the lanes of m."""
        if self._masked is None:
            bodies = [_masked_statements(step, number, "m", "pairs") for number, step in enumerate(self._steps)]
            self._masked = _compile("v, m, pairs", bodies, self._steps)
        return self._masked


def _compile(parameters: str, bodies: Sequence[Sequence[str]], steps: Sequence[PureStep]) -> Callable[..., None]:
    lines = [f"def run({parameters}):"] + [f" {line}" for body in bodies for line in body]
    names: dict[str, Any] = {f"f{number}": step.pure.function for number, step in enumerate(steps)}
    names |= {"copyto": np.copyto, "invert": np.logical_not, "both": np.logical_and, "repeat": np.repeat, "need": _need}
    exec(compile("\n".join(lines), "<run>", "exec"), names)
    return names["run"]


def _need(shadow: Any, executing: Any, name: str) -> None:
    missing = executing & ~shadow
    if missing.any():
        raise Fault("uninitialised", f"reads register {name}, which was never written", lane=int(missing.argmax()))


def _call(pure: Pure, number: int) -> str:
    return f"f{number}({', '.join(f'v[{slot}]' for slot in pure.inputs)})"


def _full_statements(step: PureStep, number: int) -> list[str]:
    pure = step.pure
    if step.guard is not None or step.defined:
        return _masked_statements(step, number, None, None)
    lines = [f"invert(v[{p}], v[{inverse}])" for p, inverse in step.inverts]
    if len(pure.outputs) != 1:
        lines.append(f"r = {_call(pure, number)}")
        lines += [f"v[{slot}][...] = r[{i}]" for i, slot in enumerate(pure.outputs)]
    elif isinstance(pure.function, np.ufunc):
        lines.append(f"{_call(pure, number)[:-1]}, out=v[{pure.outputs[0]}])")
    else:
        lines.append(f"v[{pure.outputs[0]}][...] = {_call(pure, number)}")
    if step.copies is not None:
        lines.append(f"v[{step.copies[1]}][...] = v[{step.copies[0]}]")
    return lines + [f"v[{slot}][...] = True" for slot in step.defines]


def _masked_statements(step: PureStep, number: int, lanes: str | None, pairs: str | None) -> list[str]:
    pure = step.pure
    lines = [f"invert(v[{p}], v[{inverse}])" for p, inverse in step.inverts]
    if step.guard is not None:
        slot, negated = step.guard
        term = f"~v[{slot}]" if negated else f"v[{slot}]"
        lines.append(f"g = {term}" if lanes is None else f"g = both({term}, {lanes})")
        lanes, pairs = "g", "repeat(g, 2)"
    elif lanes is None:
        lines.append("g = repeat(True, 32)")
        lanes, pairs = "g", "repeat(g, 2)"
    lines += [f"need(v[{slot}], {lanes}, {name!r})" for slot, name in step.defined]
    if len(pure.outputs) != 1:
        lines.append(f"r = {_call(pure, number)}")
        results = [f"r[{i}]" for i in range(len(pure.outputs))]
    else:
        results = [_call(pure, number)]
    for slot, kind, result in zip(pure.outputs, pure.output_types, results, strict=True):
        where = pairs if kind in PAIRS else lanes
        lines.append(f"copyto(v[{slot}], {result}, 'unsafe', {where})")
    if step.copies is not None:
        lines.append(f"copyto(v[{step.copies[1]}], v[{step.copies[0]}], where={lanes})")
    return lines + [f"v[{slot}] |= {lanes}" for slot in step.defines]
