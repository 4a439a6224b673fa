"""What the two Hopper backwards have in common: a tile of keys, which a CTA or a cluster of two owns.

`BackwardSm90` lists parameters and barriers. Consumers are 256 threads behind the producer warpgroup; more may follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.pipeline import PipelineProducer

from ..core import dense
from ..core.barriers import Edge, NamedBarrierId
from ..core.bounds import Bounds, Span, Visit
from ..core.dense import Dense
from ..core.inputs import Inputs, read, window
from ..core.mask import Place
from ..core.packed import PackedTile, read_tile
from ..core.rows import GlobalRows
from ..core.scheduler import Grid, SingleTile, Tile
from ..core.seqlen import Sequence
from ..core.softmax import LOG2_E
from .rows import store_rows

if TYPE_CHECKING:
    from jax_fa4.configs import BackwardConfig

__all__ = ["Features", "KeysSm90", "Logits", "Maps", "Packed", "Producers", "Rows", "Work"]

WARPGROUP = 128
CONSUMERS = 2 * WARPGROUP
CONSUMER_WARPS = 8
ALL_BITS = -1


class Maps(NamedTuple):
    """TMA copies of one tile each, or of some of its columns."""

    q: cute.CopyAtom
    dout: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    dk: cute.CopyAtom | None  # None: parts are written instead
    dv: cute.CopyAtom | None


class Packed(NamedTuple):
    """What a call with packed sequences has beside others."""

    schedule: cute.Pointer
    dk: GlobalRows
    dv: GlobalRows
    q_slots: Int32


class Rows(NamedTuple):
    """Addresses of float32 numbers a query."""

    lse_log2: cute.Pointer
    delta: cute.Pointer
    dq_sum: cute.Pointer
    dq_turn: cute.Pointer | None  # int32
    dq_done: cute.Pointer | None  # int32


class Logits(NamedTuple):
    """How scores become logits; None: compiled without."""

    softmax_scale: Float32  # of dK
    capped: Float32 | None  # softcap: s becomes tanh(capped * s)
    biased: Float32 | None  # bias: then biased * s + bias
    scale_log2: Float32  # then exp2(scale_log2 * s - lse), of any sign


class Producers(NamedTuple):
    """The load warp's ends."""

    k: PipelineProducer
    v: PipelineProducer
    q: PipelineProducer
    dout: PipelineProducer


class Features(NamedTuple):
    """What a consumer thread knows of a call's extras; None: compiled without."""

    kv_ids: tuple[Int32, ...] | None  # segment ids of its keys
    q_ids: cute.Pointer | None  # of all queries
    mask: Dense | None
    bias: Dense | None

    def in_span(self, span: Span) -> Features:
        """Those that a tile of queries of the span asks for."""
        return self if span.segments else self._replace(kv_ids=None, q_ids=None)


class Work(NamedTuple):
    """One tile of keys and the tiles of queries that see it, in some of the kv head's query heads or in all."""

    grid: Grid
    tile: Tile  # its m_block counts tiles of keys, its q_head kv heads
    first_head: Int32  # query head
    heads: Int32
    m_blocks: Int32  # tiles of queries of a head in lse_log2, delta, dq_sum and dq_turn
    packed: PackedTile | None
    seq: Sequence  # of the transposed problem, where a key sees queries
    visit: Visit
    logits: Logits
    split: Int32 | int = 0  # of the kv head's query heads
    rank: Int32 | int = 0  # of the CTA in the cluster that shares the tile

    @property
    def begin(self) -> Int32 | int:
        """Where the sequence's keys begin among all."""
        return 0 if self.packed is None else self.packed.begin

    @property
    def q_begin(self) -> Int32 | int:
        """Where the sequence's queries begin among all."""
        return 0 if self.packed is None else self.packed.other_begin

    def q_tile(self, head: Int32, m_block: Int32) -> Int64:
        """Place of a tile of queries in what has some for each tile; `head` counts those of the batch entry."""
        return self.place_of(Int64(self.tile.batch) * self.grid.q_heads + head, m_block)

    @property
    def kv_head(self) -> Int32:
        """Counted over all batch entries, but where sequences are packed."""
        return self.tile.q_head if self.packed is not None else self.tile.batch * self.grid.kv_heads + self.tile.q_head

    def place_of(self, head: Int64, m_block: Int32) -> Int64:
        """The same, but `head` counts those of all batch entries."""
        first = 0 if self.packed is None else self.packed.other_slot
        return head * self.m_blocks + (m_block + first)


