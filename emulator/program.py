"""A decoded entry: the steps that a warp executes one at a time.

Everything that can be found out once is found out here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from jax_fa4.emulator import flow, ops
from jax_fa4.emulator.decode import Effect, Form, Pure, decode
from jax_fa4.emulator.errors import UnknownInstruction
from jax_fa4.emulator.generate import PureStep, Run
from jax_fa4.emulator.slots import Slots
from jax_fa4.emulator.text import module as text

__all__ = ["Program", "Step", "StepKind", "build"]


class StepKind(enum.IntEnum):
    """What the loop has to do with a step."""

    RUN = 0
    EFFECT = 1
    BRANCH = 2
    EXIT = 3


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """A run of pure instructions, one effect, a branch or an exit.

    Attributes:
      kind: which.
      instructions: what it was made from.
      touches: registers read or written, a bit mask.
      matrix_touches: those of them that are operands of a wgmma somewhere.
      run, effect: what to execute.
      guard: slot of the predicate, and whether it is negated.
      target, join: of a branch, the steps it leads to and where diverged lanes meet again (-1: nowhere).
      is_uniform: of a branch, whether the text promises that lanes agree.
      inverts, defined, defines: see `generate.PureStep`.
    """

    kind: StepKind
    instructions: tuple[text.Instruction, ...]
    touches: int = 0
    matrix_touches: int = 0
    run: Run | None = None
    effect: Effect | None = None
    guard: tuple[int, bool] | None = None
    target: int = -1
    join: int = -1
    is_uniform: bool = False
    inverts: tuple[tuple[int, int], ...] = ()
    defined: tuple[tuple[int, str], ...] = ()
    defines: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Program:
    """Steps, and the layout of a warp's registers."""

    entry: text.Entry
    module: text.Module
    steps: tuple[Step, ...]
    slots: Slots


@dataclasses.dataclass(slots=True, eq=False)
class _Decoded:
    instruction: text.Instruction
    kind: StepKind
    what: Pure | Effect | None
    form: Form | None
    guard: tuple[int, bool] | None
    node: flow.Node


Shadows = tuple[tuple[tuple[int, str], ...], tuple[int, ...]]
EXITS = ("ret", "exit")
BRANCHES = ("bra", "bra.uni")


def build(module: text.Module, name: str | None = None) -> Program:
    """Decode an entry (the only one if `name` is None). Raises `UnknownInstruction`."""
    ops.register()
    if name is None and len(module.entries) != 1:
        raise UnknownInstruction(
            f"the module has {len(module.entries)} entries ({', '.join(module.entries)}): name one"
        )
    entry = module.entries[next(iter(module.entries)) if name is None else name]
    slots = Slots()
    decoded = [_decode(instruction, index, slots) for index, instruction in enumerate(entry.instructions)]
    if not decoded or decoded[-1].kind is not StepKind.EXIT or decoded[-1].guard is not None:
        raise UnknownInstruction(f"{entry.name} does not end in ret")
    nodes = [item.node for item in decoded]
    return Program(
        entry=entry,
        module=module,
        steps=_steps(entry, decoded, slots, flow.maybe_unwritten(nodes), flow.reconvergence(nodes)),
        slots=slots,
    )


def _decode(instruction: text.Instruction, index: int, slots: Slots) -> _Decoded:
    guard = None
    reads = 0
    if instruction.guard is not None:
        guard = (slots.register(instruction.guard.register, "pred"), instruction.guard.negated)
        reads = 1 << instruction.guard.register.index
    if instruction.opcode in EXITS or instruction.opcode in BRANCHES:
        kind = StepKind.EXIT if instruction.opcode in EXITS else StepKind.BRANCH
        following: tuple[int, ...] = (index + 1,) if guard is not None else ()
        if instruction.target is not None and instruction.target not in following:
            following += (instruction.target,)
        return _Decoded(instruction, kind, None, None, guard, flow.Node(successors=following, reads=reads, writes=0))
    what, form = decode(instruction, slots)
    kind = StepKind.RUN if isinstance(what, Pure) else StepKind.EFFECT
    writes = form.writes if guard is None else 0
    node = flow.Node(successors=(index + 1,), reads=form.reads | reads, writes=writes, is_copy=_is_copy(instruction))
    return _Decoded(instruction, kind, what, form, guard, node)


