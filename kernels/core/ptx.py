"""Instructions for which the DSL's own form doesn't do, one a function."""

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int16, Int32, Int64, Numeric
from cutlass._mlir.dialects import llvm

LOADS = {8: ("u8", "h", Int16), 16: ("b16", "h", Int16), 32: ("b32", "r", Int32)}  # form, register, its type

__all__ = [
    "arrive_at",
    "bulk_add",
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


def arrive_at(barrier: cute.Pointer, rank: Int32) -> None:
    """mbarrier.arrive at the same mbarrier of CTA `rank` of the cluster, after reads.

    Its release is of the CTA's scope, without a fence of all memory: it hands no data over to another CTA.
    """
    llvm.inline_asm(
        None,
        [barrier.toint().ir_value(), rank.ir_value()],
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; mbarrier.arrive.release.cta.shared::cluster.b64 _, [a]; }",
        "r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def copy_to_peer(target: Int32, source: Int32, size: int, barrier: cute.Pointer, rank: Int32) -> None:
    """cp.async.bulk: bytes of shared memory to the place `target` of CTA `rank`, whose `barrier` counts them.

    Addresses are those of the same places in this CTA. One thread calls it.
    """
    llvm.inline_asm(
        None,
        [target.ir_value(), source.ir_value(), barrier.toint().ir_value(), rank.ir_value()],
        "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, $0, $3; mapa.shared::cluster.u32 b, $2, $3; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [t], [$1], "
        f"{size}, [b]; }}",
        "r,r,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def bulk_add(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """cp.reduce.async.bulk: adds `size` bytes of floats in smem to global memory; it joins the thread's bulk group."""
    llvm.inline_asm(
        None,
        [target.toint().ir_value(), source.toint().ir_value()],
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};",
        "l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def bulk_store(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """cp.async.bulk: copies `size` bytes in smem to global memory; it joins the thread's bulk group."""
    llvm.inline_asm(
        None,
        [target.toint().ir_value(), source.toint().ir_value()],
        f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {size};",
        "l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def cvt_pair(dtype: type[Numeric], low: Float32, high: Float32) -> Int32:
    """cvt.rn.{bf16x2,f16x2}.f32: two floats rounded to 16 bit, `low` in the lower half (PTX ISA, cvt).

    Volatile: the compiler would else carry 32-bit weights through a loop and convert them late, at twice the registers.
    """
    form = "bf16x2" if dtype is BFloat16 else "f16x2"
    packed = llvm.inline_asm(
        Int32.mlir_type,
        [high.ir_value(), low.ir_value()],
        f"cvt.rn.{form}.f32 $0, $1, $2;",
        "=r,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(packed)


def here(value: Int32) -> Int32:
    """The same number, not known earlier: the compiler would else compute what follows from it long before its use."""
    moved = llvm.inline_asm(
        Int32.mlir_type,
        [value.ir_value()],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(moved)


def ld_acquire(pointer: cute.Pointer) -> Int32:
    """ld.acquire.gpu: a number after which everything is seen that its writer released with it."""
    loaded = llvm.inline_asm(
        Int32.mlir_type,
        [pointer.toint().ir_value()],
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(loaded)


def ld_global(pointer: cute.Pointer, index: Int32, step: Int64) -> Numeric:
    """ld.global: one element of 8, 16 or 32 bits, `index` steps of `step` elements behind `pointer`.

    Volatile, and the address is made here: the compiler would else collect a whole row of elements long before their
    use, or their addresses outside of loops, at one or two registers each.
    """
    form, register, kind = LOADS[pointer.dtype.width]
    shift = (pointer.dtype.width // 8).bit_length() - 1
    address = f"cvt.s64.s32 a, $2; mul.lo.s64 a, a, $3; shl.b64 a, a, {shift}; add.s64 a, a, $1;"
    loaded = llvm.inline_asm(
        kind.mlir_type,
        [pointer.toint().ir_value(), index.ir_value(), step.ir_value()],
        f"{{ .reg .b64 a; {address} ld.global.{form} $0, [a]; }}",
        f"={register},l,r,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    dtype = pointer.dtype
    bits = kind(loaded)
    if dtype.width == 8:
        return dtype(bits)
    return dtype(llvm.bitcast(dtype.mlir_type, bits.ir_value()))


def ld_peer(address: Int32, rank: Int32) -> Float32:
    """ld.shared::cluster: the float that CTA `rank` of the cluster has at the same shared address."""
    loaded = llvm.inline_asm(
        Float32.mlir_type,
        [address.ir_value(), rank.ir_value()],
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.f32 $0, [a]; }",
        "=f,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(loaded)


def ld_peer_v4(address: Int32, rank: Int32) -> tuple[Float32, ...]:
    """ld.shared::cluster.v4: four floats of CTA `rank` of the cluster at a shared address that is a multiple of 16."""
    words = llvm.inline_asm(
        llvm.StructType.get_literal([Float32.mlir_type] * 4),
        [address.ir_value(), rank.ir_value()],
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $4, $5; ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [a]; }",
        "=f,=f,=f,=f,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Float32(llvm.extractvalue(Float32.mlir_type, words, [i])) for i in range(4))


def ld_shared_v2(pointer: cute.Pointer) -> tuple[Float32, Float32]:
    """ld.shared.v2.f32: two floats at an address of a multiple of 8.

    Volatile: the compiler would else collect a whole row of them long before their use, at a register each.
    """
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([Float32.mlir_type, Float32.mlir_type]),
        [pointer.toint().ir_value()],
        "ld.volatile.shared.v2.f32 {$0, $1}, [$2];",
        "=f,=f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    low, high = (llvm.extractvalue(Float32.mlir_type, pair, [i]) for i in range(2))
    return Float32(low), Float32(high)


def ld_shared_v4(address: Int32) -> tuple[Int32, ...]:
    """ld.shared.v4.b32: four words at a shared address that is a multiple of 16."""
    words = llvm.inline_asm(
        llvm.StructType.get_literal([Int32.mlir_type] * 4),
        [address.ir_value()],
        "ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Int32(llvm.extractvalue(Int32.mlir_type, words, [i])) for i in range(4))


def red_add_v4(pointer: cute.Pointer, values: tuple[Float32, ...], present: Int32) -> None:
    """red.relaxed.gpu.global.add.v4.f32: adds four floats at an address of a multiple of 16, unless `present` is 0."""
    llvm.inline_asm(
        None,
        [pointer.toint().ir_value(), *(value.ir_value() for value in values), present.ir_value()],
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4}; }",
        "l,f,f,f,f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def red_release_inc(pointer: cute.Pointer) -> None:
    """red.release.gpu.add: one more, seen after everything that this thread wrote or has seen."""
    llvm.inline_asm(
        None,
        [pointer.toint().ir_value()],
        "red.release.gpu.global.add.s32 [$0], 1;",
        "l,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def st_global_v2(pointer: cute.Pointer, low: Int32, high: Int32, present: Boolean) -> None:
    """st.global.v2.b32: 8 bytes to an address of a multiple of 8, if `present`. Without a branch."""
    llvm.inline_asm(
        None,
        [pointer.toint().ir_value(), low.ir_value(), high.ir_value(), Int32(present).ir_value()],
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.b32 [$0], {$1, $2}; }",
        "l,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def st_shared_v2(address: Int32, low: Float32, high: Float32) -> None:
    """st.shared.v2.f32: two floats to a shared address that is a multiple of 8."""
    llvm.inline_asm(
        None,
        [address.ir_value(), low.ir_value(), high.ir_value()],
        "st.shared.v2.f32 [$0], {$1, $2};",
        "r,f,f,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def st_shared_v4(address: Int32, words: tuple[Int32 | Float32, ...], offset: int = 0) -> None:
    """st.shared.v4.b32: four words, `offset` bytes behind a shared address that is a multiple of 16.

    An offset of its own: the compiler would else keep an address in a register for each of a row of stores.
    """
    letter = "f" if isinstance(words[0], Float32) else "r"
    llvm.inline_asm(
        None,
        [address.ir_value(), *(word.ir_value() for word in words)],
        f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};",
        f"r,{letter},{letter},{letter},{letter},~{{memory}}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def unpack_pair(dtype: type[Numeric], pair: Int32) -> tuple[Float32, Float32]:
    """The two 16-bit floats of a word, the lower half first: what `cvt_pair` has rounded."""
    halves = "mov.b32 {l, h}, $2;"
    form = {
        True: f"{{ .reg .b16 l, h, z; mov.b16 z, 0; {halves} mov.b32 $0, {{z, l}}; mov.b32 $1, {{z, h}}; }}",
        False: f"{{ .reg .f16 l, h; {halves} cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }}",
    }[dtype is BFloat16]
    both = llvm.inline_asm(
        llvm.StructType.get_literal([Float32.mlir_type] * 2),
        [pair.ir_value()],
        form,
        "=f,=f,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    low, high = (llvm.extractvalue(Float32.mlir_type, both, [i]) for i in range(2))
    return Float32(low), Float32(high)


def zero() -> Float32:
    """0, made here: the compiler would else zero accumulators at the kernel's start, where other roles pay for them."""
    made = llvm.inline_asm(
        Float32.mlir_type,
        [],
        "mov.f32 $0, 0f00000000;",
        "=f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(made)
