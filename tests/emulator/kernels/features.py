"""Small CuTe-DSL kernels, each of which exercises one feature of Hopper; `build.py` compiles them.

Every kernel writes what it produced to global memory in full, so that hardware and emulator can be compared bit by bit.
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
    Int8,
    Int32,
    Int64,
    Numeric,
    Uint8,
    Uint16,
    Uint32,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

WARPGROUP = 128
SMEM_BYTES = 48 * 1024
K_ATOMS = {
    0: warpgroup.SmemLayoutAtomKind.K_INTER,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
}
MN_ATOMS = {
    0: warpgroup.SmemLayoutAtomKind.MN_INTER,
    32: warpgroup.SmemLayoutAtomKind.MN_SW32,
    64: warpgroup.SmemLayoutAtomKind.MN_SW64,
    128: warpgroup.SmemLayoutAtomKind.MN_SW128,
}
UNSIGNED = {8: Uint8, 16: Uint16}
DTYPES = {
    "bf16": BFloat16,
    "f16": Float16,
    "e4m3": Float8E4M3FN,
    "e5m2": Float8E5M2,
    "s8": Int8,
    "u8": Uint8,
    "f32": Float32,
    "s32": Int32,
}


def tensor(pointer: cute.Pointer, *shape: int) -> cute.Tensor:
    """Contiguous memory, the last index running fastest."""
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(range(len(shape)))[::-1]))


def words(pointer: cute.Pointer, count: int) -> cute.Tensor:
    """Memory as 32-bit words, without any swizzle."""
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(count))


@cute.jit
def init_barrier(barrier: cute.Pointer, count: int) -> None:
    """One mbarrier, visible to all threads and to asynchronous copies."""
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_init(barrier, count)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def box_at(atom: cute.CopyAtom, block: tuple[int, int], row: Int32, column: Int32, tile: cute.Tensor):
    """(tile in shared memory, its coordinates) of the block (rows, columns) that starts at (row, column)."""
    every = cute.domain_offset((column, row), cute.make_identity_tensor((block[1], block[0])))
    coordinates = cute.make_tensor(every.iterator, cute.select(every.layout, [1, 0]))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(coordinates, 0, 2)
    )


def swizzled(swizzle: int, dtype: type[Numeric], rows: int, columns: int) -> cute.ComposedLayout:
    """A row-major tile (rows, columns) whose rows are as long as the swizzle."""
    atom = warpgroup.make_smem_layout_atom(K_ATOMS[swizzle], dtype)
    return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))


class TmaCopy:
    """Each CTA loads a box that hangs over the tensor's edges, dumps shared memory and stores the box elsewhere.

    The box is stored `shift` = (rows, 16 bytes) away from where it was loaded, and lies `offset` bytes behind where
    the swizzle starts anew.
    """

    def __init__(self, swizzle: int, dtype: str, shift: tuple[int, int] = (4, 2), offset: int = 0) -> None:
        self.swizzle, self.dtype, self.rows = swizzle, DTYPES[dtype], 24
        self.shift, self.offset = (shift[0], shift[1] * 16 * 8 // self.dtype.width), offset
        self.columns = max(self.swizzle, 16) * 8 // self.dtype.width
        self.bytes = self.rows * self.columns * self.dtype.width // 8

    @cute.jit
    def launch(self, x: cute.Pointer, y: cute.Pointer, dump: cute.Pointer) -> None:
        tile, block = self.layout(), (self.rows, self.columns)
        x_tensor, y_tensor = (tensor(cute.recast_ptr(p, dtype=self.dtype), 40, 2 * self.columns) for p in (x, y))
        load, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x_tensor, tile, block)
        store, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y_tensor, tile, block)
        self.kernel(load, store, dump).launch(grid=(2, 2, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    def layout(self) -> cute.ComposedLayout:
        return swizzled(self.swizzle, self.dtype, self.rows, self.columns)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, store: cute.CopyAtom, dump: cute.Pointer) -> None:
        thread = cute.arch.thread_idx()[0]
        bx, by, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        layout = self.layout()
        if cutlass.const_expr(self.offset):
            smem.allocate(self.offset, 1024)
        tile = smem.allocate_tensor(self.dtype, layout.outer, 64 if self.offset else 1024, layout.inner)
        barrier = smem.allocate_array(Int64, 1)
        init_barrier(barrier, 1)
        row, column = by * self.rows - 3, bx * self.columns - 16 * 8 // self.dtype.width
        block = (self.rows, self.columns)
        if thread < 32:
            into, at = box_at(load, block, row, column, tile)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.bytes)
            cute.copy(load, at, into, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        raw = words(tile.iterator, self.bytes // 4)
        out = words(dump, 4 * (self.bytes // 4))
        for i in range(thread, self.bytes // 4, WARPGROUP):
            out[(by * 2 + bx) * (self.bytes // 4) + i] = raw[i]
        if thread < 32:
            source, to = box_at(store, block, row + self.shift[0], column + self.shift[1], tile)
            cute.copy(store, source, to)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class TmaReduce:
    """Each CTA adds its tile to the same box of a tensor."""

    rows, columns = 16, 32

    def __init__(self, row: int = 7) -> None:
        self.row = row

    @cute.jit
    def launch(self, x: cute.Pointer, y: cute.Pointer) -> None:
        add, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(),
            tensor(cute.recast_ptr(y, dtype=Float32), 20, self.columns),
            swizzled(128, Float32, self.rows, self.columns),
            (self.rows, self.columns),
        )
        self.kernel(add, x).launch(grid=(3, 1, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, add: cute.CopyAtom, x: cute.Pointer) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        layout = swizzled(128, Float32, self.rows, self.columns)
        tile = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout.outer, 1024, layout.inner)
        values = tensor(cute.recast_ptr(x, dtype=Float32), 3, self.rows, self.columns)
        for i in range(thread, self.rows * self.columns, WARPGROUP):
            tile[i // self.columns, i % self.columns] = values[cta, i // self.columns, i % self.columns]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if thread < 32:
            source, to = box_at(add, (self.rows, self.columns), self.row, 0, tile)
            cute.copy(add, source, to)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


class BulkReduce:
    """Bulk copies without a map: each CTA loads a row, changes it, and adds it to the same global row."""

    count = 512

    @cute.jit
    def launch(self, x: cute.Pointer, y: cute.Pointer) -> None:
        self.kernel(x, y).launch(grid=(3, 1, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        row = smem.allocate_tensor(Float32, cute.make_layout(self.count), 128)
        barrier = smem.allocate_array(Int64, 1)
        init_barrier(barrier, 1)
        source, target = cute.recast_ptr(x, dtype=Float32) + cta * self.count, cute.recast_ptr(y, dtype=Float32)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * self.count)
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[row.iterator.toint(), source.toint(), Int32(4 * self.count), barrier.toint()],
            )
        cute.arch.mbarrier_wait(barrier, 0)
        for i in range(thread, self.count, WARPGROUP):
            row[i] = row[i] + Float32(1.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=[target.toint(), row.iterator.toint(), Int32(4 * self.count)],
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


class Wgmma:
    """D += A B for one warpgroup: A [64, k], B [n, k], in a chain of instructions; raw fragments of D go out."""

    def __init__(
        self,
        a: str,
        b: str,
        accumulator: str,
        n: int,
        k: int,
        swizzle: int = 128,
        majors: str = "kk",
        a_in_registers: bool = False,
    ) -> None:
        self.a, self.b, self.accumulator = DTYPES[a], DTYPES[b], DTYPES[accumulator]
        self.n, self.k, self.swizzle, self.majors, self.a_in_registers = n, k, swizzle, majors, a_in_registers

    @cute.jit
    def launch(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer) -> None:
        self.kernel(a, b, d).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    def mma(self) -> cute.TiledMma:
        source = warpgroup.OperandSource.RMEM if self.a_in_registers else warpgroup.OperandSource.SMEM
        modes = [OperandMajorMode.K if major == "k" else OperandMajorMode.MN for major in self.majors]
        shape = (64, self.n, 256 // self.a.width)
        if self.a.width == 16:
            op = warpgroup.MmaF16BF16Op(self.a, self.accumulator, shape, source, *modes)
        elif self.a in (Int8, Uint8):
            op = warpgroup.MmaI8Op(self.a, self.b, self.accumulator, shape, source, *modes)
        else:
            op = warpgroup.MmaF8Op(self.a, self.b, self.accumulator, shape, source, *modes)
        return cute.make_tiled_mma(op)

    def layout(self, major: str, rows: int) -> cute.ComposedLayout:
        atom = warpgroup.make_smem_layout_atom((K_ATOMS if major == "k" else MN_ATOMS)[self.swizzle], self.a)
        return cute.tile_to_shape(atom, (rows, self.k), order=(0, 1) if major == "k" else (1, 0))

    def tile(
        self, smem: cutlass.memory.SmemAllocator, source: cute.Pointer, dtype: type[Numeric], major: str, rows: int
    ) -> cute.Tensor:
        """A tile in shared memory, filled from global memory."""
        layout = self.layout(major, rows)
        tile = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        unsigned = cute.recast_ptr(tile.iterator, layout.inner, UNSIGNED[dtype.width])  # without `inner`: no swizzle
        self.fill(cute.make_tensor(unsigned, layout.outer), source, major, rows)
        return tile

    @cute.jit
    def fill(self, tile: cute.Tensor, source: cute.Pointer, major: cutlass.Constexpr, rows: cutlass.Constexpr) -> None:
        """Ordinary stores, element by element along what is contiguous."""
        values = tensor(cute.recast_ptr(source, dtype=tile.element_type), rows, self.k)
        for i in range(cute.arch.thread_idx()[0], rows * self.k, WARPGROUP):
            if cutlass.const_expr(major == "k"):
                tile[i // self.k, i % self.k] = values[i // self.k, i % self.k]
            else:
                tile[i % rows, i // rows] = values[i % rows, i // rows]

    @cute.kernel
    def kernel(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer) -> None:
        thread = cute.arch.thread_idx()[0]
        smem, mma = cutlass.memory.SmemAllocator(), self.mma()
        mine, whole = mma.get_slice(thread), mma.get_slice(0)
        b_fragment = mma.make_fragment_B(whole.partition_B(self.tile(smem, b, self.b, self.majors[1], self.n)))
        if cutlass.const_expr(self.a_in_registers):
            a_fragment = cute.make_rmem_tensor(mma.partition_shape_A((64, self.k)), self.a)
            a_words = cute.recast_tensor(cute.coalesce(a_fragment), Uint32)
            a_source = words(a, 64 * self.k * self.a.width // 32)
            for i in cutlass.range_constexpr(cute.size(a_words)):
                a_words[i] = a_source[i * WARPGROUP + thread]
        else:
            a_fragment = mma.make_fragment_A(whole.partition_A(self.tile(smem, a, self.a, self.majors[0], 64)))
        accumulator = cute.make_rmem_tensor(mine.partition_shape_C((64, self.n)), self.accumulator)
        d_words = cute.recast_tensor(cute.coalesce(accumulator), Uint32)
        d_memory = words(d, cute.size(d_words) * WARPGROUP)
        for i in cutlass.range_constexpr(cute.size(d_words)):
            d_words[i] = d_memory[i * WARPGROUP + thread]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(b_fragment, mode=[2])):
            cute.gemm(mma, accumulator, a_fragment[None, None, k], b_fragment[None, None, k], accumulator)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(d_words)):
            d_memory[i * WARPGROUP + thread] = d_words[i]


class Matrices:
    """stmatrix and ldmatrix of every count, plain and transposed: what stays in shared memory, what comes back."""

    words = 1024  # of shared memory a variant

    @cute.jit
    def launch(self, x: cute.Pointer, dump: cute.Pointer, back: cute.Pointer) -> None:
        self.kernel(x, dump, back).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, x: cute.Pointer, dump: cute.Pointer, back: cute.Pointer) -> None:
        thread = cute.arch.thread_idx()[0]
        area = cutlass.memory.SmemAllocator().allocate_tensor(Uint32, cute.make_layout(self.words), 1024)
        source, out, returned = words(x, 4 * WARPGROUP), words(dump, 6 * self.words), words(back, 24 * WARPGROUP)
        row = area.iterator.toint() + (thread // 32) * 1024 + (thread % 32) * 16
        values = [source[i * WARPGROUP + thread] for i in range(4)]
        for variant, (count, trans) in enumerate((n, t) for n in (1, 2, 4) for t in ("", ".trans")):
            for i in range(thread, self.words, WARPGROUP):
                area[i] = Uint32(0)
            cute.arch.sync_threads()
            registers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [{{$r0}}], {{{registers}}};",
                read_only_args=[row, *values[:count]],
            )
            cute.arch.sync_threads()
            for i in range(thread, self.words, WARPGROUP):
                out[variant * self.words + i] = area[i]
            results = ", ".join(f"{{$w{i}}}" for i in range(count))
            loaded = cute.arch.inline_ptx(
                f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{results}}}, [{{$r0}}];",
                write_only_types=[Uint32] * count,
                read_only_args=[row],
            )
            loaded = loaded if isinstance(loaded, tuple) else (loaded,)
            for i in cutlass.range_constexpr(count):
                returned[(4 * variant + i) * WARPGROUP + thread] = loaded[i]
            cute.arch.sync_threads()


class NamedBarriers:
    """Four warps hand a counter round through named barriers: each turn appends to a log in shared memory."""

    rounds = 8

    @cute.jit
    def launch(self, log: cute.Pointer) -> None:
        self.kernel(log).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, log: cute.Pointer) -> None:
        thread = cute.arch.thread_idx()[0]
        me = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        entries = smem.allocate_tensor(Int32, cute.make_layout(4 * self.rounds), 128)
        length = smem.allocate_tensor(Int32, cute.make_layout(1), 128)
        if thread == 0:
            length[0] = Int32(0)
        cute.arch.sync_threads()
        if me == 3:
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=64)  # warp 0 begins
        for turn in range(self.rounds):
            cute.arch.barrier(barrier_id=1 + me, number_of_threads=64)
            at = length[0]
            cute.arch.sync_warp()
            if thread % 32 == 0:
                entries[at] = 100 * turn + me
                length[0] = at + 1
            cute.arch.sync_warp()
            if turn < self.rounds - 1 or me < 3:
                cute.arch.barrier_arrive(barrier_id=1 + (me + 1) % 4, number_of_threads=64)
        cute.arch.sync_threads()
        out = words(log, 4 * self.rounds)
        if thread < 4 * self.rounds:
            out[thread] = Uint32(entries[thread])


class Multicast:
    """Two CTAs each load half of a tile into both of them, and dump what they hold."""

    rows, columns = 16, 64

    @cute.jit
    def launch(self, x: cute.Pointer, dump: cute.Pointer) -> None:
        half = (self.rows // 2, self.columns)
        load, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            tensor(cute.recast_ptr(x, dtype=BFloat16), 2 * self.rows, self.columns),
            swizzled(128, BFloat16, *half),
            half,
        )
        self.kernel(load, dump).launch(grid=(4, 1, 1), block=(WARPGROUP, 1, 1), cluster=(2, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, dump: cute.Pointer) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.memory.SmemAllocator()
        half = (self.rows // 2, self.columns)
        layout = swizzled(128, BFloat16, self.rows, self.columns)
        tile = smem.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        barrier = smem.allocate_array(Int64, 1)
        init_barrier(barrier, 1)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * self.rows * self.columns)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if thread < 32:
            mine = cute.local_tile(tile, half, (rank, 0))
            into, at = box_at(load, half, (cta // 2) * self.rows + rank * half[0], Int32(0), mine)
            cute.copy(load, at, into, tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(3))
        cute.arch.mbarrier_wait(barrier, 0)
        count = self.rows * self.columns // 2
        raw, out = words(tile.iterator, count), words(dump, 4 * count)
        for i in range(thread, count, WARPGROUP):
            out[cta * count + i] = raw[i]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class Dsmem:
    """Each CTA of a cluster of four stores into its neighbour's shared memory and arrives at its barrier."""

    @cute.jit
    def launch(self, out: cute.Pointer) -> None:
        self.kernel(out).launch(grid=(4, 1, 1), block=(WARPGROUP, 1, 1), cluster=(4, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, out: cute.Pointer) -> None:
        thread = cute.arch.thread_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.memory.SmemAllocator()
        box = smem.allocate_tensor(Int32, cute.make_layout(2 * WARPGROUP), 128)
        barrier = smem.allocate_array(Int64, 1)
        init_barrier(barrier, 1)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * WARPGROUP)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        neighbour = (rank + 1) % 4
        remote = cute.arch.map_dsmem_ptr(box.iterator + (WARPGROUP + thread), neighbour)
        cute.arch.inline_ptx(
            "st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[remote.toint(), 1000 * rank + thread]
        )
        cute.arch.store_async_dsmem(box.iterator + thread, 2000 * rank + thread, barrier, neighbour)
        cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        results = words(out, 4 * 2 * WARPGROUP)
        for i in cutlass.range_constexpr(2):
            at = i * WARPGROUP + thread
            results[rank * 2 * WARPGROUP + at] = Uint32(box[at])


