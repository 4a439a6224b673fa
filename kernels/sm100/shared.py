"""What the roles of a CTA share: tiles and statistics in shared memory, barriers by name, the tile at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..core.bounds import Visit
from ..core.divide import divide
from ..core.heads import Rows
from ..core.inputs import Inputs, Logits
from ..core.packed import PackedTile
from ..core.pages import Pages
from ..core.rows import GlobalRows
from ..core.scheduler import Grid, Tile
from ..core.seqlen import Sequence
from ..core.tma import Corner
from . import mma, ptx

if TYPE_CHECKING:
    from jax_fa4.configs.blackwell import Barrier, ForwardSm100Config

__all__ = [
    "LEADER",
    "RESPONSE_BYTES",
    "Barriers",
    "Cta",
    "Extents",
    "Maps",
    "Slot",
    "Smem",
    "Turn",
    "Work",
    "allocate",
    "arrive",
    "arrive_at_leader",
    "commit",
    "in_slot",
    "make_barriers",
    "meet",
    "wait",
    "wait_for_all",
]

ALIGNMENT = 1024  # bytes: the widest swizzle repeats so
RESPONSE_BYTES = 16  # of cluster launch control
LEADER = 0  # rank in a pair of the CTA that issues the products
BOTH_CTAS = 0b11  # a bit for each rank


class Maps(NamedTuple):
    """TMA copies of one tile each; None: other copies. Where lanes copy K and V, the arrays stand in their places."""

    q: cute.CopyAtom | None
    k: cute.CopyAtom | GlobalRows | None
    v: cute.CopyAtom | GlobalRows | None
    out: cute.CopyAtom | None  # where the epilogue warp stores O

    def prefetch(self) -> None:
        """Asks for the descriptors ahead of their use."""
        for atom in self:
            if atom is not None:
                cpasync.prefetch_descriptor(atom)


class Extents(NamedTuple):
    """Sizes of a call, and its arrays that no tensor map describes; None: compiled without.

    Of packed sequences, lengths are those of all together.
    """

    q_len: Int32
    kv_len: Int32
    q_heads: Int32
    kv_heads: Int32
    batch: Int32
    q: GlobalRows | None = None
    k: GlobalRows | None = None
    v: GlobalRows | None = None
    num_splits: Int32 | None = None
    page_table: cute.Pointer | None = None
    pages: Pages | None = None
    schedule: cute.Pointer | None = None  # of packed sequences: their tiles

    @property
    def grid(self) -> Grid:
        """The sizes alone."""
        return Grid(self.q_len, self.kv_len, self.q_heads, self.kv_heads, self.batch)

    @property
    def group(self) -> Int32:
        """Query heads of a kv head."""
        return divide(self.q_heads, self.kv_heads)


class Smem(NamedTuple):
    """Tiles and statistics in shared memory."""

    q: cute.Tensor  # (128, D, q_tiles)
    k: cute.Tensor  # (128, D), where the ring of K and V begins
    v: cute.Tensor  # (128, E), the same place; of a pair each CTA has half of K's rows and half of V's columns
    out: cute.Tensor | None  # (128, E, q_tiles), the bytes of q unless a CTA computes several tiles
    factors: cute.Tensor  # (128, 2) float32: for earlier output, of the block in each place of S
    totals: cute.Tensor  # (128, q_tiles) float32: the factors that normalise O
    response: cute.Pointer | None  # which tile is next, as cluster launch control tells it
    tmem_address: cute.Pointer  # where the allocation puts the address of column 0


class Barriers(NamedTuple):
    """First of each kind of barrier, as `ForwardSm100Config.barriers` lists them."""

    q_full: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    p_last: cute.Pointer
    stats: cute.Pointer
    total: cute.Pointer
    o_full: cute.Pointer
    tmem_idle: cute.Pointer
    out_full: cute.Pointer | None = None  # only where TMA stores O
    tile_full: cute.Pointer | None = None  # these only where the hardware says which tile is next
    tile_empty: cute.Pointer | None = None
    q_empty: cute.Pointer | None = None  # these only where a CTA computes several tiles
    total_empty: cute.Pointer | None = None
    out_empty: cute.Pointer | None = None


class Cta(NamedTuple):
    """What every role of a CTA has."""

    smem: Smem
    barriers: Barriers
    inputs: Inputs
    grid: Extents


class Slot(NamedTuple):
    """A place in the ring of K and V blocks; `phase` is the parity of its full barrier's completion."""

    index: Int32
    phase: Int32

    @classmethod
    def first(cls) -> Slot:
        """Where both ends begin."""
        return cls(Int32(0), Int32(0))

    def next(self, stages: int) -> Slot:
        """The place behind."""
        index = self.index + 1
        wrapped = index == stages
        return Slot(
            Int32(cutlass.select_(wrapped, Int32(0), index)),
            Int32(cutlass.select_(wrapped, self.phase ^ 1, self.phase)),
        )


