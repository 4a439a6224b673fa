"""Arguments of commands: what would fail at the end of a long run is refused before it begins."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
from collections.abc import Callable

__all__ = ["at_least", "file_to_write", "numbers", "picture_to_write"]

PICTURES = (".png", ".svg")


def at_least(lowest: int) -> Callable[[str], int]:
    """An integer from `lowest` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {text}")
        return number

    return parse


def numbers(text: str) -> tuple[int, ...]:
    """Integers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between, got {text}") from None


def file_to_write(text: str) -> pathlib.Path:
    """A file in a folder that exists."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text}")
    return path


def picture_to_write(text: str) -> pathlib.Path:
    """The same for a picture, which matplotlib draws."""
    path = file_to_write(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in {' or '.join(PICTURES)}, got {text}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib, which is not installed")
    return path