class Scalar:
    """One PTX instruction, a thread an element: `{d}`, `{a}`, `{b}`, `{c}` stand for its registers."""

    def __init__(self, instruction: str, inputs: str, output: str) -> None:
        self.instruction, self.inputs, self.output = instruction, inputs, output

    @cute.jit
    def launch(self, a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, d: cute.Pointer) -> None:
        self.kernel(a, b, c, d).launch(grid=(8, 1, 1), block=(WARPGROUP, 1, 1), smem=SMEM_BYTES)

    @cute.kernel
    def kernel(self, a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, d: cute.Pointer) -> None:
        at = cute.arch.block_idx()[0] * WARPGROUP + cute.arch.thread_idx()[0]
        types = {"f32": Float32, "b32": Uint32, "lane": Uint32, "b16": Uint16}
        values = []
        for pointer, name in zip((a, b, c), self.inputs.split(), strict=False):
            values.append(
                cute.make_tensor(cute.recast_ptr(pointer, dtype=types[name]), cute.make_layout(8 * WARPGROUP))[at]
            )
        text = self.instruction.replace("{d}", "{$w0}")
        for i, letter in enumerate("abc"):
            text = text.replace(f"{{{letter}}}", f"{{$r{i}}}")
        result = cute.arch.inline_ptx(text, write_only_types=[types[self.output]], read_only_args=values)
        target = types[self.output]
        cute.make_tensor(cute.recast_ptr(d, dtype=target), cute.make_layout(8 * WARPGROUP))[at] = result


ALL = (TmaCopy, TmaReduce, BulkReduce, Wgmma, Matrices, NamedBarriers, Multicast, Dsmem, Scalar)
KERNELS = {kernel.__name__: kernel for kernel in ALL}
