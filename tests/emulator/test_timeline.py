"""Timelines: turns, waits, and the picture of them."""

from __future__ import annotations

import itertools

import pytest

from jax_fa4.emulator.launch import Options
from jax_fa4.emulator.timeline import Timeline

from .snippet import run_body

BODY = """
mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, 32;
@%p1 bra SECOND;
bar.sync 1, 64;
bra DONE;
SECOND: add.u32 %r1, %r0, 1; add.u32 %r1, %r1, 1; nanosleep.u32 1; add.u32 %r1, %r1, 1;
bar.sync 1, 64;
DONE: mov.b32 %r2, 0;
"""
FIRST, SECOND = ((0, 0, 0), 0), ((0, 0, 0), 1)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    found = run_body(BODY, threads=64, options=Options(record_timeline=True)).timeline
    assert found is not None
    return found


def test_slices_add_up_to_what_was_executed(timeline):
    result = run_body(BODY, threads=64)
    for key in (FIRST, SECOND):
        executed = sum(item.instructions for item in timeline.slices if item.warp == key)
        assert executed == result.stats.opcodes[key[1]].total()


def test_waits_tell_who_waited_for_what(timeline):
    waits = [(span.warp, span.on) for span in timeline.spans]
    assert waits == [(FIRST, "barrier 1")]
    assert timeline.spans[0].first < timeline.spans[0].last


def test_turns_are_as_long_as_their_busiest_warp(timeline):
    starts = timeline.starts()
    for turn, (begin, end) in enumerate(itertools.pairwise(starts)):
        assert end - begin == max((item.instructions for item in timeline.slices if item.turn == turn), default=0)


def test_the_picture_names_barriers(timeline, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.svg"
    timeline.draw(str(path), names={"barrier 1": "turn"})
    assert path.read_text(encoding="utf-8").startswith("<?xml")


def test_nothing_is_recorded_unless_asked():
    assert run_body(BODY, threads=64).timeline is None
