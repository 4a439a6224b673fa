"""Peers beside each other."""

import pytest

from jax_fa4.bench import peers
from jax_fa4.bench.cells import SMOKE
from jax_fa4.bench.clock import HostClock
from jax_fa4.bench.operands import random_operands
from jax_fa4.bench.run import time_cell

from .stand_ins import KnownClock, StandIn


def test_the_ratio_is_that_to_the_fastest_peer(cell):
    clock = KnownClock(jax_fa4=10, slow=30, fast=8)
    forward, backward = time_cell(cell, [StandIn("jax_fa4"), StandIn("slow"), StandIn("fast")], clock, rounds=1)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.best_peer == "fast"
    assert forward.ratio == pytest.approx(0.8)
    assert forward.figures["slow"].speed == pytest.approx(cell.work("forward") / 30e-6 / 1e12)


def test_jax_fa4_is_no_peer_of_itself(cell):
    present = [StandIn("jax_fa4"), StandIn("deterministic"), StandIn("other")]
    _, backward = time_cell(cell, present, KnownClock(jax_fa4=10, deterministic=5, other=20), rounds=1)
    assert backward.best_peer == "other"


def test_peers_take_turns_in_another_order_each_round(cell):
    clock = KnownClock(jax_fa4=1, other=1)
    time_cell(cell, [StandIn("jax_fa4"), StandIn("other")], clock, rounds=4)
    rounds = [clock.order[n : n + 4] for n in range(0, 16, 4)]
    assert len({tuple(turn) for turn in rounds}) == 4
    assert all(sorted(turn) == sorted(rounds[0]) for turn in rounds)
    behind = [dict(zip(turn[1:], turn, strict=False)) for turn in rounds[:2]]
    assert all(behind[1].get(name) != before for name, before in behind[0].items())  # nobody always follows the same


def test_no_rounds_only_prepare(cell):
    clock = KnownClock(jax_fa4=1)
    rows = time_cell(cell, [StandIn("jax_fa4")], clock, rounds=0)
    assert [row.figures for row in rows] == [{}, {}]
    assert clock.order == []


def test_a_peer_that_fails_is_named_with_its_reason_and_the_others_are_timed(cell):
    present = [StandIn("jax_fa4"), StandIn("bad", fails="no head dim 16\nmore"), StandIn("other")]
    forward, backward = time_cell(cell, present, KnownClock(jax_fa4=10, other=20), rounds=1)
    assert forward.refused == backward.refused == {"bad": "ValueError: no head dim 16"}
    assert forward.ratio == pytest.approx(2)


def test_a_peer_may_have_a_forward_only(cell):
    peer = StandIn("other", refused={"backward": "no gradient"})
    forward, backward = time_cell(cell, [StandIn("jax_fa4"), peer], KnownClock(jax_fa4=10, other=20), rounds=1)
    assert set(forward.figures) == {"jax_fa4", "other"}
    assert set(backward.figures) == {"jax_fa4"}
    assert backward.ratio is None
    assert backward.refused == {"other": "no gradient"}


@pytest.mark.parametrize("out", [(1.0, 2.1), (float("nan"), 2.0)], ids=["another", "nan"])
def test_a_peer_that_computes_something_else_is_not_timed(cell, out):
    forward, _ = time_cell(cell, [StandIn("jax_fa4"), StandIn("wrong", out=out)], KnownClock(jax_fa4=1, wrong=1), 1)
    assert set(forward.figures) == {"jax_fa4"}
    assert "its results differ" in forward.refused["wrong"]


def test_a_peer_with_another_gradient_is_timed_in_the_forward_only(cell):
    present = [StandIn("jax_fa4"), StandIn("wrong", gradient=(1.1, 2.0))]
    forward, backward = time_cell(cell, present, KnownClock(jax_fa4=1, wrong=1), rounds=1)
    assert set(forward.figures) == {"jax_fa4", "wrong"}
    assert set(backward.figures) == {"jax_fa4"}
    assert "by 0.045 of their size" in backward.refused["wrong"]


def test_a_peer_that_the_clock_does_not_see_is_named(cell):
    forward, _ = time_cell(cell, [StandIn("jax_fa4"), StandIn("unseen")], KnownClock(jax_fa4=1), rounds=2)
    assert forward.refused == {"unseen": "the known clock did not see it"}


def test_jax_fa4_and_jax_nn_compute_the_same_and_take_time(quick_compilation):
    present = [peers.PEERS["jax_fa4"], peers.PEERS["xla"]]
    rows = time_cell(SMOKE, present, HostClock(), rounds=1)
    assert [row.refused for row in rows] == [{}, {}]
    assert all(row.figures[name].seconds > 0 for row in rows for name in ("jax_fa4", "xla"))


def test_peers_are_chosen_by_name_and_jax_fa4_comes_first():
    assert [peer.name for peer in peers.select(["xla", "cudnn", "xla"])] == ["jax_fa4", "xla", "cudnn"]
    assert [peer.name for peer in peers.select([])] == ["jax_fa4", *peers.DEFAULT]
    with pytest.raises(ValueError, match=r"no peer is called 'cuddn' \(there are jax_fa4, .*cudnn, "):
        peers.select(["cuddn"])


@pytest.mark.parametrize("name", ["cudnn", "fa3", "fa4", "tokamax"])
def test_a_peer_that_cannot_run_says_why(name, monkeypatch):
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "cpu")
    assert peers.PEERS[name].why_missing() == "needs an NVIDIA GPU"


@pytest.mark.parametrize("source", [None, "raise RuntimeError('no such GPU')"], ids=["absent", "broken"])
def test_a_peer_that_cannot_be_imported_says_so(source, monkeypatch, tmp_path):
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "gpu")
    monkeypatch.syspath_prepend(tmp_path)
    if source:
        (tmp_path / "jax_fa4_test_peer.py").write_text(source)
    peer = peers.JaxPeer(name="x", package="x", module="jax_fa4_test_peer", attend=None)
    reasons = {None: "ModuleNotFoundError: No module named 'jax_fa4_test_peer'"}
    assert peer.why_missing() == reasons.get(source, "RuntimeError: no such GPU")


@pytest.mark.parametrize(
    ("directions", "seen"), [(None, {"forward", "backward"}), ([], {"forward"})], ids=["all", "none"]
)
def test_no_direction_is_not_every_direction(cell, directions, seen):
    assert set(peers.PEERS["xla"].calls(cell, random_operands(cell), directions).seen) == seen
