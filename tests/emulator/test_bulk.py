"""Bulk copies and reductions without tensor maps, bulk groups, cp.async, and stores that an mbarrier counts."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError
from jax_fa4.emulator.launch import Buffer, Options

from .snippet import run_body

COMPLETIONS = ["late", "early", "random"]
START = """
mov.u32 %r0, %tid.x; mov.b32 %r1, smem; ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
setp.eq.u32 %p0, %r0, 0; add.u32 %r2, %r1, 2048;
mad.lo.u32 %r3, %r0, 4, %r1; mad.wide.u32 %d2, %r0, 4, %d1; mad.wide.u32 %d3, %r0, 4, %d0;
@%p0 mbarrier.init.shared.b64 [%r2], 1; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;
"""
LOAD = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 128, [%r2];
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W;"
OUT = "ld.shared.b32 %r4, [%r3]; st.global.b32 [%d2], %r4;"
FILL = "ld.global.b32 %r4, [%d3]; st.shared.b32 [%r3], %r4;"
STORE = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128; @%p0 cp.async.bulk.commit_group;"
DONE = "@%p0 cp.async.bulk.wait_group 0;"
PUBLISH = "fence.proxy.async.shared::cta; bar.sync 0;"


def run(
    body: str, *, source=None, result=None, threads: int = 32, options: Options | None = None, **launch
) -> np.ndarray:
    source = np.arange(32, dtype=np.uint32) + 100 if source is None else source
    result = np.zeros(32, source.dtype) if result is None else result
    params = (Buffer(source), Buffer(result))
    run_body(START + body, params=params, threads=threads, smem=4096, options=options, **launch)
    return result


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_a_load_is_there_after_its_phase(completion):
    options = Options(completion=completion, order="random", seed=2)
    assert run(LOAD + WAIT + OUT, options=options).tolist() == list(range(100, 132))


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_reading_before_the_phase_is_an_error_at_any_completion(completion):
    with pytest.raises(ExecutionError) as caught:
        run(LOAD + OUT, options=Options(completion=completion))
    assert caught.value.check in ("in flight", "race")


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_a_store_arrives(completion):
    assert run(FILL + PUBLISH + STORE + DONE, options=Options(completion=completion)).tolist() == list(range(100, 132))


def test_a_store_needs_the_proxy_fence():
    with pytest.raises(ExecutionError, match=r"without fence.proxy.async") as caught:
        run(FILL + "bar.sync 0;" + STORE + DONE)
    assert caught.value.check == "proxy fence"


def test_the_fence_of_another_warp_does_not_help():
    body = FILL + "setp.ge.u32 %p2, %r0, 32; @%p2 bra A; bar.arrive 1, 64; bra B;"
    fenced = body + "A: fence.proxy.async.shared::cta; bar.sync 1, 64; B: bar.sync 0;" + STORE + DONE
    with pytest.raises(ExecutionError) as caught:
        run(fenced, source=np.arange(64, dtype=np.uint32), result=np.zeros(64, np.uint32), threads=64)
    assert caught.value.check == "proxy fence"


def test_a_fence_in_one_lane_covers_the_others_only_after_they_have_met():
    one = "@%p0 fence.proxy.async.shared::cta; bar.sync 0;" + STORE + DONE
    run(FILL + "bar.warp.sync -1;" + one)
    with pytest.raises(ExecutionError) as caught:
        run(FILL + one)
    assert caught.value.check == "proxy fence"


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_reusing_the_source_of_a_store_before_it_is_read_is_an_error(completion):
    reuse = "@%p0 st.shared.b32 [%r1], 0;"
    run(
        FILL + PUBLISH + STORE + DONE.replace("wait_group 0", "wait_group.read 0") + reuse,
        options=Options(completion=completion),
    )
    with pytest.raises(ExecutionError, match="may still read") as caught:
        run(FILL + PUBLISH + STORE + reuse + DONE, options=Options(completion=completion))
    assert caught.value.check == "race"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (STORE.replace("@%p0 cp.async.bulk.commit_group;", ""), "never committed"),
        (STORE, "without waiting"),
        (STORE + DONE.replace("@%p0", "setp.eq.u32 %p3, %r0, 1; @%p3"), "without waiting"),
        (STORE + DONE.replace("0;", "1;"), "without waiting"),
    ],
)
def test_stores_that_nobody_waits_for(body, message):
    with pytest.raises(ExecutionError, match=message) as caught:
        run(FILL + PUBLISH + body)
    assert caught.value.check == "bulk group"
    found = run(FILL + PUBLISH + body, options=Options(allow_unwaited_stores=True))
    assert found.tolist() == list(range(100, 132))


def test_waiting_leaves_the_newest_groups_pending():
    second = STORE.replace("[%r1]", "[%r1+128]").replace("[%d1]", "[%d1+128]")
    body = FILL + "st.shared.b32 [%r3+128], %r0;" + PUBLISH + STORE + second
    body += "@%p0 cp.async.bulk.wait_group.read 1; @%p0 st.shared.b32 [%r1], 0; {} @%p0 cp.async.bulk.wait_group 0;"
    result = run(body.format(""), result=np.zeros(64, np.uint32))
    assert result.tolist() == [*range(100, 132), *range(32)]
    with pytest.raises(ExecutionError, match="may still read"):
        run(body.format("@%p0 st.shared.b32 [%r1+128], 0;"), result=np.zeros(64, np.uint32))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("add.f32", np.float32), ("add.u32", np.uint32), ("min.s32", np.int32), ("max.u64", np.uint64)]
)
def test_reductions_combine_elements(kind, dtype):
    old = (np.arange(128 // dtype().itemsize) % 7 * 3).astype(dtype)
    new = (np.arange(128 // dtype().itemsize) % 5 * 4).astype(dtype)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[kind[:3]]
    expected = function(old, new)
    reduce = f"@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{kind} [%d1], [%r1], 128;"
    run(FILL + PUBLISH + reduce + "@%p0 cp.async.bulk.commit_group;" + DONE, source=new.view(np.uint32), result=old)
    assert np.array_equal(old, expected)


def test_float_reductions_flush_subnormals():
    old = np.full(32, 1e-40, np.float32)
    reduce = "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 128;"
    run(FILL + PUBLISH + reduce + "@%p0 cp.async.bulk.commit_group;" + DONE, source=np.zeros(32, np.uint32), result=old)
    assert (old == 0).all()


@pytest.mark.parametrize(
    ("body", "check"),
    [
        (LOAD.replace("128, [%r2]", "120, [%r2]"), "alignment"),
        (LOAD.replace("[%r1], [%d0]", "[%r1+8], [%d0]"), "alignment"),
        (LOAD.replace("[%r1], [%d0]", "[%r1], [%d0+8]"), "alignment"),
        (LOAD.replace("[%r1], [%d0]", "[%r1], [%d0+16]"), "bounds"),
        (LOAD.replace("[%r1], [%d0]", "[%r1+4000], [%d0]"), "bounds"),
        (LOAD.replace("[%r1], [%d0]", "[%r1+1984], [%d0]"), "mbarrier"),  # runs into the mbarrier
        (LOAD + LOAD.splitlines()[2], "in flight"),
    ],
)
def test_wrong_copies_are_errors(body, check):
    with pytest.raises(ExecutionError) as caught:
        run(body + WAIT)
    assert caught.value.check == check


def test_too_few_bytes_are_a_deadlock():
    with pytest.raises(Deadlock, match="32 bytes pending"):
        run(LOAD.replace("%r2], 128", "%r2], 160") + WAIT)


def test_leaving_while_a_copy_is_under_way_is_an_error():
    with pytest.raises(ExecutionError, match="exits while a copy"):
        run(LOAD)


PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
RANK = "mov.u32 %r9, %cluster_ctarank; barrier.cluster.arrive; barrier.cluster.wait;"
CLOSE = "barrier.cluster.arrive; barrier.cluster.wait;"


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_multicast_fills_and_signals_every_cta_of_the_mask(completion):
    body = (
        RANK
        + """
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
    setp.ne.u32 %p2, %r9, 0; not.pred %p3, %p0; or.pred %p2, %p2, %p3;
    mov.b16 %h1, 3;
    @!%p2 MULTICAST [%r1], [%d0], 128, [%r2], %h1;
    """.replace("MULTICAST", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster")
    )
    out = "ld.shared.b32 %r4, [%r3]; mad.wide.u32 %d2, %r9, 128, %d2; st.global.b32 [%d2], %r4;"
    result = run(
        body + WAIT + out + CLOSE, result=np.zeros(64, np.uint32), options=Options(completion=completion), **PAIR
    )
    assert result.tolist() == [*range(100, 132)] * 2


def test_a_copy_to_another_cta_signals_there():
    body = (
        FILL
        + PUBLISH
        + RANK
        + """
    xor.b32 %r10, %r9, 1; mapa.shared::cluster.u32 %r11, %r1, %r10; mapa.shared::cluster.u32 %r12, %r2, %r10;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r11+1024], [%r1], 128, [%r12];
    """
    )
    out = WAIT + "ld.shared.b32 %r4, [%r3+1024]; setp.eq.u32 %p4, %r9, 0; @%p4 st.global.b32 [%d2], %r4;" + CLOSE
    source = np.arange(32, dtype=np.uint32)
    assert run(body + out, source=source, **PAIR).tolist() == source.tolist()


def test_stores_across_the_cluster_are_counted_by_the_receiver():
    body = (
        RANK
        + """
    xor.b32 %r10, %r9, 1; mapa.shared::cluster.u32 %r11, %r3, %r10; mapa.shared::cluster.u32 %r12, %r2, %r10;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
    add.u32 %r13, %r0, %r10;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r11], %r13, [%r12];
    """
    )
    out = WAIT + "ld.shared.b32 %r4, [%r3]; @!%p4 st.global.b32 [%d2], %r4;" + CLOSE
    assert run(body + "setp.ne.u32 %p4, %r9, 1;" + out, **PAIR).tolist() == [i + 1 for i in range(32)]


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_cp_async_is_visible_after_wait_and_barrier(completion):
    copy = "cp.async.ca.shared.global [%r3], [%d3], 4; cp.async.commit_group;"
    body = """
    shl.b32 %r5, %r0, 2; xor.b32 %r5, %r5, 4; add.u32 %r5, %r5, %r1; ld.shared.b32 %r4, [%r5];
    st.global.b32 [%d2], %r4;
    """
    options = Options(completion=completion)
    found = run(copy + "cp.async.wait_group 0; bar.sync 0;" + body, options=options)
    assert found.tolist() == [100 + (i ^ 1) for i in range(32)]
    with pytest.raises(ExecutionError):
        run(copy + "bar.sync 0;" + body, options=options)


def test_cp_async_fills_with_zeros_beyond_its_source_size():
    copy = "mad.lo.u32 %r3, %r0, 16, %r1; mov.b32 %r5, 4; @%p0 cp.async.cg.shared.global [%r3], [%d0], 16, %r5;"
    body = copy + "cp.async.wait_all; bar.sync 0; setp.lt.u32 %p2, %r0, 4; mad.lo.u32 %r3, %r0, 4, %r1;"
    found = run(body + "@%p2 ld.shared.b32 %r4, [%r3]; @%p2 st.global.b32 [%d2], %r4;")
    assert found[:4].tolist() == [100, 0, 0, 0]


def test_cp_async_arrives_on_an_mbarrier():
    init = "add.u32 %r2, %r2, 8; @%p0 mbarrier.init.shared.b64 [%r2], 32; bar.sync 0;"
    copy = "cp.async.ca.shared.global [%r3], [%d3], 4; cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];"
    assert run(init + copy + WAIT + OUT).tolist() == list(range(100, 132))


def test_cp_async_data_needs_a_proxy_fence_before_a_bulk_store():
    copy = "cp.async.ca.shared.global [%r3], [%d3], 4; cp.async.wait_all;"
    assert run(copy + PUBLISH + STORE + DONE).tolist() == list(range(100, 132))
    with pytest.raises(ExecutionError) as caught:
        run(copy + "bar.sync 0;" + STORE + DONE)
    assert caught.value.check == "proxy fence"


@pytest.mark.parametrize("wait", ["cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"])
def test_a_lanes_proxy_fence_covers_what_others_copied_only_once_they_have_met(wait):
    copy, fence = "cp.async.ca.shared.global [%r3], [%d3], 4;" + wait, "@%p0 fence.proxy.async.shared::cta;"
    assert run(copy + "bar.warp.sync -1;" + fence + STORE + DONE).tolist() == list(range(100, 132))
    with pytest.raises(ExecutionError) as caught:
        run(copy + fence + "bar.warp.sync -1;" + STORE + DONE)
    assert caught.value.check == "proxy fence"


REQUEST = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
@%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
"""
ANSWER = """
ld.shared.v2.b64 {%d5, %d6}, [%r1]; mov.b128 %q1, {%d5, %d6};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
"""


