"""mbarriers: phases, counts, bytes, who may use them when, and what waits find out."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError
from jax_fa4.emulator.launch import Buffer, Options

from .snippet import run_body

START = """
mov.u32 %r0, %tid.x; mov.b32 %r1, smem; ld.param.b64 %d0, [p0];
setp.eq.u32 %p0, %r0, 0; setp.ge.u32 %p9, %r0, 32;
"""
INIT = "@%p0 mbarrier.init.shared.b64 [%r1], {count}; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;"


def run(
    body: str,
    *,
    count: int = 1,
    threads: int = 64,
    options: Options | None = None,
    cells: int = 32,
    **shape: tuple[int, int, int],
) -> np.ndarray:
    """Initialise one mbarrier at %r1, run `body` (%p0: thread 0, %p9: the second warp), give what it stored at %d0."""
    result = np.zeros(cells, np.uint32)
    text = START + INIT.format(count=count) + body
    run_body(text, params=(Buffer(result),), threads=threads, smem=1024, options=options, **shape)
    return result


def wait(parity: int, label: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], {parity}, 10000; @!%p1 bra {label};"


PRODUCE = """
@%p9 bra CONSUMER; st.shared.b32 [%r1+64], 5; bar.warp.sync -1; @%p0 mbarrier.arrive.shared.b64 _, [%r1];
bra DONE;
"""


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_an_arrival_hands_over_what_was_written(completion):
    body = PRODUCE + f"CONSUMER: {wait(0, 'W')} ld.shared.b32 %r2, [%r1+64]; st.global.b32 [%d0], %r2; DONE:"
    options = Options(completion=completion, order="random", seed=4)
    assert run(body.replace("st.shared.b32 [%r1+64], 5", "@%p0 st.shared.b32 [%r1+64], 5"), options=options)[0] == 5


RELAXED = """
@%p9 bra CONSUMER; @%p0 st.shared.b32 [%r1+64], 5; {fence}
@%p0 mbarrier.arrive.relaxed.cta.shared.b64 _, [%r1]; bra DONE;
CONSUMER: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p1, [%r1], 0; @!%p1 bra CONSUMER;
{fence} ld.shared.b32 %r2, [%r1+64]; st.global.b32 [%d0], %r2; DONE:
"""


def test_fences_make_relaxed_operations_hand_over_what_was_written():
    assert run(RELAXED.format(fence="fence.acq_rel.cta;"))[0] == 5


def test_relaxed_operations_hand_over_nothing():
    with pytest.raises(ExecutionError, match="not ordered"):
        run(RELAXED.format(fence=""))


PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
CLUSTER_SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
TO_THE_OTHER = f"""
mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p5, %r9, 1; mapa.shared::cluster.u32 %r10, %r1, 1;
{{first}} {CLUSTER_SYNC} @%p5 bra CONSUMER;
@%p0 {{access}} @%p0 mbarrier.arrive.release.{{scope}}.shared::cluster.b64 _, [%r10]; bra DONE;
CONSUMER: {wait(0, "W")} @%p0 {{then}}
DONE: {CLUSTER_SYNC}
"""
FILL = "@%p0 st.shared.b32 [%r1+64], 7;"
STORE, LOAD = "st.shared::cluster.b32 [%r10+64], 5;", "ld.shared::cluster.b32 %r2, [%r10+64];"


def arrive_at_the_other(scope: str, access: str, then: str, *, first: str = FILL) -> None:
    """In strict mode CTA 0 accesses CTA 1's memory and arrives there; once that is seen, CTA 1 does `then`."""
    body = TO_THE_OTHER.format(scope=scope, access=access, then=then, first=first)
    run(body, threads=32, options=Options(strict=True), **PAIR)


@pytest.mark.parametrize(("scope", "access"), [("cluster", STORE), ("cta", LOAD), ("cluster", LOAD)])
def test_what_another_cta_has_read_or_handed_over_in_scope_may_be_used(scope, access):
    arrive_at_the_other(scope, access, "st.shared.b32 [%r1+64], 6;")
    arrive_at_the_other(scope, access, "ld.shared.b32 %r3, [%r1+64];")


@pytest.mark.parametrize("first", ["", FILL], ids=["first written", "overwritten"])
def test_data_is_not_handed_over_to_another_cta_with_the_scope_of_one(first):
    arrive_at_the_other("cta", STORE, "st.shared.b32 [%r1+64], 6;", first=first)
    with pytest.raises(ExecutionError, match="whose arrival had the scope of one CTA") as caught:
        arrive_at_the_other("cta", STORE, "ld.shared.b32 %r3, [%r1+64];", first=first)
    assert caught.value.check == "race"


