"""Divisions of numbers that are not negative: a kernel divides them unsigned, which is cheaper."""

from cutlass import Int32, Uint32

from .seqlen import Index

__all__ = ["divide", "divide_with_rest"]


def divide(a: Index, b: Index) -> Index:
    """a // b."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return Int32(Uint32(a) // Uint32(b))


def divide_with_rest(a: Index, b: Index) -> tuple[Index, Index]:
    """a // b and a % b."""
    quotient = divide(a, b)
    return quotient, a - quotient * b
