"""Named barriers and cluster barriers."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError
from jax_fa4.emulator.launch import Buffer, Launch, Options
from jax_fa4.emulator.run import run as emulate

from .snippet import module_text, run_body

START = "mov.u32 %r0, %tid.x; mov.b32 %r1, smem; ld.param.b64 %d0, [p0]; setp.ge.u32 %p9, %r0, 32; shr.u32 %r8, %r0, 5;"


def run(body: str, *, threads: int = 64, options: Options | None = None, **launch) -> np.ndarray:
    result = np.zeros(threads, np.uint32)
    run_body(START + body, params=(Buffer(result),), threads=threads, smem=1024, options=options, **launch)
    return result


@pytest.mark.parametrize("form", ["bar.sync 0;", "bar.sync 1, 64;", "barrier.sync 2, 64;", "bar.cta.sync 0;"])
@pytest.mark.parametrize("order", ["round_robin", "random"])
def test_all_warps_meet(form, order):
    body = f"""
    mad.lo.u32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], %r0;
    {form}
    xor.b32 %r3, %r0, 32; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.b32 %r4, [%r3];
    mad.wide.u32 %d1, %r0, 4, %d0; st.global.b32 [%d1], %r4;
    """
    assert run(body, options=Options(order=order)).tolist() == [i ^ 32 for i in range(64)]


@pytest.mark.parametrize(("operation", "expected"), [("popc.u32 %r2", 40), ("and.pred %p2", 0), ("or.pred %p2", 1)])
def test_reductions_of_a_predicate(operation, expected):
    body = f"setp.lt.u32 %p1, %r0, 40; bar.red.{operation}, 0, %p1;"
    body += "selp.b32 %r2, 1, 0, %p2;" if "%p2" in operation else ""
    assert set(run(body + "mad.wide.u32 %d1, %r0, 4, %d0; st.global.b32 [%d1], %r2;").tolist()) == {expected}


def test_diverged_lanes_may_come_one_after_the_other_without_aligned():
    body = (
        "and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra A; barrier.sync 1, 64; bra B; A: barrier.sync 1, 64; B:"
    )
    run(body)


def test_arriving_for_oneself_before_waiting_is_tolerated_unless_strict():
    body = "@%p9 bra DONE; bar.arrive 1, 64; bar.sync 1, 64; DONE:"
    run(body)
    with pytest.raises(ExecutionError, match="arrives twice"):
        run(body, options=Options(strict=True))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16, 64;", "barrier 16 does not exist"),
        ("mov.b32 %r2, 40; bar.sync 1, %r2;", "multiple of 32"),
        ("@%p9 bar.sync 1, 64; @!%p9 bar.sync 1, 96;", "others came with"),
        ("@%p9 bra A; bar.arrive 1, 96; bar.arrive 1, 96; A:", "arrives twice"),
        ("setp.eq.u32 %p1, %r0, 0; @%p9 bra A; bar.sync 1, 64; A: bar.red.popc.u32 %r2, 1, 64, %p1;", "mixes"),
        ("bar.sync %r0, 64;", "differs between the lanes"),
    ],
)
def test_misuse_is_an_error(body, message):
    with pytest.raises(ExecutionError, match=message) as caught:
        run(body)
    assert caught.value.check in ("named barrier", "convergence")


def test_a_barrier_that_is_never_complete_is_a_deadlock():
    with pytest.raises(Deadlock, match=r"barrier 1: 32 of 64 threads \(warps 0\)"):
        run("@%p9 bra A; bar.sync 1, 64; A:")


DSMEM = """
mov.u32 %r9, %cluster_ctarank; xor.b32 %r10, %r9, 1;
st.shared.b32 [%r1], %r9;
barrier.cluster.arrive{form}; barrier.cluster.wait;
mapa.shared::cluster.u32 %r2, %r1, %r10;
ld.shared::cluster.b32 %r3, [%r2];
{close}
mad.wide.u32 %d1, %r9, 4, %d0; st.global.b32 [%d1], %r3;
"""
CLOSE = "barrier.cluster.arrive; barrier.cluster.wait;"
PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}


@pytest.mark.parametrize("form", ["", ".release", ".aligned"])
def test_ctas_of_a_cluster_read_each_other(form):
    assert run(DSMEM.format(form=form, close=CLOSE), threads=32, **PAIR)[:2].tolist() == [1, 0]


@pytest.mark.parametrize("fence", ["", "fence.mbarrier_init.release.cluster; "])
def test_a_relaxed_arrival_does_not_publish(fence):
    body = DSMEM.format(form=".relaxed", close=CLOSE)
    with pytest.raises(ExecutionError) as caught:
        run(
            body.replace("barrier.cluster.arrive.relaxed", fence + "barrier.cluster.arrive.relaxed"), threads=32, **PAIR
        )
    assert caught.value.check == "race"


def test_a_fence_before_a_relaxed_arrival_publishes():
    body = DSMEM.format(form=".relaxed", close=CLOSE).replace("barrier", "fence.acq_rel.cluster; barrier", 1)
    assert run(body, threads=32, **PAIR)[:2].tolist() == [1, 0]


def test_memory_of_an_exited_cta_is_gone():
    body = "mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r9, 1; @%p1 ret; nanosleep.u32 1; nanosleep.u32 1;"
    with pytest.raises(ExecutionError, match="exited") as caught:
        run(body + "mapa.shared::cluster.u32 %r2, %r1, 1; st.shared::cluster.b32 [%r2], %r0;", threads=32, **PAIR)
    assert caught.value.check == "exit"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier.cluster.wait;", "without having arrived"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "arrives"),
    ],
)
def test_cluster_arrivals_and_waits_alternate(body, message):
    with pytest.raises(ExecutionError, match=message) as caught:
        run(body, threads=32)
    assert caught.value.check == "cluster barrier"


def test_exited_threads_count_as_arrived_at_the_cluster_barrier():
    run("mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r9, 1; @%p1 ret;" + CLOSE, threads=32, **PAIR)


def test_special_registers_place_a_cta_in_its_cluster():
    body = """
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %clusterid.x; mov.u32 %r4, %cluster_ctaid.x; mov.u32 %r5, %cluster_ctarank;
    mov.u32 %r6, %nclusterid.x;
    mad.lo.u32 %r7, %r3, 100, %r4; mad.lo.u32 %r7, %r5, 10000, %r7; mad.lo.u32 %r7, %r6, 1000000, %r7;
    mad.wide.u32 %d1, %r2, 4, %d0; st.global.b32 [%d1], %r7;
    """
    found = run(body, threads=32, grid=(6, 1, 1), cluster=(2, 1, 1))[:6].tolist()
    assert found == [3000000 + i % 2 * 10000 + i // 2 * 100 + i % 2 for i in range(6)]


def test_setmaxnreg_moves_registers_between_warpgroups():
    body = """
    setp.lt.u32 %p1, %r0, 128;
    @%p1 bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {inc}; bra DONE;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 24;
    DONE:
    """
    run(body.format(inc=240), threads=384)
    with pytest.raises(Deadlock, match="registers"):
        run(body.format(inc=248), threads=384)
    with pytest.raises(ExecutionError, match="from 168 to 160") as caught:
        run(body.format(inc=160), threads=384)
    assert caught.value.check == "registers"


REGISTERS = """
setp.lt.u32 %p1, %r0, 128; @%p1 bra LESS; setmaxnreg.inc.sync.aligned.u32 {inc}; bra DONE;
LESS: setmaxnreg.dec.sync.aligned.u32 40; DONE:
"""


@pytest.mark.parametrize(("directive", "most"), [(".maxnreg 128", 216), (".minnctapersm 4", 88)])
def test_setmaxnreg_shares_what_the_launch_gave(directive, most):
    """Two warpgroups of 128 or of 64 registers a thread: the second can get what the first gives up."""
    out = Buffer(np.zeros(256, np.uint32))
    shape = Launch(grid=(1, 1, 1), block=256, params=(out,), smem_bytes=1024)

    def launch(inc):
        text = module_text(START + REGISTERS.format(inc=inc), (out,))
        emulate(text.replace(")\n{", f")\n{directive}\n{{", 1), shape)

    launch(most)
    with pytest.raises(Deadlock, match="registers"):
        launch(most + 8)


def test_strict_mode_wants_one_setmaxnreg_in_a_warpgroup():
    body = REGISTERS.format(inc=168).replace("%r0, 128", "%r0, 96")
    run(body, threads=384)
    with pytest.raises(ExecutionError, match="of the warpgroup executes the setmaxnreg of line"):
        run(body, threads=384, options=Options(strict=True))