def test_without_other_clusters_a_cancellation_fails():
    query = ANSWER + "selp.b32 %r4, 1, 2, %p2; st.global.b32 [%d2], %r4;"
    assert set(run(REQUEST + WAIT + query).tolist()) == {2}


def test_a_request_after_a_failure_is_undefined():
    with pytest.raises(ExecutionError, match="seen fail") as caught:
        run(REQUEST + WAIT + ANSWER + "bar.sync 0;" + REQUEST)
    assert caught.value.check == "undefined"


PERSISTENT = """
mov.u32 %r0, %tid.x; mov.b32 %r1, smem; add.u32 %r2, %r1, 64; setp.eq.u32 %p0, %r0, 0; ld.param.b64 %d0, [p0];
mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mov.b32 %r7, 0; mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ctaid.y;
@%p0 mbarrier.init.shared.b64 [%r2], 1; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;
WORK:
mad.lo.u32 %r8, %r6, 3, %r5; mad.wide.u32 %d1, %r8, 4, %d0;
mad.lo.u32 %r9, %r13, 3, %r12; add.u32 %r9, %r9, 1; @%p0 red.global.add.u32 [%d1], %r9;
fence.proxy.async.shared::cta; bar.sync 0;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
@%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
POLL: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r7; @!%p1 bra POLL;
xor.b32 %r7, %r7, 1;
ld.shared.v2.b64 {%d5, %d6}, [%r1]; mov.b128 %q1, {%d5, %d6}; bar.sync 0;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
@!%p2 bra DONE;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r5, %r6, %r10, %r11}, %q1;
bra WORK;
DONE:
"""


@pytest.mark.parametrize("resident", [1, 2, 6])
@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_clusters_take_over_those_that_have_not_started(resident, completion):
    done = np.zeros(6, np.uint32)
    options = Options(resident_clusters=resident, completion=completion, order="random", seed=resident)
    run_body(PERSISTENT, params=(Buffer(done),), smem=128, grid=(3, 2, 1), options=options, target="sm_100a")
    assert (done > 0).all()
    assert (done <= resident).all()
    assert done[:resident].tolist() == list(range(1, resident + 1))


def test_one_coordinate_may_be_asked_for():
    body = PERSISTENT.replace(".v4.b32.b128 {%r5, %r6, %r10, %r11}", "::x.b32.b128 %r5").replace(
        "bra WORK;", "clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r6, %q1; bra WORK;"
    )
    done = np.zeros(6, np.uint32)
    run_body(body, params=(Buffer(done),), smem=128, grid=(3, 2, 1), target="sm_100a")
    assert done.tolist() == [1] * 6