def _is_copy(instruction: text.Instruction) -> bool:
    return instruction.opcode.startswith("mov.") and all(isinstance(x, text.Register) for x in instruction.operands)


def _steps(
    entry: text.Entry, decoded: Sequence[_Decoded], slots: Slots, doubtful: int, joins: dict[int, int]
) -> tuple[Step, ...]:
    heads = {*entry.labels, *joins.values()} | {item.instruction.target for item in decoded}
    matrix = 0
    for item in decoded:
        if item.form is not None and item.instruction.opcode.startswith("wgmma.mma_async"):
            matrix |= item.form.touches
    registers = {register.index: register for register in entry.registers}
    step_of: dict[int, int] = {}
    steps: list[Step] = []
    pending: list[_Decoded] = []

    def flush() -> None:
        if pending:
            touches = 0
            for item in pending:
                touches |= item.node.reads | _form(item).writes
            run = Run([_pure_step(item, doubtful, registers, slots) for item in pending])
            instructions = tuple(item.instruction for item in pending)
            steps.append(
                Step(
                    kind=StepKind.RUN,
                    instructions=instructions,
                    touches=touches,
                    matrix_touches=touches & matrix,
                    run=run,
                )
            )
            pending.clear()

    for index, item in enumerate(decoded):
        if index in heads:
            flush()
        if item.kind is not StepKind.RUN:
            flush()
        step_of[index] = len(steps)
        if item.kind is StepKind.RUN:
            pending.append(item)
        else:
            steps.append(_single_step(item, index, matrix, doubtful, registers, slots, joins))
    for step in steps:
        step.target = step_of.get(step.target, -1)
        step.join = step_of.get(step.join, -1)
    return tuple(steps)


def _form(item: _Decoded) -> Form:
    assert item.form is not None  # branches and exits are not asked
    return item.form


def _doubtful(item: _Decoded, doubtful: int, registers: dict[int, text.Register], slots: Slots) -> Shadows:
    """The shadows that an instruction must find set, and those that it sets."""
    reads, writes = item.node.reads & doubtful, (item.form.writes if item.form else 0) & doubtful
    defined = tuple((slots.defined(r), r.name) for i, r in registers.items() if reads >> i & 1) if reads else ()
    defines = tuple(slots.defined(r) for i, r in registers.items() if writes >> i & 1) if writes else ()
    return defined, defines


def _pure_step(item: _Decoded, doubtful: int, registers: dict[int, text.Register], slots: Slots) -> PureStep:
    assert isinstance(item.what, Pure)  # only pure instructions form runs
    defined, defines = _doubtful(item, doubtful, registers, slots)
    if item.node.is_copy and defined and item.guard is None:
        return PureStep(pure=item.what, copies=(defined[0][0], defines[0]) if defines else None)
    return PureStep(
        pure=item.what, guard=item.guard, inverts=tuple(_form(item).inverts), defined=defined, defines=defines
    )


def _single_step(
    item: _Decoded,
    index: int,
    matrix: int,
    doubtful: int,
    registers: dict[int, text.Register],
    slots: Slots,
    joins: dict[int, int],
) -> Step:
    defined, defines = _doubtful(item, doubtful, registers, slots)
    touches = item.node.reads | (item.form.writes if item.form else 0)
    effect = item.what if isinstance(item.what, Effect) else None
    return Step(
        kind=item.kind,
        instructions=(item.instruction,),
        touches=touches,
        matrix_touches=0 if effect is not None and effect.handles_holds else touches & matrix,
        effect=effect,
        guard=item.guard,
        target=-1 if item.instruction.target is None else item.instruction.target,
        join=joins.get(index, -1),
        is_uniform=item.instruction.opcode == "bra.uni",
        inverts=tuple(item.form.inverts) if item.form else (),
        defined=defined,
        defines=defines,
    )