def test_waiting_for_the_other_parity_passes_at_once_and_is_a_race():
    body = """
    @%p9 bra CONSUMER; nanosleep.u32 1; @%p0 st.shared.b32 [%r1+64], 5;
    @%p0 mbarrier.arrive.shared.b64 _, [%r1]; bra DONE;
    """
    body += f"CONSUMER: {wait(1, 'W')} nanosleep.u32 1; nanosleep.u32 1; ld.shared.b32 %r2, [%r1+64]; DONE:"
    with pytest.raises(ExecutionError) as caught:
        run(body)
    assert caught.value.check == "race"


def test_phases_alternate():
    body = f"""
    @%p0 mbarrier.arrive.shared.b64 _, [%r1];
    {wait(0, "A")}
    bar.sync 0;
    @%p0 mbarrier.arrive.shared.b64 _, [%r1];
    {wait(1, "B")}
    mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
    selp.b32 %r2, 1, 0, %p2; @%p0 st.global.b32 [%d0], %r2;
    """
    assert run(body)[0] == 0


def test_every_lane_arrives_for_itself():
    body = f"mbarrier.arrive.shared.b64 %d1, [%r1]; {wait(0, 'A')} mbarrier.pending_count.b64 %r2, %d1;"
    body += "mad.wide.u32 %d2, %r0, 4, %d0; st.global.b32 [%d2], %r2;"
    assert sorted(run(body, count=64, cells=64).tolist()) == list(range(1, 65))


def test_tokens_tell_their_own_phase():
    body = """
    @%p0 mbarrier.arrive.shared.b64 %d1, [%r1];
    @%p0 mbarrier.test_wait.shared.b64 %p2, [%r1], %d1;
    @%p0 mbarrier.arrive.noComplete.shared.b64 %d2, [%r1+8], 1;
    @%p0 mbarrier.test_wait.shared.b64 %p3, [%r1+8], %d2;
    selp.b32 %r2, 1, 0, %p2; selp.b32 %r3, 1, 0, %p3;
    @%p0 st.global.b32 [%d0], %r2; @%p0 st.global.b32 [%d0+4], %r3;
    """
    second = "mov.pred %p2, 0; mov.pred %p3, 1; @%p0 mbarrier.init.shared.b64 [%r1+8], 2;"
    assert run(second + body)[:2].tolist() == [1, 0]


def test_dropping_out_lowers_the_count_of_later_phases():
    body = f"""
    @%p9 bra OTHER;
    @%p0 mbarrier.arrive_drop.shared.b64 _, [%r1];
    bra DONE;
    OTHER: setp.eq.u32 %p2, %r0, 32;
    @%p2 mbarrier.arrive.shared.b64 _, [%r1];
    {wait(0, "A")}
    @%p2 mbarrier.arrive.shared.b64 _, [%r1];
    {wait(1, "B")}
    @%p2 st.global.b32 [%d0], 1;
    DONE:
    """
    assert run(body, count=2)[0] == 1


def test_bytes_may_complete_before_they_are_expected():
    body = f"""
    @%p0 mbarrier.complete_tx.relaxed.cta.shared.b64 [%r1], 64;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
    {wait(0, "A")}
    @%p0 st.global.b32 [%d0], 1;
    """
    assert run(body)[0] == 1


def test_a_whole_warp_may_initialise_a_barrier_at_once():
    body = "@!%p9 mbarrier.init.shared.b64 [%r1+8], 1; bar.sync 0; @%p0 mbarrier.arrive.shared.b64 _, [%r1+8];"
    run(body + wait(0, "A").replace("[%r1]", "[%r1+8]"))
    with pytest.raises(ExecutionError, match="which is live"):
        run("add.u32 %r5, %r0, 1; @!%p9 mbarrier.init.shared.b64 [%r1+8], %r5;")


def test_invalidated_bytes_are_data_again():
    run("@%p0 mbarrier.inval.shared.b64 [%r1]; @%p0 st.shared.b32 [%r1], 3;")


