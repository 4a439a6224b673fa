"""What the emulator raises. Guards raise `Fault`; the loop adds kernel, line and warp and raises `ExecutionError`."""

import dataclasses
from typing import Literal

Check = Literal[
    "bounds",
    "alignment",
    "uninitialised",
    "race",
    "proxy fence",
    "in flight",
    "mbarrier",
    "named barrier",
    "cluster barrier",
    "convergence",
    "descriptor",
    "tensor map",
    "tensor memory",
    "registers",
    "wgmma",
    "tcgen05",
    "bulk group",
    "deadlock",
    "exit",
    "undefined",
    "unsupported",
]


class EmulatorError(Exception):
    """Base class of everything that the emulator raises about a kernel."""


class PtxSyntaxError(EmulatorError):
    """The text is not PTX that the parser knows. The message ends in the line number."""


class UnknownInstruction(EmulatorError):  # noqa: N818 (says what it is about)
    """An opcode or modifier that the emulator does not implement; raised when a module is loaded."""


class Fault(EmulatorError):  # noqa: N818 (becomes an ExecutionError)
    """A broken rule, raised by the state that guards it, which does not know who is executing.

    Attributes:
      check: the kind of rule.
      message: what was found and what the rule asks.
      address: the address concerned, if there is one.
      lane: the first lane concerned, if known.
    """

    def __init__(self, check: Check, message: str, *, address: int | None = None, lane: int | None = None):
        super().__init__(message)
        self.check: Check = check
        self.message = message
        self.address = address
        self.lane = lane


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a warp is: enough to find the instruction in the PTX text and the warp in the launch."""

    kernel: str
    line: int
    text: str
    ctaid: tuple[int, int, int]
    warp: int

    def __str__(self) -> str:
        return f"{self.kernel}, line {self.line}: `{self.text}`, CTA {self.ctaid}, warp {self.warp}"


class ExecutionError(EmulatorError):
    """A fault with its place. `check` says which kind of rule was broken."""

    def __init__(self, place: Place, fault: Fault):
        where = "" if fault.address is None else f", address 0x{fault.address:x}"
        lane = "" if fault.lane is None else f", lane {fault.lane}"
        super().__init__(f"{fault.check}: {fault.message} ({place}{lane}{where})")
        self.place = place
        self.check = fault.check
        self.address = fault.address


class Deadlock(EmulatorError):  # noqa: N818 (the usual word)
    """No warp can go on and nothing is in flight. The message is a table: who waits for what."""

    check: Check = "deadlock"
