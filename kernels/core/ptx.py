"""Instructions for which the DSL's own form doesn't do, one a function."""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int16, Int32, Int64, Numeric
from cutlass._mlir.dialects import llvm

REGISTERS = {16: "h", 32: "r", 64: "l"}  # letters of whole numbers by their bits; floats have "f"
LOADS = {8: ("u8", Int16), 16: ("b16", Int16), 32: ("b32", Int32)}  # form, type of its register

__all__ = [
    "add_rounded_down",
    "arrive_at",
    "asm",
    "bulk_add",
    "bulk_store",
    "copy_to_peer",
    "cvt_pair",
    "here",
    "ld_acquire",
    "ld_global",
    "ld_peer",
    "ld_peer_v4",
    "ld_shared_v2",
    "ld_shared_v4",
    "red_add_v4",
    "red_release_inc",
    "st_global_v2",
    "st_shared_v2",
    "st_shared_v4",
    "unpack_pair",
    "zero",
]


def asm(
    text: str,
    operands: Sequence[Numeric],
    results: Sequence[type[Numeric]] = (),
    *,
    memory: bool = False,
    volatile: bool = True,
) -> tuple[Any, ...]:
    """Instructions in which $0 and so on stand for the results, then for the operands.

    `memory`: loads and stores stay on their side of it. `volatile`: it is neither dropped nor moved past another such.
    """
    letters = [f"={_letter(kind)}" for kind in results] + [_letter(type(operand)) for operand in operands]
    types = [kind.mlir_type for kind in results]
    is_struct = len(types) > 1
    made = llvm.inline_asm(
        llvm.StructType.get_literal(types) if is_struct else next(iter(types), None),
        [operand.ir_value() for operand in operands],
        text,
        ",".join([*letters, "~{memory}"] if memory else letters),
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    values = [llvm.extractvalue(kind, made, [i]) if is_struct else made for i, kind in enumerate(types)]
    return tuple(kind(value) for kind, value in zip(results, values, strict=True))


def _letter(kind: type[Numeric]) -> str:
    return "f" if kind is Float32 else REGISTERS[kind.width]


def add_rounded_down(a: Float32, b: Float32) -> Float32:
    """add.rm.f32: the sum, rounded towards minus infinity."""
    return asm("add.rm.f32 $0, $1, $2;", [a, b], [Float32], volatile=False)[0]


def arrive_at(barrier: cute.Pointer, rank: Int32) -> None:
    """mbarrier.arrive at the same mbarrier of CTA `rank` of the cluster, after reads.

    Its release is of the CTA's scope, without a fence of all memory: it hands no data over to another CTA.
    """
    text = "mapa.shared::cluster.u32 a, $0, $1; mbarrier.arrive.release.cta.shared::cluster.b64 _, [a];"
    asm(f"{{ .reg .b32 a; {text} }}", [barrier.toint(), rank], memory=True)


def copy_to_peer(target: Int32, source: Int32, size: int, barrier: cute.Pointer, rank: Int32) -> None:
    """cp.async.bulk: bytes of shared memory to the place `target` of CTA `rank`, whose `barrier` counts them.

    Addresses are those of the same places in this CTA. One thread calls it.
    """
    asm(
        "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, $0, $3; mapa.shared::cluster.u32 b, $2, $3; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [t], [$1], "
        f"{size}, [b]; }}",
        [target, source, barrier.toint(), rank],
        memory=True,
    )


def bulk_add(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """cp.reduce.async.bulk: adds `size` bytes of floats in smem to global memory; it joins the thread's bulk group."""
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};"
    asm(text, [target.toint(), source.toint()], memory=True)


def bulk_store(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """cp.async.bulk: copies `size` bytes in smem to global memory; it joins the thread's bulk group."""
    text = f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {size};"
    asm(text, [target.toint(), source.toint()], memory=True)


def cvt_pair(dtype: type[Numeric], low: Float32, high: Float32) -> Int32:
    """cvt.rn.{bf16x2,f16x2}.f32: two floats rounded to 16 bit, `low` in the lower half (PTX ISA, cvt).

    Volatile: the compiler would else carry 32-bit weights through a loop and convert them late, at twice the registers.
    """
    form = "bf16x2" if dtype is BFloat16 else "f16x2"
    return asm(f"cvt.rn.{form}.f32 $0, $1, $2;", [high, low], [Int32])[0]


def here(value: Int32) -> Int32:
    """The same number, not known earlier: the compiler would else compute what follows from it long before its use."""
    return asm("mov.b32 $0, $1;", [value], [Int32])[0]


def ld_acquire(pointer: cute.Pointer) -> Int32:
    """ld.acquire.gpu: a number after which everything is seen that its writer released with it."""
    return asm("ld.acquire.gpu.global.b32 $0, [$1];", [pointer.toint()], [Int32], memory=True)[0]


def ld_global(pointer: cute.Pointer, index: Int32, step: Int64) -> Numeric:
    """ld.global: one element of 8, 16 or 32 bits, `index` steps of `step` elements behind `pointer`.

    Volatile, and the address is made here: the compiler would else collect a whole row of elements long before their
    use, or their addresses outside of loops, at one or two registers each.
    """
    dtype = pointer.dtype
    form, kind = LOADS[dtype.width]
    shift = (dtype.width // 8).bit_length() - 1
    address = f"cvt.s64.s32 a, $2; mul.lo.s64 a, a, $3; shl.b64 a, a, {shift}; add.s64 a, a, $1;"
    text = f"{{ .reg .b64 a; {address} ld.global.{form} $0, [a]; }}"
    (bits,) = asm(text, [pointer.toint(), index, step], [kind])
    if dtype.width == 8:
        return dtype(bits)
    return dtype(llvm.bitcast(dtype.mlir_type, bits.ir_value()))


def ld_peer(address: Int32, rank: Int32) -> Float32:
    """ld.shared::cluster: the float that CTA `rank` of the cluster has at the same shared address."""
    text = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.f32 $0, [a]; }"
    return asm(text, [address, rank], [Float32], memory=True)[0]


def ld_peer_v4(address: Int32, rank: Int32) -> tuple[Float32, ...]:
    """ld.shared::cluster.v4: four floats of CTA `rank` of the cluster at a shared address that is a multiple of 16."""
    text = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $4, $5; ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [a]; }"
    return asm(text, [address, rank], [Float32] * 4, memory=True)


def ld_shared_v2(pointer: cute.Pointer) -> tuple[Float32, Float32]:
    """ld.shared.v2.f32: two floats at an address of a multiple of 8.

    Volatile: the compiler would else collect a whole row of them long before their use, at a register each.
    """
    return asm("ld.volatile.shared.v2.f32 {$0, $1}, [$2];", [pointer.toint()], [Float32] * 2)


def ld_shared_v4(address: Int32) -> tuple[Int32, ...]:
    """ld.shared.v4.b32: four words at a shared address that is a multiple of 16."""
    return asm("ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [address], [Int32] * 4, memory=True)


def red_add_v4(pointer: cute.Pointer, values: tuple[Float32, ...], present: Int32) -> None:
    """red.relaxed.gpu.global.add.v4.f32: adds four floats at an address of a multiple of 16, unless `present` is 0."""
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4}; }"
    asm(text, [pointer.toint(), *values, present])