def in_slot(config: ForwardSm100Config, tile: cute.Tensor, slot: Slot) -> cute.Tensor:
    """A tile at the start of the ring, moved to `slot`."""
    offset = slot.index * (config.kv_stage_bytes // config.element_bytes)
    if config.smem.kv_is_uneven:
        # round 0: K [0, k) V [k, k + v) K, round 1: V [0, v) K [v, v + k) V: only the middle moves
        shift = config.kv_shift_bytes // config.element_bytes
        towards = Int32(cutlass.select_(slot.phase == 0, Int32(shift), Int32(-shift)))
        offset = offset + Int32(cutlass.select_(slot.index == 1, towards, Int32(0)))
    return cute.make_tensor(tile.iterator + cute.assume(offset, divby=ALIGNMENT // config.element_bytes), tile.layout)


class Turn(NamedTuple):
    """Where a block's S and P are in tensor memory, and the parity with which their barriers complete."""

    place: Int32 | int
    phase: Int32

    @classmethod
    def of(cls, config: ForwardSm100Config, i: int, block: Int32) -> Turn:
        """Of query tile `i`, which has a place of its own; a lone tile has both in turn. `block`: those before."""
        return cls(i, block & 1) if config.q_tiles > 1 else cls(block & 1, block >> 1 & 1)


class Work(NamedTuple):
    """One tile and what it visits."""

    grid: Extents
    tile: Tile
    rows: Rows
    seq: Sequence
    visit: Visit
    logits: Logits
    inputs: Inputs
    round: Int32  # tiles that the CTA has computed before, and so phases of the barriers that a tile completes once
    filled: Int32 = 0  # those of them that visit a key
    split: Int32 | None = None  # of the keys that the tile sees
    rank: Int32 | int = 0  # of the CTA among those that compute the tile
    packed: PackedTile | None = None  # of packed sequences

    def first_row(self, config: ForwardSm100Config, i: int) -> Int32 | int:
        """Of the CTA's query tile `i`, among the tile's rows: a pair's CTAs have neighbouring ones."""
        return (i * config.cta_group + self.rank) * config.map_rows

    @property
    def q_begin(self) -> Int32 | int:
        """Of the sequence, among the rows of q, out and lse."""
        return 0 if self.packed is None else self.packed.begin

    @property
    def q_rows(self) -> Int32:
        """Rows that have results, from the sequence's first on."""
        return self.grid.q_len if self.packed is None else self.packed.room

    def of_queries(self, row: Int32 | int) -> Corner:
        """Where the tile's rows of q and out lie, from `row` on."""
        return Corner(self.q_begin + (self.rows.first + row), self.tile.q_head, self.tile.batch)

    def of_keys(self, key: Int32, column: Int32 | int = 0) -> Corner:
        """Where keys lie in k and v, from `key` on."""
        begin = 0 if self.packed is None else self.packed.other_begin
        return Corner(begin + key, self.tile.kv_head, self.tile.batch, column)

    @property
    def kv_rows(self) -> Int32:
        """Rows of k and v from the sequence's first on: what lies behind them is outside of the arrays."""
        return self.grid.kv_len if self.packed is None else self.grid.kv_len - self.packed.other_begin


def allocate(config: ForwardSm100Config, dtype: type[Numeric]) -> Smem:
    """The Q tiles, O, the ring of K and V, statistics. O may be in Q's place, whichever is wider."""
    smem = cutlass.memory.SmemAllocator()
    q_room = smem.allocate(config.smem.q_room, ALIGNMENT)
    ring = smem.allocate(config.smem.kv_bytes, ALIGNMENT)

    def tiles(start: cute.Pointer, rows: int, columns: int, number: int, step_bytes: int) -> cute.Tensor:
        one = mma.layout(dtype, rows, columns)
        shape, stride = one.outer.shape, one.outer.stride
        every = cute.make_layout((*shape, number), stride=(*stride, step_bytes // config.element_bytes))
        return cute.make_tensor(cute.recast_ptr(start, one.inner, dtype), every)

    def statistics(number: int) -> cute.Tensor:
        return smem.allocate_tensor(Float32, cute.make_layout((config.map_rows, number)), 4)

    rows, q_tiles, plan = config.map_rows, config.q_tiles, config.smem
    if config.is_persistent:
        q_step, out_step = plan.q_bytes // q_tiles, (plan.q_room - plan.q_bytes) // q_tiles
    else:
        q_step = out_step = plan.q_room // q_tiles
    out = tiles(q_room + config.out_offset, rows, config.v_columns, q_tiles, out_step) if config.out_by_tma else None
    return Smem(
        q=tiles(q_room, rows, config.columns, q_tiles, q_step),
        k=tiles(ring, config.k_rows, config.columns, 1, 0)[None, None, 0],
        v=tiles(ring, config.tile_n, config.v_part_columns, 1, 0)[None, None, 0],
        out=out,
        factors=statistics(len(config.tmem.scores)),
        totals=statistics(q_tiles),
        response=smem.allocate(RESPONSE_BYTES, RESPONSE_BYTES) if config.is_dynamic else None,
        tmem_address=smem.allocate_array(Int32, 1),
    )


def make_barriers(table: tuple[Barrier, ...], cta_group: int, *, first_thread: cutlass.Boolean) -> Barriers:
    """Initialises every barrier of the table. Every thread calls it; it ends with all in step, also those of a pair."""
    smem = cutlass.memory.SmemAllocator()
    rows = {barrier.name.replace(".", "_"): barrier for barrier in table}
    places = {name: smem.allocate_array(Int64, barrier.number) for name, barrier in rows.items()}
    _initialise(tuple((places[name], row.number, row.arrivals) for name, row in rows.items()), first_thread)
    cute.arch.mbarrier_init_fence()
    meet(cta_group)
    return Barriers(**places)


def meet(cta_group: int) -> None:
    """Until every thread of the CTA, or of both of a pair, has come here."""
    if cta_group == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def _initialise(rows: tuple[tuple[cute.Pointer, int, int], ...], first_thread: cutlass.Boolean) -> None:
    if first_thread:
        for place, number, arrivals in rows:
            for i in range(number):
                cute.arch.mbarrier_init(place + i, arrivals)


def wait(barrier: cute.Pointer, phase: Int32) -> None:
    """Until the phase of that parity is complete; tensor memory that it covers may be used from here on."""
    cute.arch.mbarrier_wait(barrier, phase)
    ptx.fence_after_sync()


def wait_for_all(barrier: cute.Pointer, phase: Int32, cta_group: int) -> None:
    """The same for a barrier at which both CTAs of a pair arrive."""
    if cta_group == 1:
        wait(barrier, phase)
        return
    ptx.mbarrier_wait_cluster(barrier, phase)
    ptx.fence_after_sync()


def arrive(barrier: cute.Pointer) -> None:
    """One arrival for the warp, after all that its lanes did before."""
    ptx.fence_before_sync()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def arrive_at_leader(barrier: cute.Pointer, cta_group: int) -> None:
    """The same at the barrier of the CTA that issues a pair's products."""
    if cta_group == 1:
        arrive(barrier)
        return
    ptx.fence_before_sync()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ptx.mbarrier_arrive_cluster(barrier, LEADER)


def commit(barrier: cute.Pointer, cta_group: int) -> None:
    """An arrival once all products that the warp has issued are complete, in each CTA that they are of."""
    with cute.arch.elect_one():
        if cta_group == 1:
            tcgen05.commit(barrier)
        else:
            tcgen05.commit(barrier, BOTH_CTAS, tcgen05.CtaGroup.TWO)
