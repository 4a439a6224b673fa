"""Blackwell's instructions, one a function."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..core.ptx import asm

__all__ = [
    "cp_async",
    "fence_after_sync",
    "fence_before_sync",
    "max3",
    "mbarrier_arrive_cluster",
    "mbarrier_wait_cluster",
    "st_global_v4",
    "st_shared_v4",
    "tcgen05_ld",
    "tcgen05_st",
]


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """max.NaN.f32 of three: NaN if one of them is (PTX ISA, max)."""
    return asm("max.NaN.f32 $0, $1, $2, $3;", [a, b, c], [Float32], volatile=False)[0]


def tcgen05_ld(address: Int32, columns: int) -> tuple[Float32, ...]:
    """tcgen05.ld.32x32b: a thread's `columns` columns of its lane, readable after tcgen05.wait::ld.

    `address` is the same in a warp: lane 32 * (warp % 4) << 16 | column. `columns`: a power of two up to 128.
    """
    registers = ", ".join(f"${i}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [${columns}];"
    return asm(text, [address], [Float32] * columns)


def tcgen05_st(address: Int32, values: list[Int32] | list[Float32]) -> None:
    """tcgen05.st.32x32b: a thread's registers into as many columns of its lane, done after tcgen05.wait::st."""
    registers = ", ".join(f"${i + 1}" for i in range(len(values)))
    asm(f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [$0], {{{registers}}};", [address, *values])


def fence_before_sync() -> None:
    """tcgen05.fence::before_thread_sync: what was issued before comes before the signal that follows."""
    asm("tcgen05.fence::before_thread_sync;", [])


def fence_after_sync() -> None:
    """tcgen05.fence::after_thread_sync: what is issued from here on comes after the wait before it."""
    asm("tcgen05.fence::after_thread_sync;", [])


def cp_async(target: cute.Pointer, source: cute.Pointer, size: Int32) -> None:
    """cp.async.cg of 16 bytes to shared memory, of which `size` are copied and the others zero (PTX ISA, cp.async)."""
    asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", [target.toint(), source.toint(), size])


def mbarrier_arrive_cluster(barrier: cute.Pointer, rank: int) -> None:
    """mbarrier.arrive.release.cluster at the barrier of the cluster's CTA `rank`, which lies as `barrier` does here."""
    text = """{
    .reg .b32 there;
    mapa.shared::cluster.u32 there, $0, $1;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];
    }"""
    asm(text, [barrier.toint(), Int32(rank)])


def mbarrier_wait_cluster(barrier: cute.Pointer, parity: Int32) -> None:
    """mbarrier.try_wait.parity.acquire.cluster until it succeeds: what another CTA released is seen from here on."""
    text = """{
    .reg .pred done;
    WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1;
    @done bra.uni DONE;
    bra.uni WAIT;
    DONE:
    }"""
    asm(text, [barrier.toint(), Int32(parity)])


def st_global_v4(pointer: cute.Pointer, words: list[Int32] | list[Float32], present: Boolean) -> None:
    """st.global.v4.b32: 16 bytes to an address of a multiple of 16, if `present`."""
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }"
    asm(text, [pointer.toint(), *words, Int32(present)])


def st_shared_v4(pointer: cute.Pointer, words: list[Int32]) -> None:
    """st.shared.v4.b32: 16 bytes to an address of a multiple of 16."""
    asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [pointer.toint(), *words])
