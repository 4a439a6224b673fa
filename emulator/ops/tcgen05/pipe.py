"""What tcgen05 instructions share: a CTA's tensor memory, CTA pairs, and the pipe of each issuing thread."""

from __future__ import annotations

import dataclasses

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.order import Times
from jax_fa4.emulator.state import Cta, Warp
from jax_fa4.emulator.tmem import TensorMemory

__all__ = ["Pipe", "ctas_of", "memory_of", "pipe_of", "queue_of"]


@dataclasses.dataclass(slots=True, eq=False)
class Pipe:
    """The mma and cp of one thread. They execute in issue order, numbered from 1."""

    agent: int  # reads shared memory
    tensor_agent: int  # reads and writes tensor memory
    issued: int = 0
    completed: int = 0

    def times(self, warp: Warp) -> Times:
        """What the next operation may rely on: what the warp knows, all that the thread issued before, and itself.

        An accumulating MMA reads what it writes, so its own reads must not stand in its way.
        """
        times = warp.clock.times.copy()
        self.set(times, self.issued + 1)
        return times

    def set(self, times: Times, operation: int) -> None:
        """Whoever has `times` knows that all up to `operation` have happened."""
        times[:, [self.agent, self.tensor_agent]] = operation


def memory_of(cta: Cta) -> TensorMemory:
    """The tensor memory of a CTA, made when first used."""
    if "tmem" not in cta.scratch:
        check_races = cta.cluster.machine.options.check_races
        cta.scratch["tmem"] = TensorMemory(cta.cluster.clocks, cta.rank, check_races=check_races)
        cta.at_exit.append(cta.scratch["tmem"].check_exit)
    return cta.scratch["tmem"]


def ctas_of(warp: Warp, cta_group: int, what: str, *, peer_may_exit: bool = False) -> tuple[Cta, ...]:
    """The CTAs that an instruction of this cta_group works on: its own, or the pair of ranks 2i and 2i + 1.

    `peer_may_exit`: it only ends something, which the other CTA may have done earlier.
    """
    cta = warp.cta
    memory_of(cta).use_group(cta_group)
    if cta_group == 1:
        return (cta,)
    ctas = cta.cluster.ctas
    if cta.rank | 1 >= len(ctas):
        raise Fault("tcgen05", f"{what} with cta_group::2 in a cluster without a pair for CTA {cta.rank}")
    pair = (ctas[cta.rank & ~1], ctas[cta.rank | 1])
    for other in pair:
        if other.has_exited and not peer_may_exit:
            raise Fault("exit", f"{what} with cta_group::2, but CTA {other.rank} has exited")
        memory_of(other).use_group(cta_group)
    return pair


def queue_of(ctas: tuple[Cta, ...]) -> tuple[str, Cta]:
    """The queue in which all mma and cp of a CTA or pair execute."""
    return "tcgen05", ctas[0]


def pipe_of(warp: Warp, lane: int) -> Pipe:
    """The pipe of a thread."""
    pipes = warp.scratch.setdefault("tcgen05 pipes", {})
    if lane not in pipes:
        name = f"tcgen05 operations of warp {warp.index} lane {lane} of CTA {warp.cta.rank}"
        clocks = warp.cta.cluster.clocks
        pipes[lane] = Pipe(
            clocks.agent(name, is_async=True),
            clocks.agent(f"{name} in tensor memory", is_async=True, is_tensor=True),
        )
    return pipes[lane]
