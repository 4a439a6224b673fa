"""When warps waited, and for what: events in steps of the scheduler, and a picture of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_fa4.emulator.barriers import Mbarrier
    from jax_fa4.emulator.state import Fragment, Warp

__all__ = ["Timeline"]


class Timeline:
    """Events of a launch."""

    def __init__(self) -> None:
        pass

    def phase(self, barrier: Mbarrier) -> None:
        """A phase completes."""

    def wake(self, warp: Warp, fragment: Fragment) -> None:
        """A wait ends."""
