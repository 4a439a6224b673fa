"""A progress bar for commands, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["with_progress"]

_T = TypeVar("_T")


def with_progress(items: Iterable[_T], *, total: int, unit: str) -> Iterable[_T]:
    """The items, counted on standard error as they come."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[_T] = tqdm(items, total=total, desc=f"{unit}s", unit=unit)
    return bar
