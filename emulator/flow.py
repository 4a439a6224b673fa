"""Control flow of an entry: basic blocks, where diverged lanes meet again, registers that may be read unwritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

__all__ = ["Node", "maybe_unwritten", "reconvergence"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """What control flow needs to know of one instruction; register sets are bit masks.

    Attributes:
      successors: indices of the instructions that may follow; empty at an exit.
      reads: registers read.
      writes: registers written in all executing lanes (nothing if guarded).
      is_copy: it only copies the register it reads; copying one that was never written is no error, using the copy is.
    """

    successors: tuple[int, ...]
    reads: int
    writes: int
    is_copy: bool = False


@dataclasses.dataclass(slots=True)
class _Block:
    first: int
    last: int
    successors: list[int]


def _blocks(nodes: Sequence[Node]) -> tuple[list[_Block], list[int]]:
    leaders = {0}
    for index, node in enumerate(nodes):
        if node.successors != (index + 1,):
            leaders.update(node.successors)
            leaders.add(index + 1)
    firsts = sorted(leader for leader in leaders if leader < len(nodes))
    block_of = [0] * len(nodes)
    blocks = []
    for number, first in enumerate(firsts):
        last = (firsts[number + 1] if number + 1 < len(firsts) else len(nodes)) - 1
        block_of[first : last + 1] = [number] * (last + 1 - first)
        blocks.append(_Block(first, last, []))
    for block in blocks:
        block.successors = [block_of[target] for target in nodes[block.last].successors]
    return blocks, block_of


def reconvergence(nodes: Sequence[Node]) -> dict[int, int]:
    """For each instruction with several successors.

    The first instruction that all its paths pass (its immediate post-dominator), or -1.
    """
    blocks, _ = _blocks(nodes)
    everything = (1 << len(blocks)) - 1
    through = [everything] * len(blocks)  # bit b: every path from here to an exit passes block b
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            common = everything if blocks[number].successors else 0
            for successor in blocks[number].successors:
                common &= through[successor]
            common |= 1 << number
            if common != through[number]:
                through[number], changed = common, True
    meeting = {}
    for number, block in enumerate(blocks):
        if len(block.successors) > 1:
            others = through[number] & ~(1 << number)
            # of the post-dominators, the immediate one is passed first: it is post-dominated by all the others
            nearest = [b for b in range(len(blocks)) if others >> b & 1 and through[b] & others == others]
            meeting[block.last] = blocks[nearest[0]].first if nearest else -1
    return meeting


def maybe_unwritten(nodes: Sequence[Node]) -> int:
    """Registers that some path reads before any write, as a bit mask. A copy of such a register is no write."""
    found, before = 0, -1
    while found != before:
        before = found
        found |= _maybe_unwritten(
            [_without_write(node) if node.is_copy and node.reads & found else node for node in nodes]
        )
    return found


def _without_write(node: Node) -> Node:
    return dataclasses.replace(node, writes=0)


def _maybe_unwritten(nodes: Sequence[Node]) -> int:
    blocks, _ = _blocks(nodes)
    written_in = [_union(nodes[index].writes for index in range(block.first, block.last + 1)) for block in blocks]
    before: list[int | None] = [None] * len(blocks)  # registers written on every path to the block
    before[0] = 0
    pending = [0]
    while pending:
        number = pending.pop()
        known = before[number]
        assert known is not None  # only reached blocks are pending
        after = known | written_in[number]
        for successor in blocks[number].successors:
            old = before[successor]
            new = after if old is None else old & after
            if new != old:
                before[successor] = new
                pending.append(successor)
    found = 0
    for block, known in zip(blocks, before, strict=True):
        if known is not None:
            for index in range(block.first, block.last + 1):
                found |= nodes[index].reads & ~known
                known |= nodes[index].writes
    return found


def _union(masks: Iterable[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result
