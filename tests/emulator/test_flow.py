"""Divergence, reconvergence, exits, and registers that are read unwritten."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError
from jax_fa4.emulator.launch import Buffer, Options

from .snippet import run_body

STORE = "mad.wide.u32 %d1, %r0, 4, %d0; st.global.b32 [%d1], %r1;"
START = "mov.u32 %r0, %tid.x; ld.param.b64 %d0, [p0];"


def lanes(body: str, options: Options | None = None, threads: int = 32) -> list[int]:
    """Run `body` (%r0 is the thread) and give each thread's %r1."""
    result = np.zeros(threads, np.uint32)
    run_body(START + body + STORE, params=(Buffer(result),), threads=threads, options=options)
    return result.tolist()


def test_both_sides_of_a_branch_execute_and_meet():
    body = """
    setp.lt.u32 %p1, %r0, 10;
    @%p1 bra LOW;
    mov.b32 %r1, 200;
    bra MEET;
    LOW: mov.b32 %r1, 100;
    MEET: vote.sync.ballot.b32 %r2, %p1, -1;
    add.u32 %r1, %r1, %r2;
    """
    assert lanes(body) == [100 + 1023 if i < 10 else 200 + 1023 for i in range(32)]


def test_nested_branches():
    body = """
    mov.b32 %r1, 0;
    setp.lt.u32 %p1, %r0, 16;
    @!%p1 bra OUTER;
    setp.lt.u32 %p2, %r0, 8;
    @!%p2 bra INNER;
    add.u32 %r1, %r1, 1;
    INNER: add.u32 %r1, %r1, 10;
    OUTER: add.u32 %r1, %r1, 100;
    bar.sync 0;
    """
    assert lanes(body) == [111 if i < 8 else 110 if i < 16 else 100 for i in range(32)]


def test_loops_with_different_trip_counts_meet_behind_the_loop():
    body = """
    mov.b32 %r1, 0; mov.b32 %r2, 0;
    LOOP: add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1;
    setp.le.u32 %p1, %r2, %r0;
    @%p1 bra LOOP;
    bar.sync 0;
    """
    assert lanes(body) == [i * (i + 1) // 2 for i in range(32)]


def test_exited_lanes_are_not_waited_for():
    body = """
    setp.ge.u32 %p1, %r0, 20;
    @%p1 ret;
    bar.sync 0;
    setp.ge.u32 %p2, %r0, 10;
    @%p2 bra SKIP;
    ret;
    SKIP: vote.sync.any.pred %p3, %p2, -1;
    mov.b32 %r1, 5;
    """
    assert lanes(body) == [5 if 10 <= i < 20 else 0 for i in range(32)]


def test_guards_mask_single_instructions():
    body = """
    setp.eq.u32 %p1, %r0, 3; mov.b32 %r1, 1;
    @%p1 mov.b32 %r1, 2; @!%p1 add.u32 %r1, %r1, 7;
    mov.b64 %d2, {%r1, %r1}; @%p1 add.rn.f32x2 %d2, 0, 0; mov.b64 {%r1, %r2}, %d2;
    """
    assert lanes(body) == [0 if i == 3 else 8 for i in range(32)]


def test_a_warp_that_polls_memory_lets_the_writer_run():
    body = """
    mov.b32 %r1, smem;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra WRITER;
    WAIT: ld.acquire.gpu.global.b32 %r2, [%d0+400];
    setp.eq.b32 %p2, %r2, 0;
    @%p2 bra WAIT;
    bra MEET;
    WRITER: mov.b32 %r2, 9; st.release.gpu.global.b32 [%d0+400], %r2;
    MEET: mov.b32 %r1, %r2;
    """
    result = np.zeros(128, np.uint32)
    for order in ("round_robin", "random"):
        run_body(START + body + STORE, params=(Buffer(result),), threads=64, options=Options(order=order))
        assert result[:64].tolist() == [9] * 64


@pytest.mark.parametrize(
    ("body", "check", "message"),
    [
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra.uni A; A: mov.b32 %r1, 1;", "convergence", "bra.uni"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bar.sync 0;", "convergence", "bar.sync"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra A; vote.sync.any.pred %p2, %p1, -1; A: ", "convergence", "0x0000001f"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra A; elect.sync %r2|%p2, 15; A: ", "convergence", "outside of its mask"),
        ("add.u32 %r1, %r7, 1;", "uninitialised", "%r7"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 mov.b32 %r7, 1; add.u32 %r1, %r7, 1;", "uninitialised", "lane 5"),
        ("trap;", "undefined", "traps"),
    ],
)
def test_errors(body, check, message):
    with pytest.raises(ExecutionError, match=r"snippet, line \d+: .*warp 0") as caught:
        lanes(body + " mov.b32 %r1, 1; ")
    assert caught.value.check == check
    assert message in str(caught.value)


def test_registers_written_on_every_path_may_be_read():
    body = """
    setp.lt.u32 %p1, %r0, 5;
    @%p1 bra A;
    mov.b32 %r7, 1; bra B;
    A: mov.b32 %r7, 2;
    B: mov.b32 %r1, %r7;
    """
    assert lanes(body) == [2 if i < 5 else 1 for i in range(32)]


def test_copying_a_register_that_was_never_written_is_no_error_but_using_the_copy_is():
    body = "setp.lt.u32 %p1, %r0, 5; @%p1 bra A; mov.b32 %r7, 1; A: mov.b32 %r8, %r7; mov.b32 %r9, %r8;"
    assert lanes(body + "mov.b32 %r1, 3;") == [3] * 32
    assert lanes(body + "mov.b32 %r1, 3; @!%p1 add.u32 %r1, %r9, 0;") == [3] * 5 + [1] * 27
    with pytest.raises(ExecutionError, match="reads register %r9"):
        lanes(body + "add.u32 %r1, %r9, 0;")


def test_endless_loops_are_found():
    with pytest.raises(Deadlock, match="does not end"):
        lanes("mov.b32 %r1, 0; LOOP: setp.eq.u32 %p1, %r1, 0; @%p1 bra LOOP;", Options(max_steps=100_000))


def test_instructions_are_counted_by_warp():
    result = run_body("mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 1; add.u32 %r3, %r2, 1;", threads=64)
    assert result.stats.opcodes[1]["add.u32"] == 2
    assert result.stats.by_warp("add") == {0: 2, 1: 2}
    assert result.stats.instructions == 2 * 4  # and ret
