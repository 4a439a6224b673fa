"""PTX tokens -> `module.Module`.

Scopes are resolved, so that each register and branch target is unique in its entry.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jax_fa4.emulator.errors import PtxSyntaxError
from jax_fa4.emulator.text.lexer import Token, tokens
from jax_fa4.emulator.text.module import (
    WIDTH_OF_TYPE,
    Address,
    Entry,
    Guard,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

__all__ = ["parse"]

SPECIALS = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|is_explicit_cluster|lanemask_(eq|le|lt|ge|gt)"
    r"|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|aggr_smem_size)$"
)
SPACES = (".shared", ".local", ".const", ".global")
IGNORED_DIRECTIVES = (".pragma", ".loc", ".file", ".section")
BRANCHES = ("bra", "bra.uni")


def parse(source: str) -> Module:
    """Parse a PTX module. Raises `PtxSyntaxError` naming the line."""
    return _Parser(source).module()


class _Label(NamedTuple):
    scope: _Scope
    name: str
    line: int


class _Scope:
    """Names that a `{ }` owns: registers, labels (index of the next instruction) and variables."""

    def __init__(self, parent: _Scope | None):
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.families: list[tuple[str, int, int]] = []
        self.labels: dict[str, int] = {}

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, source: str):
        self.source = source
        self.tokens = [*tokens(source), Token("end", "", source.count("\n") + 1, len(source))]
        self.at = 0

    # tokens

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, text: str) -> bool:
        if self.token.text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            raise self.error(f"expected {text!r}, found {self.token.text!r}")
        return self.next()

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"{message} in line {self.token.line}")

    def integer(self) -> int:
        token = self.next()
        if token.kind != "number":
            raise PtxSyntaxError(f"expected a number, found {token.text!r} in line {token.line}")
        return _number(token).bits

    # module scope

    def module(self) -> Module:
        version, target = (0, 0), ""
        entries: dict[str, Entry] = {}
        variables: list[Variable] = []
        while self.token.kind != "end":
            word = self.token.text
            if word == ".version":
                self.next()
                major, minor = self.next().text.split(".")
                version = (int(major), int(minor))
            elif word == ".target":
                self.next()
                target = self.next().text
                while self.accept(","):
                    self.next()
            elif word == ".address_size":
                self.next()
                if self.integer() != 64:
                    raise self.error("only 64-bit addresses are supported")
            elif word in (".visible", ".extern", ".weak", ".common"):
                self.next()
            elif word == ".entry":
                entry = self.entry()
                entries[entry.name] = entry
            elif word in SPACES:
                variables.append(self.variable())
            elif word in IGNORED_DIRECTIVES:
                self.skip_line(word)
            else:
                raise self.error(f"unexpected {word!r}")
        return Module(version, target, entries, tuple(variables))

    def skip_line(self, directive: str) -> None:
        line = self.token.line
        if directive == ".section":
            while not self.accept("{"):
                self.next()
            while not self.accept("}"):
                self.next()
            return
        while self.token.line == line and self.token.kind != "end":
            self.next()

    def variable(self) -> Variable:
        space = self.next().text[1:]
        align = 0
        if self.accept(".align"):
            align = self.integer()
        width = WIDTH_OF_TYPE[self.next().text[1:]] // 8
        name = self.next().text
        count = 1
        while self.accept("["):
            count *= 0 if self.token.text == "]" else self.integer()
            self.expect("]")
        initial = self.initial(width) if self.accept("=") else None
        self.expect(";")
        return Variable(name, space, count * width, align or width, initial)

    def initial(self, width: int) -> bytes:
        braced = self.accept("{")
        values = [self.integer()]
        while self.accept(","):
            values.append(self.integer())
        if braced:
            self.expect("}")
        return b"".join((value & ((1 << 8 * width) - 1)).to_bytes(width, "little") for value in values)

    def parameter(self, offset: int) -> Parameter:
        self.expect(".param")
        align, width = 0, 0
        while self.token.text.startswith("."):
            word = self.next().text
            if word == ".align":
                # `.ptr .align n` speaks of what is pointed to
                align = max(align, self.integer()) if width == 0 else (self.integer(), align)[1]
            elif word[1:] in WIDTH_OF_TYPE:
                width = WIDTH_OF_TYPE[word[1:]] // 8
            elif word not in (".ptr", ".global", ".shared", ".const", ".local"):
                raise self.error(f"unexpected {word!r}")
        name = self.next().text
        size = width
        while self.accept("["):
            size *= self.integer()
            self.expect("]")
        align = align or width
        return Parameter(name, -(-offset // align) * align, size, align)

    def entry(self) -> Entry:
        self.expect(".entry")
        name = self.next().text
        parameters: list[Parameter] = []
        if self.accept("("):
            while not self.accept(")"):
                last = parameters[-1] if parameters else Parameter("", 0, 0, 1)
                parameters.append(self.parameter(last.offset + last.size))
                self.accept(",")
        required, maximum, registers, min_ctas = None, None, None, 1
        while self.token.text != "{":
            word = self.next().text
            if word in (".reqntid", ".maxntid"):
                sizes = [self.integer()]
                while self.accept(","):
                    sizes.append(self.integer())
                x, y, z = (*sizes, 1, 1)[:3]
                if word == ".reqntid":
                    required = (x, y, z)
                else:
                    maximum = x * y * z
            elif word == ".maxnreg":
                registers = self.integer()
            elif word == ".minnctapersm":
                min_ctas = max(self.integer(), 1)
            elif word == ".maxclusterrank":
                self.integer()
            elif word == ".reqnctapercluster":
                self.integer()
                while self.accept(","):
                    self.integer()
            elif word == ".pragma":
                self.skip_pragma()
            elif word != ".explicitcluster":
                raise self.error(f"unexpected {word!r}")
        body = _Body(self)
        self.expect("{")
        body.block(_Scope(None))
        instructions, labels = body.finish()
        return Entry(
            name=name,
            parameters=tuple(parameters),
            registers=tuple(body.registers),
            variables=tuple(body.variables),
            instructions=instructions,
            labels=labels,
            required_threads=required,
            max_threads=maximum,
            max_registers=registers,
            min_ctas=min_ctas,
        )

    def skip_pragma(self) -> None:
        while not self.accept(";"):
            self.next()


class _Body:
    """The statements of one entry."""

    def __init__(self, parser: _Parser):
        self.p = parser
        self.registers: list[Register] = []
        self.variables: list[Variable] = []
        self.instructions: list[Instruction] = []
        self.branches: dict[int, _Label] = {}

    def block(self, scope: _Scope) -> None:
        p = self.p
        while not p.accept("}"):
            word = p.token.text
            if p.accept("{"):
                self.block(_Scope(scope))
            elif word == ".reg":
                self.declare(scope)
            elif word in SPACES:
                self.variables.append(p.variable())
            elif word == ".pragma":
                p.skip_pragma()
            elif word in IGNORED_DIRECTIVES:
                p.skip_line(word)
            elif p.tokens[p.at + 1].text == ":" and p.token.kind == "word":
                scope.labels[p.next().text] = len(self.instructions)
                p.expect(":")
            elif p.accept(";"):
                pass
            elif p.token.kind == "end":
                raise p.error("a `}` is missing")
            else:
                self.instruction(scope)

    def declare(self, scope: _Scope) -> None:
        p = self.p
        p.expect(".reg")
        kind = p.next().text[1:]
        if kind not in WIDTH_OF_TYPE:
            raise p.error(f"unknown register type .{kind}")
        width = max(WIDTH_OF_TYPE[kind], 16) if kind != "pred" else 1
        while True:
            name = p.next().text
            if p.accept("<"):
                scope.families.append((name, p.integer(), width))
                p.expect(">")
            else:
                scope.registers[name] = self.new(name, width)
            if not p.accept(","):
                break
        p.expect(";")

    def new(self, name: str, width: int) -> Register:
        self.registers.append(Register(len(self.registers), name, width))
        return self.registers[-1]

    def register(self, name: str, scope: _Scope) -> Register | None:
        where: _Scope | None = scope
        while where is not None:
            if name in where.registers:
                return where.registers[name]
            for stem, count, width in where.families:
                tail = name[len(stem) :]
                if name.startswith(stem) and tail.isdigit() and int(tail) < count and tail == str(int(tail)):
                    where.registers[name] = self.new(name, width)
                    return where.registers[name]
            where = where.parent
        return None

    def instruction(self, scope: _Scope) -> None:
        p = self.p
        first = p.token
        guard = None
        if p.accept("@"):
            negated = p.accept("!")
            guard = Guard(self.known_register(scope), negated)
        opcode = p.next()
        if opcode.kind != "word" or opcode.text.startswith((".", "%")):
            raise PtxSyntaxError(f"expected an instruction, found {opcode.text!r} in line {opcode.line}")
        operands: list[Operand] = []
        if opcode.text in BRANCHES:
            name = p.next()
            self.branches[len(self.instructions)] = _Label(scope, name.text, name.line)
        elif p.token.text != ";":
            operands.append(self.operand(scope))
            while p.accept(","):
                operands.append(self.operand(scope))
        end = p.expect(";")
        text = " ".join(p.source[first.start : end.start].split())
        self.instructions.append(Instruction(opcode.line, opcode.text, tuple(operands), guard, text))

    def known_register(self, scope: _Scope) -> Register:
        token = self.p.next()
        register = self.register(token.text, scope)
        if register is None:
            raise PtxSyntaxError(f"unknown register {token.text} in line {token.line}")
        return register

    def operand(self, scope: _Scope) -> Operand:
        p = self.p
        if p.accept("["):
            return self.address(scope)
        if p.accept("{"):
            items = [self.operand(scope)]
            while p.accept(","):
                items.append(self.operand(scope))
            p.expect("}")
            return Vector(tuple(items))
        if p.accept("!"):
            return Negated(self.known_register(scope))
        if p.token.kind == "number":
            return _number(p.next())
        if p.token.text == "-":
            p.next()
            literal = _number(p.next())
            return Immediate(-literal.bits)
        first = self.name(scope)
        if p.accept("|"):
            return Pair(first, self.name(scope))
        return first

    def name(self, scope: _Scope) -> Register | Special | Symbol | Sink:
        token = self.p.next()
        if token.kind != "word":
            raise PtxSyntaxError(f"expected an operand, found {token.text!r} in line {token.line}")
        if token.text == "_":
            return Sink()
        register = self.register(token.text, scope)
        if register is not None:
            return register
        if SPECIALS.match(token.text):
            return Special(token.text[1:])
        if token.text.startswith("%"):
            raise PtxSyntaxError(f"unknown register {token.text} in line {token.line}")
        return Symbol(token.text)

    def address(self, scope: _Scope) -> Address:
        p = self.p
        base = _number(p.next()) if p.token.kind == "number" else self.name(scope)
        if not isinstance(base, Register | Symbol | Immediate):
            raise p.error(f"cannot address {base}")
        offset, coordinates = 0, None
        while not p.accept("]"):
            if p.accept("+"):
                offset += p.integer()
            elif p.token.text.startswith("-"):
                offset += p.integer() if p.token.kind == "number" else -(p.next(), p.integer())[1]
            elif p.accept(","):
                vector = self.operand(scope)
                if not isinstance(vector, Vector):
                    raise p.error("expected coordinates in braces")
                coordinates = vector
            else:
                raise p.error(f"unexpected {p.token.text!r} in an address")
        return Address(base, offset, coordinates)

    def finish(self) -> tuple[tuple[Instruction, ...], tuple[int, ...]]:
        """The instructions with branch targets resolved, and the targets."""
        for index, (scope, name, line) in self.branches.items():
            target = scope.label(name)
            if target is None:
                raise PtxSyntaxError(f"unknown label {name} in line {line}")
            old = self.instructions[index]
            self.instructions[index] = Instruction(old.line, old.opcode, old.operands, old.guard, old.text, target)
        count = len(self.instructions)
        labels = {item.target for item in self.instructions if item.target is not None}
        if count in labels:
            raise PtxSyntaxError("a label at the end of the entry has no instruction")
        return tuple(self.instructions), tuple(sorted(labels))


def _number(token: Token) -> Immediate:
    text = token.text.rstrip("U")
    negative = text.startswith("-")
    text = text.lstrip("-")
    if text[:2] in ("0f", "0F"):
        return Immediate(int(text[2:], 16) ^ (0x80000000 if negative else 0), "f32")
    if text[:2] in ("0d", "0D"):
        return Immediate(int(text[2:], 16) ^ (1 << 63 if negative else 0), "f64")
    if "." in text:
        raise PtxSyntaxError(f"decimal fractions are not supported: {token.text!r} in line {token.line}")
    value = int(text, 0) if text[:2] in ("0x", "0X") else int(text)
    return Immediate(-value if negative else value)
