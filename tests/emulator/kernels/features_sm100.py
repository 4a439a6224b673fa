"""Small CuTe-DSL kernels for Blackwell's tensor core. No such GPU is at hand: two readings of the ISA are compared.

CuTe's layouts decide where each element of A, B and D goes in shared memory, tensor memory and registers, and the
product is right only if the emulator puts them in the same places.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Int32,
    Int64,
    Numeric,
    TFloat32,
    Uint8,
    Uint16,
    Uint32,
)
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

THREADS = 128
SMEM_BYTES = 96 * 1024
COLUMNS = 512
UNSIGNED = {8: Uint8, 16: Uint16, 32: Uint32}
DTYPES = {"bf16": BFloat16, "f16": Float16, "e4m3": Float8E4M3FN, "e5m2": Float8E5M2, "tf32": TFloat32}
LOADS = {
    "32x32b": tcgen05.Ld32x32bOp,
    "16x64b": tcgen05.Ld16x64bOp,
    "16x128b": tcgen05.Ld16x128bOp,
    "16x256b": tcgen05.Ld16x256bOp,
    "16x32bx2": tcgen05.Ld16x32bx2Op,
}
STORES = {"32x32b": tcgen05.St32x32bOp, "16x128b": tcgen05.St16x128bOp, "16x256b": tcgen05.St16x256bOp}
ATOMS = {
    (major, width): getattr(tcgen05.SmemLayoutAtomKind, f"{prefix}_{suffix}")
    for major, prefix in (("k", "K"), ("m", "MN"))
    for width, suffix in ((0, "INTER"), (32, "SW32"), (64, "SW64"), (128, "SW128"))
}


def tensor(pointer: cute.Pointer, *shape: int) -> cute.Tensor:
    """Contiguous memory, the last index running fastest."""
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(range(len(shape)))[::-1]))


class Umma:
    """D = A B, A [m, k], B [n, k], by one CTA or a pair, read back through one shape of tcgen05.ld."""

    def __init__(
        self,
        a: str,
        b: str,
        m: int,
        n: int,
        k: int,
        majors: str = "kk",
        swizzle: int = 128,
        load: str = "32x32b",
        repeat: int = 16,
        ctas: int = 1,
        store: str | None = None,
    ) -> None:
        self.a, self.b, self.m, self.n, self.k, self.ctas = DTYPES[a], DTYPES[b], m, n, k, ctas
        self.majors, self.swizzle, self.load, self.repeat, self.store = majors, swizzle, load, repeat, store

    @cute.jit
    def launch(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer) -> None:
        self.kernel(a, b, d).launch(
            grid=(self.ctas, 1, 1), block=(THREADS, 1, 1), cluster=(self.ctas, 1, 1), smem=SMEM_BYTES
        )

    def mma(self) -> cute.TiledMma:
        modes = [OperandMajorMode.K if major == "k" else OperandMajorMode.MN for major in self.majors]
        group = tcgen05.CtaGroup.ONE if self.ctas == 1 else tcgen05.CtaGroup.TWO
        shape, source = (
            (self.m, self.n, 256 // self.a.width),
            tcgen05.OperandSource.SMEM if self.store is None else tcgen05.OperandSource.TMEM,
        )
        if self.a.width == 16:
            op = tcgen05.MmaF16BF16Op(self.a, Float32, shape, group, source, *modes)
        elif self.a.width == 32:
            op = tcgen05.MmaTF32Op(shape, group, source, *modes)
        else:
            op = tcgen05.MmaF8F6F4Op(self.a, self.b, Float32, shape, group, source, *modes)
        return cute.make_tiled_mma(op)

    def tile(self, smem, dtype: type[Numeric], major: str, shape, source: cute.Tensor) -> cute.Tensor:
        """An operand in shared memory, filled from its part of global memory."""
        atom = tcgen05.make_smem_layout_atom(ATOMS[major, self.swizzle], dtype)
        layout = tcgen05.tile_to_mma_shape(atom, shape, order=(1, 2) if major == "k" else (2, 1))
        tile = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        unsigned = cute.recast_ptr(tile.iterator, layout.inner, UNSIGNED[dtype.width])  # without `inner`: no swizzle
        self.fill(cute.make_tensor(unsigned, layout.outer), source)
        return tile

    @cute.jit
    def fill(self, tile: cute.Tensor, source: cute.Tensor) -> None:
        """Ordinary stores, element by element; pairs of neighbours belong to one thread."""
        for i in range(cute.arch.thread_idx()[0], cute.size(tile) // 16, THREADS):
            for j in cutlass.range_constexpr(16):
                tile[16 * i + j] = source[16 * i + j]

    @cute.jit
    def store_a(self, mma: cute.TiledMma, pointer: cute.Pointer, shape, source: cute.Tensor) -> cute.Tensor:
        """A in tensor memory, behind the accumulator, written by one shape of tcgen05.st."""
        start = cute.recast_ptr(pointer + COLUMNS // 2, dtype=self.a)
        fragment = cute.make_tensor(start, mma.make_fragment_A(shape).layout)
        atom = cute.make_copy_atom(STORES[self.store](tcgen05.Repetition(self.repeat)), self.a)
        for k in cutlass.range_constexpr(cute.size(fragment, mode=[2])):
            target = fragment[(None, None), 0, k]
            copy = tcgen05.make_tmem_copy(atom, target)
            part = copy.get_slice(cute.arch.thread_idx()[0])
            values = part.partition_S(source[(None, None), 0, k])
            registers = cute.make_rmem_tensor(values.shape, self.a)
            unsigned = cute.recast_tensor(registers, UNSIGNED[self.a.width])
            for i in cutlass.range_constexpr(cute.size(registers)):
                unsigned[i] = values[i]
            cute.copy(copy, registers, part.partition_D(target))
        cute.arch.fence_view_async_tmem_store()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        return fragment

    @cute.kernel
    def kernel(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer) -> None:
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if self.ctas == 2 else Int32(0)
        smem, mma = cutlass.memory.SmemAllocator(), self.mma()
        barrier, address = smem.allocate_array(Int64, 1), smem.allocate_array(Int32, 1)
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, address, is_two_cta=self.ctas == 2)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()

        mine = mma.get_slice(rank)
        a_memory = tensor(cute.recast_ptr(a, dtype=UNSIGNED[self.a.width]), self.m, self.k)
        b_memory = tensor(cute.recast_ptr(b, dtype=UNSIGNED[self.b.width]), self.n, self.k)
        a_shape = mma.partition_shape_A((self.m, self.k))
        b_shape = mma.partition_shape_B((self.n, self.k))
        b_tile = self.tile(smem, self.b, self.majors[1], b_shape, mine.partition_B(b_memory))
        b_fragment = mma.make_fragment_B(b_tile)
        if cutlass.const_expr(self.store is None):
            a_tile = self.tile(smem, self.a, self.majors[0], a_shape, mine.partition_A(a_memory))
            a_fragment = mma.make_fragment_A(a_tile)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
        accumulator = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C((self.m, self.n))).layout)
        if cutlass.const_expr(self.store is not None):
            a_fragment = self.store_a(mma, pointer, a_shape, mine.partition_A(a_memory))
        if warp == 0 and rank == 0:
            for k in cutlass.range_constexpr(cute.size(a_fragment, mode=[2])):
                mma.set(tcgen05.Field.ACCUMULATE, k > 0)
                cute.gemm(mma, accumulator, a_fragment[None, None, k], b_fragment[None, None, k], accumulator)
            with cute.arch.elect_one():
                if cutlass.const_expr(self.ctas == 2):
                    tcgen05.commit(barrier, 3, tcgen05.CtaGroup.TWO)
                else:
                    tcgen05.commit(barrier)
        cute.arch.mbarrier_wait(barrier, 0)

        atom = cute.make_copy_atom(LOADS[self.load](tcgen05.Repetition(self.repeat)), Float32)
        source = accumulator[(None, None), 0, 0]
        target = mine.partition_C(tensor(cute.recast_ptr(d, dtype=Float32), self.m, self.n))[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(atom, source)
        part = copy.get_slice(thread)
        from_memory, to = part.partition_S(source), part.partition_D(target)
        registers = cute.make_rmem_tensor(to.shape, Float32)
        cute.copy(copy, from_memory, registers)
        for i in cutlass.range_constexpr(cute.size(registers)):
            to[i] = registers[i]
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
            cute.arch.dealloc_tmem(pointer, COLUMNS, is_two_cta=self.ctas == 2)


KERNELS = {"Umma": Umma}
