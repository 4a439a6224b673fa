"""Instructions, one chapter of the ISA a module. Importing a module registers its instructions."""

import functools
import importlib

__all__ = ["register"]

CHAPTERS = (
    "barrier",
    "bulk",
    "cancel",
    "control",
    "convert",
    "copy",
    "fence",
    "float",
    "integer",
    "logic",
    "matrix",
    "mbarrier",
    "memory",
    "move",
    "predicate",
    "tcgen05",
    "tma",
    "warp",
    "wgmma",
)


@functools.cache
def register() -> None:
    """Make all instructions known to `decode`."""
    for chapter in CHAPTERS:
        importlib.import_module(f"{__name__}.{chapter}")
