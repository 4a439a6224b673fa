"""Records that a parsed PTX module consists of: no semantics, no numpy."""

import dataclasses

WIDTH_OF_TYPE = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b128": 128} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (16, 32, 64)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """A virtual register: `index` is unique in its entry, `width` is in bits (predicates: 1)."""

    index: int
    name: str
    width: int


@dataclasses.dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. `bits` is a Python integer (negative allowed) for kind "int", else the pattern of an f32 or f64."""

    bits: int
    kind: str = "int"


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`, without the percent sign."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """A variable (shared, parameter, global, local) or a label."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Negated:
    """`!p` as a source operand."""

    register: Register


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`; the first item is the least significant or lowest one."""

    items: tuple["Operand", ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: two destinations."""

    first: "Operand"
    second: "Operand"


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` for tensor maps."""

    base: "Register | Symbol | Immediate"
    offset: int = 0
    coordinates: Vector | None = None


Operand = Register | Immediate | Special | Symbol | Sink | Negated | Vector | Pair | Address


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p`."""

    register: Register
    negated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One statement. `targets` holds the label of a branch, resolved to an index into `Entry.instructions`."""

    line: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str
    target: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter at byte `offset` of the parameter block."""

    name: str
    offset: int
    size: int
    align: int


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space ("shared", "local", "const", "global"). Size 0: sized by the launch (`[]`)."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A kernel: straight list of instructions; labels are gone, branches hold indices."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: tuple[Register, ...]
    variables: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: tuple[int, ...]
    required_threads: tuple[int, int, int] | None = None
    max_threads: int | None = None
    max_registers: int | None = None  # of a thread
    min_ctas: int = 1  # that an SM must have room for


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A PTX file: version, target and its entries by name; `variables` are those at module scope."""

    version: tuple[int, int]
    target: str
    entries: dict[str, Entry]
    variables: tuple[Variable, ...]
