"""PTX text -> tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jax_fa4.emulator.errors import PtxSyntaxError

__all__ = ["Token", "tokens"]


class Token(NamedTuple):
    """`kind` is one of word (also dotted opcodes and directives), number, string, punctuation."""

    kind: str
    text: str
    line: int
    start: int


_TOKEN = re.compile(
    r"""
    [ \t\r]*(?:
    (?P<skip>//[^\n]*|/\*.*?\*/|\n|\Z)
  | (?P<string>"[^"]*")
  | (?P<number>-?(?:0[xX][0-9a-fA-F]+ | 0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F]) | 0[dD][0-9a-fA-F]{16}
        | [0-9]+(?:\.[0-9]+(?:[eE][+-]?[0-9]+)?)?)U?)
  | (?P<word>[.%$_A-Za-z][\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<punctuation>[{}()\[\],;:|@!+<>=*-])
    )""",
    re.VERBOSE | re.DOTALL,
)


def tokens(source: str) -> Iterator[Token]:
    """All tokens of `source`, in order. Raises `PtxSyntaxError` at a character that starts none."""
    position, line = 0, 1
    for match in _TOKEN.finditer(source):
        if match.start() != position:
            break
        position = match.end()
        kind = str(match.lastgroup)
        if kind == "skip":
            line += match[kind].count("\n")
        else:
            yield Token(kind, match[kind], line, match.start(kind))
    if position < len(source):
        raise PtxSyntaxError(f"unexpected {source[position:].lstrip(' ')[0]!r} in line {line}")
