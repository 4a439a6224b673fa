"""Integer expressions over a call's buffers and device, which the FFI library evaluates at run time.

Buffers are numbered operands first, then results; axes count from the end, since any number of batch axes may lead:
`ceil_div(dim(Q, -3), 128)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jax_fa4.plan.limits import INT64_MAX, INT64_MIN, MAX_BUFFERS, MAX_EXPR_DEPTH, MAX_EXPR_OPS, MAX_TAIL, check

__all__ = [
    "Binary",
    "Const",
    "Dim",
    "Expr",
    "ExprLike",
    "Lead",
    "Multiprocessors",
    "as_expr",
    "ceil_div",
    "check_buffer",
    "dim",
    "evaluate",
    "lead",
    "maximum",
    "minimum",
    "multiprocessors",
    "postfix",
    "set_exprs",
]


def check_buffer(buffer: int) -> None:
    """Raises ValueError unless `buffer` can number a buffer of a call."""
    check(0 <= buffer < MAX_BUFFERS, "buffer", f"in [0, {MAX_BUFFERS})", buffer)


class Expr:
    """An int64 that the library computes at run time."""

    def __add__(self, other: ExprLike) -> Expr:
        return _binary("add", self, other)

    def __radd__(self, other: ExprLike) -> Expr:
        return _binary("add", other, self)

    def __sub__(self, other: ExprLike) -> Expr:
        return _binary("sub", self, other)

    def __rsub__(self, other: ExprLike) -> Expr:
        return _binary("sub", other, self)

    def __mul__(self, other: ExprLike) -> Expr:
        return _binary("mul", self, other)

    def __rmul__(self, other: ExprLike) -> Expr:
        return _binary("mul", other, self)

    def __floordiv__(self, other: ExprLike) -> Expr:
        return _binary("floor_div", self, other)

    def __rfloordiv__(self, other: ExprLike) -> Expr:
        return _binary("floor_div", other, self)


ExprLike = Expr | int
Operator = Literal["add", "sub", "mul", "floor_div", "ceil_div", "min", "max"]


@dataclasses.dataclass(frozen=True)
class Const(Expr):
    """A constant of the kernel, never a size of the call."""

    value: int

    def __post_init__(self) -> None:
        check(INT64_MIN <= self.value <= INT64_MAX, "a constant", "an int64", self.value)


@dataclasses.dataclass(frozen=True)
class Dim(Expr):
    """Size of one axis of a buffer."""

    buffer: int
    axis: int  # -1 is the last

    def __post_init__(self) -> None:
        check_buffer(self.buffer)
        check(-MAX_TAIL - 1 <= self.axis < 0, "axis", f"in [{-MAX_TAIL - 1}, -1] (counted from the end)", self.axis)


@dataclasses.dataclass(frozen=True)
class Lead(Expr):
    """Product of the sizes of all axes before the last `count`: the flattened batch."""

    buffer: int
    count: int

    def __post_init__(self) -> None:
        check_buffer(self.buffer)
        check(0 <= self.count <= MAX_TAIL + 1, "count", f"in [0, {MAX_TAIL + 1}]", self.count)


@dataclasses.dataclass(frozen=True)
class Multiprocessors(Expr):
    """How many multiprocessors the device has that runs the call."""


@dataclasses.dataclass(frozen=True)
class Binary(Expr):
    """Two operands and an operator, checked for overflow of int64."""

    operator: Operator
    left: Expr
    right: Expr


def _divide(left: int, right: int, *, up: bool) -> int:
    if right <= 0:
        raise ValueError(f"cannot divide {left} by {right}: a divisor must be positive")
    return -(-left // right) if up else left // right


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floor_div": lambda a, b: _divide(a, b, up=False),
    "ceil_div": lambda a, b: _divide(a, b, up=True),
    "min": min,
    "max": max,
}


def as_expr(value: ExprLike) -> Expr:
    """An int becomes a constant."""
    return value if isinstance(value, Expr) else Const(int(value))


def _binary(operator: Operator, left: ExprLike, right: ExprLike) -> Expr:
    left, right = as_expr(left), as_expr(right)
    if isinstance(left, Const) and isinstance(right, Const):
        return Const(_OPERATORS[operator](left.value, right.value))
    return Binary(operator, left, right)


def dim(buffer: int, axis: int) -> Expr:
    """Size of axis `axis` (negative: -1 is the last) of a buffer."""
    return Dim(buffer, axis)


def lead(buffer: int, count: int) -> Expr:
    """Product of the sizes of all axes of a buffer before its last `count`; 1 if there is none."""
    return Lead(buffer, count)


def multiprocessors() -> Expr:
    """How many multiprocessors the device has that runs the call."""
    return Multiprocessors()


def ceil_div(left: ExprLike, right: ExprLike) -> Expr:
    """left / right, rounded up."""
    return _binary("ceil_div", left, right)


def minimum(left: ExprLike, right: ExprLike) -> Expr:
    """The smaller of two values."""
    return _binary("min", left, right)


def maximum(left: ExprLike, right: ExprLike) -> Expr:
    """The larger of two values."""
    return _binary("max", left, right)


def evaluate(expr: ExprLike, shapes: Sequence[Sequence[int]], multiprocessors: int = 1) -> int:
    """The value that the library computes for buffers of these shapes on a device with so many multiprocessors.

    Raises:
      ValueError: division by a number that is not positive.
      OverflowError: a value does not fit an int64.
    """
    match as_expr(expr):
        case Const(value):
            return value
        case Dim(buffer, axis):
            value = shapes[buffer][axis]
        case Lead(buffer, count):
            value = math.prod(shapes[buffer][: len(shapes[buffer]) - count])
        case Multiprocessors():
            return multiprocessors
        case Binary(operator, left, right):
            values = (evaluate(side, shapes, multiprocessors) for side in (left, right))
            value = _OPERATORS[operator](*values)
    if not INT64_MIN <= value <= INT64_MAX:
        raise OverflowError(f"{value} does not fit an int64")
    return value


def postfix(expr: Expr) -> Iterator[Expr]:
    """The nodes in the order a stack machine evaluates them."""
    if isinstance(expr, Binary):
        yield from postfix(expr.left)
        yield from postfix(expr.right)
    yield expr


def _check_expr(expr: Expr) -> None:
    depth = deepest = count = 0
    for node in postfix(expr):
        depth += -1 if isinstance(node, Binary) else 1
        deepest, count = max(deepest, depth), count + 1
    check(count <= MAX_EXPR_OPS, "an expression's length", f"<= {MAX_EXPR_OPS}", count)
    check(deepest <= MAX_EXPR_DEPTH, "an expression's stack depth", f"<= {MAX_EXPR_DEPTH}", deepest)


def set_exprs(owner: object, *fields: str) -> None:
    """Turns ints into expressions in the named fields (an expression or a tuple of them) of a frozen dataclass."""
    for field in fields:
        value = getattr(owner, field)
        exprs = tuple(as_expr(v) for v in value) if isinstance(value, tuple) else as_expr(value)
        for expr in exprs if isinstance(exprs, tuple) else (exprs,):
            _check_expr(expr)
        object.__setattr__(owner, field, exprs)
