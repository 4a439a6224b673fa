"""Barriers of a CTA and of a cluster, PTX ISA 9.7.13 (`bar`, `barrier`, `barrier.cluster`)."""

from __future__ import annotations

import functools

import numpy as np

from jax_fa4.emulator.barriers import Round
from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.schedule import Wait
from jax_fa4.emulator.state import Lanes, Warp


@family("bar", "barrier")
def bar(form: Form) -> Effect:
    """`bar.sync a{, b}`, `bar.arrive a, b`, `bar.red.op d, a{, b}, p`; `bar` is `barrier` with all lanes together."""
    form.has("cta")
    mode = form.take("sync", "arrive", "red")
    needs_all_lanes = form.has("aligned") or form.instruction.opcode.startswith("bar.")
    reduction = form.take("popc", "and", "or") if mode == "red" else ""
    if mode == "red":
        form.take("u32" if reduction == "popc" else "pred")
    form.end()
    operands = form.operands[1:] if mode == "red" else form.operands
    result = form.dst(0, "u32" if reduction == "popc" else "pred") if mode == "red" else None
    vote = form.src(operands[-1], "pred") if mode == "red" else None
    number = form.src(operands[0], "u32")
    has_count = len(operands) - (mode == "red") > 1
    count = form.src(operands[1], "u32") if has_count else None
    if mode == "arrive" and count is None:
        raise form.unknown("needs a thread count")

    def execute(warp: Warp, lanes: Lanes) -> Wait | None:
        if needs_all_lanes:
            warp.require_converged(lanes, f"bar.{mode}")
        which = lanes.uniform(warp.v[number], "the barrier's number")
        threads = None if count is None else lanes.uniform(warp.v[count], "the barrier's thread count")
        votes = 0 if vote is None else int(warp.v[vote][lanes.mask].sum())
        barriers = warp.cta.named_barriers
        round_ = barriers.arrive(warp, lanes.bits, which, threads, mode, votes)
        if lanes.bits == warp.alive:
            warp.writing_lanes = 0
        if mode == "arrive":
            return None
        return Wait(
            what=functools.partial(barriers.describe, which),
            ready=lambda: round_.is_complete,
            then=lambda: _leave(warp, lanes, round_, reduction, result),
            on=f"barrier {which}",
        )

    return form.effect(execute)


def _leave(warp: Warp, lanes: Lanes, round_: Round, reduction: str, result: int | None) -> None:
    warp.clock.join(round_.times)
    if result is not None:
        value = {"popc": round_.votes, "or": round_.votes > 0, "and": round_.votes == round_.count}[reduction]
        lanes.put(warp.v[result], np.asarray(value).astype(warp.v[result].dtype))


@family("barrier.cluster")
def cluster_barrier(form: Form) -> Effect:
    mode = form.take("arrive", "wait")
    semantics = form.take("release", "acquire", "relaxed", default="release" if mode == "arrive" else "acquire")
    needs_all_lanes = form.has("aligned")
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> Wait | None:
        if needs_all_lanes:
            warp.require_converged(lanes, "barrier.cluster")
        barrier = warp.cta.cluster.barrier
        if mode == "arrive":
            barrier.arrive(warp, lanes.bits, warp.clock.release(is_relaxed=semantics == "relaxed"))
            return None
        ready, then = barrier.wait(warp, lanes.bits, is_relaxed=semantics == "relaxed")
        return Wait(what=barrier.describe, ready=ready, then=then)

    return form.effect(execute)
