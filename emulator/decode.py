"""From parsed instructions to steps that run without strings: the registry of instructions, and operand slots.

Two kinds of instruction:

`@op(pattern, signature)` registers a pure function of registers. `pattern` is the whole opcode; `{a,b}` stands for
alternatives, which are spelled out at import. `signature` is "outputs = inputs" by type, `$1` being what was chosen in
the first braces::

    @op("add.{u32,s32,u64,s64}", "$1 = $1 $1")
    def add(a, b):
        return a + b

The function gets arrays over lanes (see `state`) and returns one, or a tuple if there are several outputs. It must not
look at which lanes are active: masking and write-back belong to the loop. A numpy ufunc may be registered directly:
`op(pattern, signature)(np.add)`.

`@family(name)` registers a decoder for all opcodes that start with `name` (the longest registered name wins). It gets a
`Form`, takes the modifiers it knows from it in any order, turns operands into slots, and returns `form.pure(...)` or
`form.effect(...)`. A modifier nobody took raises `UnknownInstruction`, when the module is loaded. An effect is
`execute(warp, lanes) -> Wait | None`::

    @family("nanosleep")
    def nanosleep(form):
        form.take("u32")
        form.end()
        duration = form.src(0, "u32")
        def execute(warp, lanes):
            duration_ns = warp.v[duration]
            ...
        return form.effect(execute)
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import UnknownInstruction
from jax_fa4.emulator.schedule import Wait
from jax_fa4.emulator.slots import WIDTHS, Slots
from jax_fa4.emulator.state import Lanes, Warp
from jax_fa4.emulator.text import module as text

__all__ = ["Effect", "Form", "GenericAddress", "Pure", "SharedAddress", "decode", "family", "op"]

Execute = Callable[[Warp, Lanes], Wait | None]

POSITIONAL = re.compile(r"([busf](8|16|32|64|128)|pred|e[0-9]m[0-9](x[0-9])?|(bf16|f16|f32|tf32|s8|u8)(x[0-9])?)$")


def normal_form(opcode: str) -> str:
    """The opcode with modifiers sorted, types last in their order: the assembler takes modifiers in several orders."""
    base, *modifiers = opcode.split(".")
    types = [word for word in modifiers if POSITIONAL.match(word)]
    return ".".join([base, *sorted(word for word in modifiers if not POSITIONAL.match(word)), *types])


class _PureOp(NamedTuple):
    function: Callable[..., Any]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


_ops: dict[str, _PureOp] = {}
_families: dict[str, Callable[[Form], Pure | Effect]] = {}


def _expand(pattern: str) -> list[tuple[str, tuple[str, ...]]]:
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") for part in parts[1::2]]
    return [
        ("".join(a + b for a, b in itertools.zip_longest(parts[::2], chosen, fillvalue="")), chosen)
        for chosen in itertools.product(*choices)
    ]


def op(pattern: str, signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a pure function for every opcode of `pattern`. A second owner of an opcode raises."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for opcode, chosen in _expand(pattern):
            typed = re.sub(r"\$(\d)", lambda match: chosen[int(match[1]) - 1], signature)  # noqa: B023 (used at once)
            outputs, inputs = (tuple(side.split()) for side in typed.split("="))
            key = normal_form(opcode)
            if key in _ops:
                raise ValueError(f"{opcode} has two owners")
            _ops[key] = _PureOp(function, outputs, inputs)
        return function

    return register


def family(*names: str) -> Callable[[Callable[[Form], Pure | Effect]], Callable[[Form], Pure | Effect]]:
    """Register a decoder for all opcodes that start with one of `names`. A second owner of a name raises."""

    def register(decoder: Callable[[Form], Pure | Effect]) -> Callable[[Form], Pure | Effect]:
        for name in names:
            if name in _families:
                raise ValueError(f"{name} has two owners")
            _families[name] = decoder
        return decoder

    return register


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pure:
    """`outputs = function(*inputs)` on lanes; slots are indices into `Warp.v`."""

    function: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_types: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """An instruction that does more than compute. `handles_holds`: it looks after held registers itself."""

    execute: Execute
    handles_holds: bool = False


class SharedAddress(NamedTuple):
    """`[register + offset]` in a shared window (32 bit); `at` gives int64 [32], rank in bits 24 and up."""

    slot: int
    offset: int

    def at(self, warp: Warp) -> npt.NDArray[np.int64]:
        """The address of each lane; bits beyond 32 wrap."""
        return (warp.v[self.slot].astype(np.int64) + self.offset) & 0xFFFFFFFF


class GenericAddress(NamedTuple):
    """`[register + offset]` in 64 bit: global or generic; `at` gives uint64 [32]."""

    slot: int
    offset: int

    def at(self, warp: Warp) -> npt.NDArray[np.uint64]:
        """The address of each lane."""
        return warp.v[self.slot] + np.uint64(self.offset & 0xFFFFFFFFFFFFFFFF)


class Form:
    """One instruction being decoded: modifiers to take, operands to turn into slots, registers it touches."""

    def __init__(self, instruction: text.Instruction, words: Sequence[str], slots: Slots):
        self.instruction = instruction
        self.operands = instruction.operands
        self.modifiers = list(words)
        self.reads = 0
        self.writes = 0
        self.inverts: list[tuple[int, int]] = []
        self._slots = slots

    # modifiers

    def take(self, *choices: str, default: str | None = None) -> str:
        """Take the one modifier among `choices`; `default` if none is there (without one: unknown instruction)."""
        for word in self.modifiers:
            if word in choices:
                self.modifiers.remove(word)
                return word
        if default is None:
            raise self.unknown(f"needs one of {', '.join('.' + choice for choice in choices)}")
        return default

    def has(self, modifier: str) -> bool:
        """Take a modifier if it is there."""
        if modifier in self.modifiers:
            self.modifiers.remove(modifier)
            return True
        return False

    def drop(self, *prefixes: str) -> None:
        """Drop modifiers without functional effect, by prefix: cache operators, hints."""
        self.modifiers = [word for word in self.modifiers if not word.startswith(prefixes)]

    def types(self) -> list[str]:
        """Take all positional types, in order."""
        found = [word for word in self.modifiers if POSITIONAL.match(word)]
        self.modifiers = [word for word in self.modifiers if not POSITIONAL.match(word)]
        return found

    def end(self) -> None:
        """All modifiers must have been taken."""
        if self.modifiers:
            raise self.unknown(f"has unknown modifiers {', '.join('.' + word for word in self.modifiers)}")

    def unknown(self, why: str) -> UnknownInstruction:
        """The error for a form that is not implemented."""
        return UnknownInstruction(f"line {self.instruction.line}: {self.instruction.opcode} {why}")

    # operands

    def src(self, operand: int | text.Operand, kind: str) -> int:
        """The slot to read an operand (or operand number) as type `kind`.

        Register, literal, special register or symbol.
        """
        return self._source(self._operand(operand), kind)

    def dst(self, operand: int | text.Operand, kind: str) -> int | None:
        """The slot to write; None for the sink `_`."""
        where = self._operand(operand)
        if isinstance(where, text.Sink):
            return None
        if not isinstance(where, text.Register):
            raise self.unknown(f"cannot write to operand {where}")
        self._check_width(where, kind)
        self.writes |= 1 << where.index
        return self._slots.register(where, kind)

    def srcs(self, operand: int | text.Operand, kind: str) -> tuple[int, ...]:
        """The slots of a vector operand (or of a single one)."""
        where = self._operand(operand)
        return tuple(self.src(item, kind) for item in (where.items if isinstance(where, text.Vector) else (where,)))

    def dsts(self, operand: int | text.Operand, kind: str) -> tuple[int | None, ...]:
        """The slots of a vector destination (or of a single one)."""
        where = self._operand(operand)
        return tuple(self.dst(item, kind) for item in (where.items if isinstance(where, text.Vector) else (where,)))

    def shared(self, operand: int | text.Operand) -> SharedAddress:
        """The address operand `[...]` of a shared or tensor-memory access: 32 bit."""
        where = self._address(operand)
        slot = self._source(where.base, "b32") if not self._is_wide(where.base) else self._source(where.base, "b64")
        return SharedAddress(slot, where.offset)

    def generic(self, operand: int | text.Operand) -> GenericAddress:
        """The address operand `[...]` of a global or generic access: 64 bit."""
        where = self._address(operand)
        return GenericAddress(self._source(where.base, "u64"), where.offset)

    def coordinates(self, operand: int | text.Operand) -> tuple[int, ...]:
        """The slots (s32) of the coordinates in `[map, {c0, c1, ...}]`."""
        where = self._address(operand)
        return () if where.coordinates is None else self.srcs(where.coordinates, "s32")

    def immediate(self, operand: int | text.Operand) -> int:
        """The value of an operand that must be a literal integer."""
        where = self._operand(operand)
        if not isinstance(where, text.Immediate) or where.kind != "int":
            raise self.unknown(f"needs a literal integer, not {where}")
        return where.bits

    # results

    def pure(
        self, function: Callable[..., Any], outputs: Sequence[tuple[int | None, str]], inputs: Sequence[int]
    ) -> Pure:
        """A pure instruction; `outputs` are (slot, type)."""
        slots = tuple((self._slots.special("trash", kind) if slot is None else slot, kind) for slot, kind in outputs)
        return Pure(
            function=function,
            inputs=tuple(inputs),
            outputs=tuple(slot for slot, _ in slots),
            output_types=tuple(kind for _, kind in slots),
        )

    def effect(self, execute: Execute, *, handles_holds: bool = False) -> Effect:
        """An instruction with effects."""
        return Effect(execute=execute, handles_holds=handles_holds)

    @property
    def touches(self) -> int:
        """The registers read or written so far, as a bit mask."""
        return self.reads | self.writes

    def registers_of(self, operand: int | text.Operand) -> int:
        """The registers of an operand (also of a vector) as a bit mask, for `Warp.hold`."""
        where = self._operand(operand)
        items = where.items if isinstance(where, text.Vector) else (where,)
        mask = 0
        for item in items:
            if isinstance(item, text.Register):
                mask |= 1 << item.index
        return mask

    # internals

    def _operand(self, operand: int | text.Operand) -> text.Operand:
        if not isinstance(operand, int):
            return operand
        if operand >= len(self.operands):
            raise self.unknown(f"has {len(self.operands)} operands")
        return self.operands[operand]

    def _address(self, operand: int | text.Operand) -> text.Address:
        where = self._operand(operand)
        if not isinstance(where, text.Address):
            raise self.unknown(f"needs an address, not {where}")
        return where

    def _is_wide(self, base: text.Operand) -> bool:
        return isinstance(base, text.Register) and base.width == 64

    def _check_width(self, register: text.Register, kind: str) -> None:
        if register.width != WIDTHS[kind]:
            raise self.unknown(f"uses {register.name} ({register.width} bit) as {kind}")

    def _source(self, where: text.Operand, kind: str) -> int:
        if isinstance(where, text.Register):
            self._check_width(where, kind)
            self.reads |= 1 << where.index
            return self._slots.register(where, kind)
        if isinstance(where, text.Negated):
            self.reads |= 1 << where.register.index
            self.inverts.append(
                (self._slots.register(where.register, "pred"), self._slots.special(f"!{where.register.index}", "pred"))
            )
            return self.inverts[-1][1]
        if isinstance(where, text.Immediate):
            return self._slots.constant(_literal(where, kind), kind)
        if isinstance(where, text.Special):
            return self._slots.special(where.name, kind)
        if isinstance(where, text.Symbol):
            return self._slots.special(f"&{where.name}", kind)
        raise self.unknown(f"cannot read operand {where}")


def _literal(literal: text.Immediate, kind: str) -> int:
    """The bit pattern of a literal as type `kind`; a double literal of a float operand is rounded."""
    if kind == "pred":
        return int(literal.bits != 0)
    if literal.kind == "f64" and kind == "f32":
        return int(np.uint64(literal.bits).view(np.float64).astype(np.float32).view(np.uint32))
    return literal.bits


def decode(instruction: text.Instruction, slots: Slots) -> tuple[Pure | Effect, Form]:
    """Find the owner of an instruction and let it turn operands into slots. Raises `UnknownInstruction`."""
    found = _ops.get(normal_form(instruction.opcode))
    words = instruction.opcode.split(".")
    if found is not None:
        form = Form(instruction, (), slots)
        return _decode_pure(form, found), form
    for length in range(len(words), 0, -1):
        decoder = _families.get(".".join(words[:length]))
        if decoder is not None:
            form = Form(instruction, words[length:], slots)
            return decoder(form), form
    raise UnknownInstruction(f"line {instruction.line}: unknown instruction {instruction.opcode}")


def _decode_pure(form: Form, found: _PureOp) -> Pure:
    operands = list(form.operands)
    if isinstance(operands[0], text.Pair) and len(found.outputs) == 2:
        operands[:1] = [operands[0].first, operands[0].second]
    if len(operands) != len(found.outputs) + len(found.inputs):
        raise form.unknown(f"has {len(form.operands)} operands")
    inputs = [
        form.src(operand, kind) for operand, kind in zip(operands[len(found.outputs) :], found.inputs, strict=True)
    ]
    outputs = [(form.dst(operand, kind), kind) for operand, kind in zip(operands, found.outputs, strict=False)]
    return form.pure(found.function, outputs, inputs)
