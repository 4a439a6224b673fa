"""Operations between the lanes of a warp, PTX ISA 9.7.13 (shuffles, votes, reductions, election)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.rounding import CANONICAL_NAN
from jax_fa4.emulator.state import Lanes, Warp
from jax_fa4.emulator.text.module import Pair

LANE = np.arange(32)


def require_members(warp: Warp, lanes: Lanes, members: int, what: str) -> None:
    """`.sync`: the lanes of the mask that have not exited execute this together, and no others."""
    if lanes.bits & ~members:
        raise Fault(
            "convergence", f"{what} is executed by lanes 0x{lanes.bits:08x}, outside of its mask 0x{members:08x}"
        )
    absent = members & warp.alive & ~lanes.bits
    if absent:
        raise Fault(
            "convergence", f"{what} with mask 0x{members:08x} waits for lanes 0x{absent:08x}, which are elsewhere"
        )


def _mask_of(warp: Warp, lanes: Lanes, slot: int, what: str) -> int:
    members = lanes.uniform(warp.v[slot], f"the mask of {what}")
    require_members(warp, lanes, members, what)
    return members


@family("shfl.sync")
def shfl(form: Form) -> Effect:
    mode = form.take("up", "down", "bfly", "idx")
    form.take("b32")
    form.end()
    target = form.operands[0]
    names = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    value, amount, limits, mask = form.src(1, "b32"), form.src(2, "u32"), form.src(3, "u32"), form.src(4, "u32")
    result = form.dst(names[0], "b32")
    valid_slot = None if names[1] is None else form.dst(names[1], "pred")

    def execute(warp: Warp, lanes: Lanes) -> None:
        _mask_of(warp, lanes, mask, f"shfl.{mode}")
        source, valid = _source_lane(mode, warp.v[amount].astype(np.int64) & 31, warp.v[limits].astype(np.int64))
        source = np.where(valid, source, LANE)
        inactive = lanes.mask & ~lanes.mask[source]
        if inactive.any():
            raise Fault(
                "convergence", f"shfl.{mode} reads from a lane that does not execute it", lane=int(inactive.argmax())
            )
        if result is not None:
            lanes.put(warp.v[result], warp.v[value][source])
        if valid_slot is not None:
            lanes.put(warp.v[valid_slot], valid)

    return form.effect(execute)


def _source_lane(mode: str, b, c):
    """The lane that each lane reads, and whether it lies in the segment."""
    segment, clamp = c >> 8 & 31, c & 31
    last = LANE & segment | clamp & ~segment & 31
    first = LANE & segment
    if mode == "up":
        return (LANE - b) & 31, LANE - b >= last
    if mode == "down":
        return (LANE + b) & 31, LANE + b <= last
    if mode == "bfly":
        return LANE ^ b, LANE ^ b <= last
    source = first | b & ~segment & 31
    return source, source <= last


@family("vote.sync")
def vote(form: Form) -> Effect:
    mode = form.take("all", "any", "uni", "ballot")
    form.take("b32" if mode == "ballot" else "pred")
    form.end()
    kind = "b32" if mode == "ballot" else "pred"
    predicate, mask = form.src(1, "pred"), form.src(2, "u32")
    result = form.dst(0, kind)

    def execute(warp: Warp, lanes: Lanes) -> None:
        _mask_of(warp, lanes, mask, f"vote.{mode}")
        mine = warp.v[predicate] & lanes.mask
        count = int(mine.sum())
        bits = int.from_bytes(np.packbits(mine, bitorder="little").tobytes(), "little")
        total = len(lanes.index)
        value = {"all": count == total, "any": count > 0, "uni": count in (0, total), "ballot": bits}[mode]
        if result is not None:
            lanes.put(warp.v[result], np.asarray(value).astype(warp.v[result].dtype))

    return form.effect(execute)


@family("match")
def match(form: Form) -> Effect:
    mode = form.take("any", "all")
    form.take("sync")
    kind = form.take("b32", "b64")
    form.end()
    target = form.operands[0]
    names = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    value, mask = form.src(1, kind), form.src(2, "u32")
    result = form.dst(names[0], "b32")
    all_equal = None if names[1] is None else form.dst(names[1], "pred")

    def execute(warp: Warp, lanes: Lanes) -> None:
        members = _mask_of(warp, lanes, mask, f"match.{mode}")
        values = warp.v[value]
        equal = (values[:, None] == values[None, :]) & lanes.mask[None, :]
        bits = (equal.astype(np.uint64) << LANE.astype(np.uint64)).sum(1).astype(np.uint32)
        same = bool((values[lanes.mask] == values[lanes.first]).all())
        if result is not None:
            lanes.put(warp.v[result], bits if mode == "any" else members & lanes.bits if same else 0)
        if all_equal is not None:
            lanes.put(warp.v[all_equal], same)

    return form.effect(execute)


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x.sum(dtype=x.dtype),
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@family("redux.sync")
def redux(form: Form) -> Effect:
    name = form.take(*REDUCTIONS)
    has_abs, propagates = form.has("abs"), form.has("NaN")
    kind = form.take("u32", "s32", "b32", "f32")
    form.end()
    value, mask = form.src(1, kind), form.src(2, "u32")
    result = form.dst(0, kind)
    reduce = REDUCTIONS[name]

    def execute(warp: Warp, lanes: Lanes) -> None:
        _mask_of(warp, lanes, mask, f"redux.{name}")
        mine = warp.v[value][lanes.mask]
        if kind == "f32":
            mine = np.abs(mine) if has_abs else mine
            total = _float_extremum(mine, name, propagates)
        else:
            total = reduce(mine)
        if result is not None:
            lanes.put(warp.v[result], total)

    return form.effect(execute)


def _float_extremum(values, name: str, propagates: bool):
    is_nan = np.isnan(values)
    if is_nan.all() or (propagates and is_nan.any()):
        return CANONICAL_NAN.view(np.float32)
    ordered = sorted(values[~is_nan], key=lambda x: (x, not np.signbit(x)))
    return ordered[0] if name == "min" else ordered[-1]


@family("elect.sync")
def elect(form: Form) -> Effect:
    """The lowest lane of the mask that has not exited is the leader."""
    form.end()
    target = form.operands[0]
    if not isinstance(target, Pair):
        raise form.unknown("needs two destinations")
    mask = form.src(1, "u32")
    leader_slot, is_leader = form.dst(target.first, "b32"), form.dst(target.second, "pred")

    def execute(warp: Warp, lanes: Lanes) -> None:
        members = _mask_of(warp, lanes, mask, "elect.sync") & warp.alive
        leader = (members & -members).bit_length() - 1
        if leader_slot is not None:
            lanes.put(warp.v[leader_slot], leader)
        if is_leader is not None:
            lanes.put(warp.v[is_leader], leader == LANE)

    return form.effect(execute)


@family("activemask")
def activemask(form: Form) -> Effect:
    form.take("b32")
    form.end()
    result = form.dst(0, "b32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        if result is not None:
            lanes.put(warp.v[result], lanes.bits)

    return form.effect(execute)


@family("bar.warp.sync")
def warp_sync(form: Form) -> Effect:
    form.end()
    mask = form.src(0, "u32")

    def execute(warp: Warp, lanes: Lanes) -> None:
        if _mask_of(warp, lanes, mask, "bar.warp.sync") & warp.alive == warp.alive:
            warp.writing_lanes = 0

    return form.effect(execute)
