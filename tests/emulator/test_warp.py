"""Operations between lanes."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import ExecutionError

from .snippet import evaluate

RNG = np.random.default_rng(0)
VALUES = RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
LANE = np.arange(32)


def shuffled(mode: str, amount: int, limits: int, mask: int = -1) -> tuple[np.ndarray, np.ndarray]:
    code = f"shfl.sync.{mode}.b32 %r20|%p20, %r1, {amount}, {limits}, {mask};"
    values = evaluate(code, {"r1": VALUES}, "r20", np.uint32)
    return values, evaluate(code, {"r1": VALUES}, "p20", np.uint32) != 0


@pytest.mark.parametrize("distance", [1, 2, 16, 31])
def test_butterflies(distance):
    values, valid = shuffled("bfly", distance, 31)
    assert np.array_equal(values, VALUES[LANE ^ distance])
    assert valid.all()


@pytest.mark.parametrize("distance", [1, 5, 31])
def test_lanes_beyond_the_end_keep_their_own(distance):
    values, valid = shuffled("up", distance, 0)
    assert np.array_equal(values, np.where(distance <= LANE, VALUES[(LANE - distance) % 32], VALUES))
    assert np.array_equal(valid, distance <= LANE)
    values, valid = shuffled("down", distance, 31)
    assert np.array_equal(values, np.where(LANE + distance < 32, VALUES[(LANE + distance) % 32], VALUES))
    assert np.array_equal(valid, LANE + distance < 32)


def test_index_broadcasts():
    values, _ = shuffled("idx", 7, 31)
    assert (values == VALUES[7]).all()


def test_segments_of_eight_lanes():
    segment = 0x1800  # lanes agree in their upper two bits
    values, _ = shuffled("idx", 3, segment | 31)
    assert np.array_equal(values, VALUES[LANE // 8 * 8 + 3])
    values, valid = shuffled("down", 5, segment | 31)
    assert np.array_equal(valid, LANE % 8 + 5 < 8)
    assert np.array_equal(values, np.where(valid, VALUES[(LANE + 5) % 32], VALUES))


def test_votes():
    p = VALUES % 3 == 0
    ballot = evaluate("vote.sync.ballot.b32 %r20, %p1, -1;", {"p1": p}, "r20", np.uint32)
    assert (ballot == sum(1 << i for i in range(32) if p[i])).all()
    for mode, expected in (("any", p.any()), ("all", p.all()), ("uni", p.all() or not p.any())):
        found = evaluate(f"vote.sync.{mode}.pred %p20, %p1, -1;", {"p1": p}, "p20", np.uint32)
        assert (found == expected).all()


@pytest.mark.parametrize(
    ("form", "function"),
    [
        ("add.u32", lambda x: x.sum(dtype=np.uint32)),
        ("min.u32", np.min),
        ("max.u32", np.max),
        ("min.s32", lambda x: x.view(np.int32).min()),
        ("max.s32", lambda x: x.view(np.int32).max()),
        ("and.b32", np.bitwise_and.reduce),
        ("or.b32", np.bitwise_or.reduce),
        ("xor.b32", np.bitwise_xor.reduce),
    ],
)
def test_reductions(form, function):
    found = evaluate(f"redux.sync.{form} %r20, %r1, -1;", {"r1": VALUES}, "r20", np.uint32)
    assert (found == np.asarray(function(VALUES)).view(np.uint32)).all()


def test_float_reductions_ignore_nan_unless_told():
    x = RNG.standard_normal(32).astype(np.float32)
    x[3] = np.nan
    assert (evaluate("redux.sync.max.f32 %r20, %r1, -1;", {"r1": x}, "r20", np.float32) == np.nanmax(x)).all()
    assert (
        evaluate("redux.sync.min.abs.f32 %r20, %r1, -1;", {"r1": x}, "r20", np.float32) == np.nanmin(np.abs(x))
    ).all()
    assert np.isnan(evaluate("redux.sync.max.NaN.f32 %r20, %r1, -1;", {"r1": x}, "r20", np.float32)).all()


def test_match():
    x = VALUES % 3
    found = evaluate("match.any.sync.b32 %r20, %r1, -1;", {"r1": x}, "r20", np.uint32)
    assert [int(m) for m in found] == [sum(1 << j for j in range(32) if x[j] == x[i]) for i in range(32)]
    found = evaluate("match.all.sync.b32 %r20|%p20, %r1, -1;", {"r1": x}, "r20", np.uint32)
    assert (found == 0).all()
    found = evaluate("match.all.sync.b32 %r20|%p20, %r1, -1;", {"r1": x * 0}, "r20", np.uint32)
    assert (found == 0xFFFFFFFF).all()


def test_one_lane_is_elected_and_always_the_same():
    leader = evaluate("elect.sync %r20|%p20, -1;", {}, "p20", np.uint32)
    assert leader.tolist() == [1] + [0] * 31
    inner = "setp.gt.u32 %p1, %r500, 3; mov.pred %p20, 0; @%p1 elect.sync %r20|%p20, 0xFFFFFFF0;"
    assert np.flatnonzero(evaluate(inner, {}, "p20", np.uint32)).tolist() == [4]


def test_activemask_is_who_executes():
    found = evaluate("mov.b32 %r20, 0; setp.gt.u32 %p1, %r500, 27; @%p1 activemask.b32 %r20;", {}, "r20", np.uint32)
    assert set(found.tolist()) == {0, 0xF0000000}


def test_reading_from_an_absent_lane_is_an_error():
    body = "mov.b32 %r20, 0; setp.lt.u32 %p1, %r500, 8; @%p1 shfl.sync.idx.b32 %r20, %r500, 9, 31, 0xFF;"
    with pytest.raises(ExecutionError, match="does not execute it") as caught:
        evaluate(body, {}, "r20", np.uint32)
    assert caught.value.check == "convergence"
