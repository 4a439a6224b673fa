"""Allocation of tensor memory: who may take how much when, and that all is given back."""

import numpy as np
import pytest

from jax_fa4.emulator.errors import Deadlock, ExecutionError
from jax_fa4.emulator.launch import Buffer, Options
from jax_fa4.emulator.order import Clocks
from jax_fa4.emulator.tmem import TensorMemory

from .snippet import run_body

CLUSTER_SYNC = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"


def alloc(columns, at=0, group=1):
    return f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r2+{at}], {columns};\n"


def dealloc(columns, address="%r20", group=1):
    return f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {address}, {columns};\n"


def read(at=0, register="%r20"):
    return f"ld.shared.b32 {register}, [%r2+{at}];\n"


RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"


def run(body, *, threads=32, **how):
    out = np.full(64, 0xFFFFFFFF, np.uint32)
    start = "mov.u32 %r1, %tid.x;\nmov.b32 %r2, smem;\nld.param.b64 %d1, [p0];\n"
    run_body(start + body, params=(Buffer(out),), threads=threads, smem=64, target="sm_100a", **how)
    return out


def fails(body, message, check="tensor memory", error=ExecutionError, **how):
    with pytest.raises(error, match=message) as caught:
        run(body, **how)
    assert caught.value.check == check


def test_allocations_take_the_first_columns_that_fit():
    body = alloc(128) + read() + alloc(64, 4) + read(4, "%r21") + dealloc(128) + alloc(64, 8) + read(8, "%r22")
    body += "st.global.b32 [%d1], %r20;\nst.global.b32 [%d1+4], %r21;\nst.global.b32 [%d1+8], %r22;\n"
    body += dealloc(64, "%r21") + dealloc(64, "%r22")
    assert list(run(body)[:3]) == [0, 128, 0]


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_sizes_are_powers_of_two(columns):
    fails(alloc(columns), f"allocation of {columns} columns")


def test_sizes_must_not_grow():
    fails(alloc(64) + read() + dealloc(64) + alloc(128), "sizes must not grow")


def test_nothing_may_be_allocated_after_giving_up_the_permit():
    fails(alloc(64) + RELINQUISH + alloc(32), "after relinquish_alloc_permit")


def test_columns_must_be_freed_before_the_end():
    fails(alloc(64), "ends without dealloc of 64 columns at 0x0")


def test_only_allocations_can_be_freed():
    fails(alloc(64) + dealloc(32, "0"), "dealloc of 32 columns at 0x0; allocated: 64 columns at 0x0")
    fails(alloc(64) + read() + dealloc(64) + dealloc(64), "allocated: none")


def test_a_full_memory_blocks_until_another_warp_frees():
    """Warp 1 waits for the columns of warp 0, which is asleep at a barrier first."""
    body = f"""
setp.ge.u32 %p1, %r1, 32;
@%p1 bra SECOND;
{alloc(512)}{read()}
bar.sync 1, 64;
{dealloc(512)}
bra END;
SECOND:
bar.sync 1, 64;
{alloc(512, 4)}{read(4)}{dealloc(512)}
END:
"""
    run(body, threads=64)
    fails(
        body.replace(dealloc(512) + "\nbra", "\nbra"), "tcgen05.alloc of 512 columns", "deadlock", Deadlock, threads=64
    )


def test_other_warps_see_the_address_after_a_barrier():
    body = f"setp.ge.u32 %p1, %r1, 32;\n@%p1 bra READ;\n{alloc(32)}READ:\n{{sync}}{read()}bar.sync 1;\n@%p1 bra END;\n"
    body += dealloc(32) + "END:\n"
    run(body.replace("{sync}", "bar.sync 0;\n"), threads=64)
    fails(
        body.replace("{sync}", ""),
        "ordered|read by|may still|race",
        "race",
        threads=64,
        options=Options(order="round_robin"),
    )


def test_freeing_what_another_warp_still_uses_is_reported():
    store = "shl.b32 %r21, %r22, 21;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], {%r1};\n"
    body = (
        f"shr.u32 %r22, %r1, 5;\nsetp.ge.u32 %p1, %r1, 32;\n@%p1 bra ALLOCATED;\n{alloc(32)}ALLOCATED:\nbar.sync 0;\n"
    )
    body += store + "tcgen05.wait::st.sync.aligned;\n{sync}" + f"@%p1 bra END;\n{dealloc(32, '0')}END:\n"
    run(body.replace("{sync}", "bar.sync 0;\n"), threads=64)
    fails(body.replace("{sync}", ""), "ordered|read by|may still|race", "race", threads=64)


PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}


def test_a_pair_allocates_together():
    body = alloc(64, group=2) + read() + CLUSTER_SYNC + dealloc(64, group=2) + CLUSTER_SYNC
    run(body, **PAIR)


def test_both_ctas_of_a_pair_must_take_part():
    only_even = "mov.u32 %r3, %cluster_ctarank;\nsetp.ne.b32 %p1, %r3, 0;\n@%p1 bra END;\n"
    body = only_even + alloc(64, group=2) + "END:\n" + CLUSTER_SYNC
    fails(body, "in both CTAs of the pair", "deadlock", Deadlock, **PAIR)


def test_the_ctas_of_a_pair_must_ask_for_the_same():
    body = "mov.u32 %r3, %cluster_ctarank;\nadd.s32 %r3, %r3, 1;\nshl.b32 %r3, %r3, 5;\n"
    fails(body + alloc("%r3", group=2), r"ask differently: \[32, 64\]", **PAIR)


def test_a_pair_needs_a_cluster():
    fails(alloc(32, group=2), "cluster without a pair", "tcgen05")


def test_one_kernel_uses_one_cta_group():
    fails(
        alloc(32) + read() + dealloc(32, group=2),
        "cta_group::2 in a kernel that has used cta_group::1",
        "tcgen05",
        **PAIR,
    )


def test_new_columns_hold_nothing():
    memory = TensorMemory(Clocks(4), 0, check_races=True)
    column = memory.allocate(32, 0, 0)
    memory.written[:, column : column + 32] = True
    memory.give_back(column, 32, memory.shadow.clocks.empty())
    memory.free(column, 32)
    assert memory.allocate(32, 0, 0) == column
    assert not memory.written.any()