def test_lanes_may_wait_for_different_barriers():
    body = """
    @%p0 mbarrier.init.shared.b64 [%r1+8], 1; bar.sync 0;
    @%p0 mbarrier.arrive.shared.b64 _, [%r1];
    and.b32 %r2, %r0, 1; mad.lo.u32 %r3, %r2, 8, %r1;
    mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0;
    bar.sync 0;
    selp.b32 %r2, 1, 0, %p1; mad.wide.u32 %d1, %r0, 4, %d0; st.global.b32 [%d1], %r2;
    """
    assert run(body, threads=32).tolist() == [1, 0] * 16


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@%p0 mbarrier.arrive.shared.b64 _, [%r1], 2;", "2 arrivals with 1 pending"),
        ("@%p0 mbarrier.init.shared.b64 [%r1], 1;", "which is live"),
        ("@%p0 mbarrier.init.shared.b64 [%r1+64], 0;", "count 0"),
        ("@%p0 mbarrier.arrive.shared.b64 _, [%r1+8];", "no live mbarrier"),
        ("@%p0 st.shared.b32 [%r1+4], 1;", "holds a live mbarrier"),
        ("@%p0 mbarrier.inval.shared.b64 [%r1]; @%p0 mbarrier.arrive.shared.b64 _, [%r1];", "no live mbarrier"),
        ("@%p0 mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1;", "completes"),
        (
            "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 1048575;"
            "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 1;",
            "more than 1048575",
        ),
        (
            "@%p0 mbarrier.complete_tx.relaxed.cta.shared.b64 [%r1], 80;"
            "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;",
            "16 bytes more",
        ),
    ],
)
def test_misuse_is_an_error(body, message):
    with pytest.raises(ExecutionError) as caught:
        run(body)
    assert caught.value.check == "mbarrier"
    assert message in str(caught.value)


def test_misaligned_barriers_are_errors():
    with pytest.raises(ExecutionError) as caught:
        run("@%p0 mbarrier.init.shared.b64 [%r1+4], 1;")
    assert caught.value.check == "alignment"


def test_use_without_synchronisation_after_the_init():
    body = """
    @%p0 mbarrier.init.shared.b64 [%r1+8], 1; @!%p9 bra A; nanosleep.u32 1;
    mbarrier.arrive.shared.b64 _, [%r1+8]; A:
    """
    with pytest.raises(ExecutionError, match="before its initialisation is visible"):
        run(body)


def test_a_waiter_that_sleeps_through_two_phases_is_told():
    body = f"""
    @%p9 bra WAITER;
    nanosleep.u32 1;
    @%p0 mbarrier.arrive.shared.b64 _, [%r1];
    @%p0 mbarrier.arrive.shared.b64 _, [%r1];
    bra DONE;
    WAITER: {wait(0, "A")}
    DONE:
    """
    with pytest.raises(ExecutionError, match="completed 2 phases before a waiter saw the first"):
        run(body)


def test_deadlocks_list_who_waits_for_what():
    body = f"@%p9 bra OTHER; {wait(0, 'A')} OTHER: bar.sync 3, 64;"
    with pytest.raises(Deadlock) as caught:
        run(body)
    text = str(caught.value)
    assert "warp 0, line" in text
    assert "phase 0 (parity 0) of mbarrier 0x400 (phase 0, 1 of 1 arrivals pending, 0 bytes pending)" in text
    assert "warp 1, line" in text
    assert "barrier 3: 32 of 64 threads (warps 1)" in text


def test_polling_for_a_phase_that_never_comes_is_a_deadlock():
    with pytest.raises(Deadlock, match="polls"):
        run("L: mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra L;")


CLUSTER = """
mov.u32 %r0, %tid.x; mov.b32 %r1, smem; ld.param.b64 %d0, [p0]; mov.u32 %r9, %cluster_ctarank;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r1], 2;
{fence}
barrier.cluster.arrive{relaxed}; barrier.cluster.wait;
mapa.shared::cluster.u32 %r2, %r1, 1;
@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r2];
setp.eq.u32 %p2, %r9, 1;
@!%p2 bra DONE;
W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra W;
@%p0 st.global.b32 [%d0], 7;
DONE: barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("relaxed", ["", ".relaxed"])
def test_other_ctas_may_arrive_after_fence_and_cluster_barrier(relaxed):
    result = np.zeros(1, np.uint32)
    body = CLUSTER.format(fence="fence.mbarrier_init.release.cluster;", relaxed=relaxed)
    run_body(body, params=(Buffer(result),), threads=32, smem=64, grid=(2, 1, 1), cluster=(2, 1, 1))
    assert result[0] == 7


def test_other_ctas_need_the_fence():
    body = CLUSTER.format(fence="", relaxed="")
    with pytest.raises(ExecutionError, match=r"without fence.mbarrier_init"):
        run_body(body, params=(Buffer(np.zeros(1, np.uint32)),), threads=32, smem=64, grid=(2, 1, 1), cluster=(2, 1, 1))
