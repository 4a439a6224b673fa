"""Blackwell's instructions, one a function."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

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
    return Float32(_asm([a, b, c], "max.NaN.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32.mlir_type, volatile=False))


def tcgen05_ld(address: Int32, columns: int) -> list[Float32]:
    """tcgen05.ld.32x32b: a thread's `columns` columns of its lane, readable after tcgen05.wait::ld.

    `address` is the same in a warp: lane 32 * (warp % 4) << 16 | column. `columns`: a power of two up to 128.
    """
    struct = llvm.StructType.get_literal([Float32.mlir_type] * columns)
    registers = ", ".join(f"${i}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [${columns}];"
    loaded = _asm([address], text, ",".join(["=f"] * columns + ["r"]), struct)
    return [Float32(llvm.extractvalue(Float32.mlir_type, loaded, [i])) for i in range(columns)]


def tcgen05_st(address: Int32, values: list[Int32] | list[Float32]) -> None:
    """tcgen05.st.32x32b: a thread's registers into as many columns of its lane, done after tcgen05.wait::st."""
    kind = "f" if isinstance(values[0], Float32) else "r"
    registers = ", ".join(f"${i + 1}" for i in range(len(values)))
    text = f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [$0], {{{registers}}};"
    _asm([address, *values], text, ",".join(["r"] + [kind] * len(values)))


def fence_before_sync() -> None:
    """tcgen05.fence::before_thread_sync: what was issued before comes before the signal that follows."""
    _asm([], "tcgen05.fence::before_thread_sync;", "")


def fence_after_sync() -> None:
    """tcgen05.fence::after_thread_sync: what is issued from here on comes after the wait before it."""
    _asm([], "tcgen05.fence::after_thread_sync;", "")


def cp_async(target: cute.Pointer, source: cute.Pointer, size: Int32) -> None:
    """cp.async.cg of 16 bytes to shared memory, of which `size` are copied and the others zero (PTX ISA, cp.async)."""
    _asm([target.toint(), source.toint(), size], "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r")


def mbarrier_arrive_cluster(barrier: cute.Pointer, rank: int) -> None:
    """mbarrier.arrive.release.cluster at the barrier of the cluster's CTA `rank`, which lies as `barrier` does here."""
    text = """{
    .reg .b32 there;
    mapa.shared::cluster.u32 there, $0, $1;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];
    }"""
    _asm([barrier.toint(), Int32(rank)], text, "r,r")


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
    _asm([barrier.toint(), Int32(parity)], text, "r,r")


def st_global_v4(pointer: cute.Pointer, words: list[Int32] | list[Float32], present: Boolean) -> None:
    """st.global.v4.b32: 16 bytes to an address of a multiple of 16, if `present`."""
    kind = "f" if isinstance(words[0], Float32) else "r"
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }"
    _asm([pointer.toint(), *words, Int32(present)], text, ",".join(["l", *[kind] * 4, "r"]))


def st_shared_v4(pointer: cute.Pointer, words: list[Int32]) -> None:
    """st.shared.v4.b32: 16 bytes to an address of a multiple of 16."""
    _asm([pointer.toint(), *words], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")


def _asm(
    operands: list[cutlass.Numeric],
    text: str,
    constraints: str,
    result: ir.Type | None = None,
    *,
    volatile: bool = True,
) -> ir.Value:
    return llvm.inline_asm(
        result,
        [operand.ir_value() for operand in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