def red_release_inc(pointer: cute.Pointer) -> None:
    """red.release.gpu.add: one more, seen after everything that this thread wrote or has seen."""
    asm("red.release.gpu.global.add.s32 [$0], 1;", [pointer.toint()], memory=True)


def st_global_v2(pointer: cute.Pointer, low: Int32, high: Int32, present: Boolean) -> None:
    """st.global.v2.b32: 8 bytes to an address of a multiple of 8, if `present`. Without a branch."""
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.b32 [$0], {$1, $2}; }"
    asm(text, [pointer.toint(), low, high, Int32(present)])


def st_shared_v2(address: Int32, low: Float32, high: Float32) -> None:
    """st.shared.v2.f32: two floats to a shared address that is a multiple of 8."""
    asm("st.shared.v2.f32 [$0], {$1, $2};", [address, low, high], memory=True)


def st_shared_v4(address: Int32, words: tuple[Int32 | Float32, ...], offset: int = 0) -> None:
    """st.shared.v4.b32: four words, `offset` bytes behind a shared address that is a multiple of 16.

    An offset of its own: the compiler would else keep an address in a register for each of a row of stores.
    """
    asm(f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", [address, *words], memory=True)


def unpack_pair(dtype: type[Numeric], pair: Int32) -> tuple[Float32, Float32]:
    """The two 16-bit floats of a word, the lower half first: what `cvt_pair` has rounded."""
    halves = "mov.b32 {l, h}, $2;"
    form = {
        True: f"{{ .reg .b16 l, h, z; mov.b16 z, 0; {halves} mov.b32 $0, {{z, l}}; mov.b32 $1, {{z, h}}; }}",
        False: f"{{ .reg .f16 l, h; {halves} cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }}",
    }[dtype is BFloat16]
    return asm(form, [pair], [Float32] * 2, volatile=False)


def zero() -> Float32:
    """0, made here: the compiler would else zero accumulators at the kernel's start, where other roles pay for them."""
    return asm("mov.f32 $0, 0f00000000;", [], [Float32])[0]