class Thread(Protocol):
    """What of a consumer thread's records its features depend on."""

    @property
    def place(self) -> Place: ...
    @property
    def features(self) -> Features: ...


class Position(Protocol):
    """Where a warpgroup stands: a tile of queries of a head, which counts those of all batch entries."""

    @property
    def head(self) -> Int32: ...
    @property
    def m_block(self) -> Int32: ...


class KeysSm90:
    """The base of both kernels: what follows from a config, and what a CTA knows of its tile."""

    scheduler: SingleTile

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
        # of the transposed problem: rows are keys, columns are queries
        self.bounds = Bounds(
            tile_m=config.tile_n,
            tile_n=config.tile_m,
            has_left=config.has_right,
            has_right=config.has_left,
            has_padding=config.has_padding,
        )
        warps, ctas = CONSUMER_WARPS, config.cluster_ctas
        q_bytes, dout_bytes = config.q_bytes + config.row_bytes, config.dout_bytes + config.row_bytes
        self.edges = (
            Edge(name="k", stages=1, tx_bytes=config.k_bytes, consumer_warps=warps),
            Edge(name="v", stages=1, tx_bytes=config.v_bytes, consumer_warps=warps),
            Edge(name="q", stages=config.q_stages, tx_bytes=q_bytes, consumer_warps=warps, ctas=ctas),
            Edge(name="dout", stages=config.dout_stages, tx_bytes=dout_bytes, consumer_warps=warps, ctas=ctas),
        )

    @property
    def bytes_a_query(self) -> int:
        """What a tile of keys reads of each query, and adds to."""
        config = self.config
        return (config.head_dim + config.head_dim_v) * config.element_bytes + 4 * config.sum_columns

    def listed(
        self, packed: Packed | None, inputs: Inputs, grid: Grid, transposed: Grid, index: Int32, count: Int32
    ) -> Work:
        """The tile at `index` of a schedule of `count`; `transposed` is the call as the scheduler sees it."""
        assert packed is not None, "only packed sequences have a schedule"
        group = grid.q_heads // grid.kv_heads
        position, head = self.scheduler.listed(index, count, transposed)
        found = read_tile(packed.schedule, position)
        tile = Tile(found.first_row(self.config.tile_n) // self.config.tile_n, head, head, found.batch)
        left, right = window(inputs)
        seq = found.sequence(right, left)  # it is the keys that see
        visit = self.bounds.visit(tile.m_block, seq)
        return Work(grid, tile, head * group, group, packed.q_slots, found, seq, visit, self.logits(inputs))

    def logits(self, inputs: Inputs) -> Logits:
        """Cap and scale of the call, as the steps from a score to a weight use them."""
        softmax_scale = scale = read(inputs.softmax_scale)
        capped = biased = None
        if inputs.softcap is not None:
            cap = read(inputs.softcap)
            capped, scale = scale / cap, cap
        if self.config.bias is not None:
            biased, scale = scale, Float32(1.0)
        return Logits(softmax_scale, capped, biased, scale * LOG2_E)

    def first_tile(self, m_block: Int32, work: Work) -> Int32 | int:
        """The first tile of keys that a tile of queries sees some of: those from there on visit it, if they see it."""
        seq = work.seq
        if seq.window_right is None:
            return 0
        first_key = m_block * self.config.tile_m - seq.diagonal - seq.window_right
        return cutlass.max(first_key, 0) // self.config.tile_n

    @cute.jit
    def load_row(
        self,
        source: cute.Pointer,
        target: cute.Tensor,
        work: Work,
        head: Int32,
        m_block: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Starts the copy of one statistic of a tile's queries."""
        tile_m = self.config.tile_m
        row = cute.make_tensor((source + work.q_tile(head, m_block) * tile_m).align(16), cute.make_layout(tile_m))
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=tile_m * Float32.width)
        with cute.arch.elect_one():
            cute.copy(atom, row, target, mbar_ptr=barrier)

    def is_key(self, work: Work, place: Place) -> tuple[Int32, ...]:
        """All bits set for those of a thread's rows that are keys of the sequence, else none."""
        return tuple(Int32(cutlass.select_(row < work.seq.q_len, Int32(ALL_BITS), Int32(0))) for row in place.rows)

    def features(self, inputs: Inputs, work: Work, place: Place) -> Features:
        """What the calling thread needs of the call's extras."""
        tile, grid = work.tile, work.grid
        kv_ids = q_ids = None
        if inputs.q_segment_ids is not None:
            entry = Int64(tile.batch * grid.kv_heads + tile.q_head)
            q_ids = inputs.q_segment_ids + entry * grid.q_len
            ids = inputs.kv_segment_ids + entry * grid.kv_len
            kv_ids = tuple(read(ids + cutlass.min(row, grid.kv_len - 1)) for row in place.rows)
        return Features(
            kv_ids=kv_ids,
            q_ids=q_ids,
            mask=dense.present(inputs.mask, inputs.mask_strides),
            bias=dense.present(inputs.bias, inputs.bias_strides),
        )

    def seen(self, thread: Thread, position: Position, work: Work, ragged: bool) -> tuple[Int32, ...] | None:
        """What a mask array lets be seen of the tile in work, read while S runs; None without one."""
        array, place = thread.features.mask, thread.place
        if array is None:
            return None
        columns = self.columns_of(array, place, position, work)
        return dense.bits(columns, place, position.m_block * self.config.tile_m, ragged=ragged)

    def columns_of(self, array: Dense, place: Place, position: Position, work: Work) -> dense.Rows:
        """What an array has for the thread's keys, in the head in work."""
        tile, grid = work.tile, work.grid
        head = position.head - tile.batch * grid.q_heads
        return dense.columns_of(array, place, tile.batch, head, grid.q_len, grid.kv_len)

    @cute.jit
    def clear_rows(self, tile: cute.Tensor, first: Int32, rows: int, columns: int) -> None:
        """Zeroes rows [first, rows) of a tile; all consumer threads take part."""
        words, row_words = cute.recast_tensor(tile, Int32), columns * self.config.element_bytes // 4
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        for word in cutlass.range(thread, (rows - first) * row_words, CONSUMERS, unroll=1):
            words[first + word // row_words, word % row_words] = Int32(0)

    def cleared(self) -> None:
        """Waits until all consumer threads have cleared their part. Waits: clear. Signals: clear."""
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma may read what this thread wrote
        cute.arch.barrier(barrier_id=NamedBarrierId.CLEAR, number_of_threads=CONSUMERS)

    def copy_to_smem(self, tiled: cute.TiledMma, accumulator: cute.Tensor, target: cute.Tensor) -> None:
        """A 16-bit accumulator of `tiled` to a tile whose rows lie apart."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled).get_slice(thread)
        cute.copy(copy, copy.retile(accumulator), copy.partition_D(target))

    def rows_left(self, work: Work, first_row: Int32) -> Int32:
        """How many of its keys a packed sequence still has at `first_row`."""
        assert work.packed is not None, "others have all rows of an array"
        return work.packed.room - first_row

    def store_rows(
        self,
        array: GlobalRows | None,
        tile: cute.Tensor,
        work: Work,
        first_row: Int32,
        rows: Int32,
        columns: int,
        head_dim: int,
        barrier: Int32 | int,
    ) -> None:
        """The first `rows` of a warpgroup's tile of dK or dV, the first for key `first_row`. Waits: store."""
        assert array is not None, "only packed sequences need it"
        start = array.row(work.tile.batch, work.begin + first_row, work.tile.q_head)
        store_rows(tile, start, array.row_stride, rows, columns, head_dim, barrier)
