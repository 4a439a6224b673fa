"""Lists the tiles of packed sequences for a kernel that computes them: those with much work first.

One CTA reads the offsets and lengths of all sequences of a call and writes the list, so that no kernel searches for a
tile's sequence and the host knows nothing of either. Orders:

    tiles       every tile by its own work
    sequences   the tiles of a sequence side by side, upwards; sequences by their heaviest tile
    slots       each tile at `first_slot` + its number; nothing is counted

Work is the number of the other side's blocks that a tile visits. It is sorted by counting: exactly up to EXACT blocks,
in steps of STEP beyond. Tiles of equal work are in no particular order.

    warp        32 sequences at a time, a lane each  ->  their tiles, 32 at a time, a lane each
    smem        tiles of each class of work, then where each class begins

Parameters in order, as `ScheduleConfig.params` lists them (rows are queries or keys, as the config says):

    cu_seqlens_q    int32*  [entries, sequences + 1] of which every `entry_step`th is a batch entry's
    cu_seqlens_kv   int32*  likewise; not with pages_keys
    q_lengths       int32*  [entries, sequences]; only with has_q_lengths
    kv_lengths      int32*  likewise; only with has_kv_lengths
    window_left     int32*  one element, >= 0; only with has_left
    window_right    int32*  one element, >= 0; only with has_right
    schedule        int32*  [1 + batch * num_slots, 8]: the number of tiles, the most rows that one of them may see and
                            how many tickets have been taken, 0, unless the order is "slots"; then PackedTile of each
    q_len kv_len sequences batch entry_step    int32 each

With pages_keys the keys of each sequence are numbered from 0, kv_len is how many a sequence may have, and a tile's
other_begin is the number of its sequence.

Offsets are cut to [0, q_len] or [0, kv_len] and lengths to what lies between two of them, so that whatever they hold no
tile reaches beyond the arrays.

Grid (1, 1, 1), block (1024, 1, 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .bounds import Bounds
from .divide import divide, divide_with_rest
from .packed import FIELDS, PackedTile, end_row, first_slot, num_slots, num_tiles

if TYPE_CHECKING:
    from jax_fa4.configs import ScheduleConfig

__all__ = ["Arrays", "Extents", "ScheduleKernel", "work_class"]

LANES = 32
EXACT, STEP, CLASSES = 1024, 64, 2048


class Arrays(NamedTuple):
    """Addresses; None: compiled without."""

    cu_seqlens_q: cute.Pointer
    cu_seqlens_kv: cute.Pointer | None
    q_lengths: cute.Pointer | None
    kv_lengths: cute.Pointer | None
    window_left: cute.Pointer | None
    window_right: cute.Pointer | None
    schedule: cute.Pointer


class Extents(NamedTuple):
    """Sizes of a call."""

    q_len: Int32
    kv_len: Int32
    sequences: Int32
    batch: Int32
    entry_step: Int32


class Side(NamedTuple):
    """The rows of all sequences that are tiled, or those that they see."""

    offsets: cute.Pointer | None  # None: each sequence has rows of its own, as many
    lengths: cute.Pointer | None
    rows: Int32


class Call(NamedTuple):
    """What all sequences have in common."""

    own: Side
    other: Side
    extents: Extents
    left: Int32 | None
    right: Int32 | None
    schedule: cute.Pointer
    classes: cute.Tensor  # [CLASSES] int32 in smem
    longest: cute.Tensor  # [1] likewise: the most rows of the other side that a sequence with tiles has


class Found(NamedTuple):
    """One sequence: its tile 0 stands for all, and where they go."""

    tile: PackedTile
    num_tiles: Int32
    place: Int32


def work_class(blocks: Int32 | int) -> Int32 | int:
    """The class of a tile that visits so many blocks."""
    coarse = EXACT + divide(cutlass.max(blocks - EXACT, 0), STEP)
    return cutlass.min(cutlass.min(blocks, coarse), CLASSES - 1)


class ScheduleKernel:
    """The schedule kernel of one config. `launch` is compiled for its device code only."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        left, right = config.sees_left, config.sees_right
        self.bounds = Bounds(
            tile_m=config.tile_m, tile_n=config.tile_n, has_left=left, has_right=right, has_padding=True
        )

    @cute.jit
    def launch(self, arrays: Arrays, extents: Extents) -> None:
        """The grid is a placeholder: plans compute their own."""
        config = self.config
        self.kernel(arrays, extents).launch(
            grid=(extents.batch, 1, 1), block=(config.threads, 1, 1), smem=config.smem_bytes
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, extents: Extents) -> None:
        cute.arch.griddepcontrol_launch_dependents()  # they wait for this grid's end by themselves
        smem = cutlass.memory.SmemAllocator()
        classes = smem.allocate_tensor(Int32, cute.make_layout(CLASSES), 16)
        totals = smem.allocate_tensor(Int32, cute.make_layout(LANES), 16)
        longest = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
        call = self.call(arrays, extents, classes, longest)
        if cutlass.const_expr(self.config.order != "slots"):
            for i in cutlass.range_constexpr(CLASSES // self.config.threads):
                classes[i * self.config.threads + cute.arch.thread_idx()[0]] = Int32(0)
            if cute.arch.thread_idx()[0] == 0:
                longest[0] = Int32(0)
            cute.arch.sync_threads()
            self.go_through(call, writes=False)
            cute.arch.sync_threads()
            self.begin_classes(call, totals)
            cute.arch.sync_threads()
        self.go_through(call, writes=True)
        cute.arch.griddepcontrol_wait()  # who waits for this grid's end waits for that of the one ahead, too

    def call(self, arrays: Arrays, extents: Extents, classes: cute.Tensor, longest: cute.Tensor) -> Call:
        """The call as the tiled side sees it."""
        queries = Side(arrays.cu_seqlens_q, arrays.q_lengths, extents.q_len)
        keys = Side(arrays.cu_seqlens_kv, arrays.kv_lengths, extents.kv_len)
        left, right = (None if p is None else _read(p) for p in (arrays.window_left, arrays.window_right))
        if self.config.side == "q":
            return Call(queries, keys, extents, left, right, arrays.schedule, classes, longest)
        return Call(keys, queries, extents, right, left, arrays.schedule, classes, longest)

    @cute.jit
    def go_through(self, call: Call, writes: cutlass.Constexpr) -> None:
        """Counts all tiles by class, or writes them: warps take 32 sequences at a time."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sequences = call.extents.batch * (call.extents.sequences + 2)
        for start in cutlass.range(warp * LANES, sequences, self.config.threads, unroll=1):
            found = self.find(call, start + lane, sequences)
            if cutlass.const_expr(not writes):
                self.note_longest(call, found)
            if cutlass.const_expr(self.config.order == "sequences"):
                found = found._replace(place=self.count(call, found, writes))
            ends = _inclusive_sum(found.num_tiles)
            for first in cutlass.range(0, cute.arch.shuffle_sync(ends, LANES - 1), LANES, unroll=1):
                self.take(call, found, ends, first + lane, writes)

    @cute.jit
    def find(self, call: Call, index: Int32, sequences: Int32) -> Found:
        """Sequence `index` of all batch entries, one of no tile behind the last."""
        config, extents = self.config, call.extents
        batch, number = divide_with_rest(cutlass.min(index, sequences - 1), extents.sequences + 2)
        begin, room, length = self.rows_of(call.own, extents, batch, number)
        other_begin, _, other_length = self.rows_of(call.other, extents, batch, number)
        tile = PackedTile(
            begin=begin,
            room=room,
            length=length,
            end_row=Int32(0),
            other_begin=other_begin,
            other_length=other_length,
            other_slot=first_slot(other_begin, number, config.tile_n),
            batch=batch,
        )
        count, place = num_tiles(room, config.tile_m), Int32(0)
        if cutlass.const_expr(config.order == "slots"):
            first = first_slot(begin, number, config.tile_m)
            count = first_slot(begin + room, number + 1, config.tile_m) - first
            place = batch * num_slots(call.own.rows, extents.sequences, config.tile_m) + first
        return Found(tile, Int32(cutlass.select_(index < sequences, count, Int32(0))), place)

    @cute.jit
    def rows_of(self, side: Side, extents: Extents, batch: Int32, number: Int32) -> tuple[Int32, Int32, Int32]:
        """Begin, room and length of a sequence of a batch entry; the first and the last lie outside of the offsets."""
        last = extents.sequences
        entry = batch * extents.entry_step
        if cutlass.const_expr(side.offsets is None):
            begin, room = number - 1, side.rows
        else:
            offsets = side.offsets + entry * (last + 1)
            begin = _cut(_read(offsets + cutlass.max(number - 1, 0)), side.rows)
            end = _cut(_read(offsets + cutlass.min(number, last)), side.rows)
            begin = Int32(cutlass.select_(number == 0, Int32(0), begin))
            room = cutlass.max(Int32(cutlass.select_(number > last, side.rows, end)) - begin, 0)
        length = Int32(0)
        if (number > 0) & (number <= last):
            length = room
            if cutlass.const_expr(side.lengths is not None):
                length = _cut(_read(side.lengths + (entry * last + (number - 1))), room)
        return begin, room, length

    @cute.jit
    def note_longest(self, call: Call, found: Found) -> None:
        """Keeps what a warp's sequences see at most."""
        seen = Int32(cutlass.select_(found.num_tiles > 0, found.tile.other_length, Int32(0)))
        most = cute.arch.warp_redux_sync(seen, "max")
        if cute.arch.lane_idx() == 0:
            cute.arch.atomic_max(call.longest.iterator, most)

    @cute.jit
    def count(self, call: Call, found: Found, writes: cutlass.Constexpr) -> Int32:
        """Counts all tiles of a sequence to its class. Returns how many the class had before, or where they begin."""
        ends = (0, cutlass.max(found.num_tiles - 1, 0))
        blocks = cutlass.max(*(self.blocks(call, self.tile_of(found.tile, block)) for block in ends))
        place = Int32(0)
        if found.num_tiles > 0:
            place = cute.arch.atomic_add(call.classes.iterator + work_class(blocks), found.num_tiles)
        return place

    @cute.jit
    def take(self, call: Call, found: Found, ends: Int32, index: Int32, writes: cutlass.Constexpr) -> None:
        """One tile a lane, `index` of those of the warp's sequences; `ends`: the sum of their tiles up to each."""
        owner = Int32(0)  # how many sequences end before
        for step in cutlass.range_constexpr(5):
            width = LANES >> (step + 1)
            end = cute.arch.shuffle_sync(ends, owner + (width - 1))
            owner = Int32(cutlass.select_(end <= index, owner + width, owner))
        tile = PackedTile(*(cute.arch.shuffle_sync(field, owner) for field in found.tile))
        count, end = cute.arch.shuffle_sync(found.num_tiles, owner), cute.arch.shuffle_sync(ends, owner)
        position = cute.arch.shuffle_sync(found.place, owner)
        block = index - (end - count)
        if index < end:  # else there are no more
            tile = self.tile_of(tile, block)
            position = position + block
            if cutlass.const_expr(self.config.order == "tiles"):
                work = work_class(self.blocks(call, tile))
                position = cute.arch.atomic_add(call.classes.iterator + work, Int32(1))
            if cutlass.const_expr(writes):
                self.write(call, tile, position)

    def tile_of(self, tile: PackedTile, block: Int32 | int) -> PackedTile:
        """Tile `block` of the sequence of `tile`."""
        return tile._replace(end_row=end_row(block, tile.room, self.config.tile_m, self.config.row_step))

    def blocks(self, call: Call, tile: PackedTile) -> Int32:
        """What a tile visits."""
        seq = tile.sequence(call.left, call.right)
        return self.bounds.visit_rows(tile.first_row(self.config.tile_m), tile.end_row, seq).num_n_blocks

    @cute.jit
    def write(self, call: Call, tile: PackedTile, position: Int32) -> None:
        """Writes one tile; where offsets descend there may be more than places."""
        slots = num_slots(call.own.rows, call.extents.sequences, self.config.tile_m)
        if position < call.extents.batch * slots:
            half = FIELDS // 2
            fields = cute.make_rmem_tensor((half, 2), Int32)
            for i in cutlass.range_constexpr(FIELDS):
                fields[i % half, i // half] = Int32(tile[i])
            for i in cutlass.range_constexpr(2):
                place = (call.schedule + ((position + 1) * FIELDS + half * i)).align(16)
                cute.make_tensor(place, cute.make_layout(half)).store(fields[None, i].load())

    @cute.jit
    def begin_classes(self, call: Call, totals: cute.Tensor) -> None:
        """Turns the number of tiles of each class into where they begin, the heaviest first. Writes the list's head."""
        threads, thread = self.config.threads, cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        each = CLASSES // threads
        first = CLASSES - 1 - each * thread  # the thread's first class, then downwards
        counts = [call.classes[first - i] for i in range(each)]
        own = sum(counts[1:], counts[0])
        end = _inclusive_sum(own)
        if lane == LANES - 1:
            totals[warp] = end
        cute.arch.sync_threads()
        before = _inclusive_sum(totals[lane])
        begin = end - own + cute.arch.shuffle_sync(before, warp) - totals[warp]
        for i in cutlass.range_constexpr(each):
            call.classes[first - i] = begin
            begin = begin + counts[i]
        if thread == threads - 1:
            slots = num_slots(call.own.rows, call.extents.sequences, self.config.tile_m)
            head = cute.make_tensor(call.schedule, cute.make_layout(3))
            head[0] = cutlass.min(begin, call.extents.batch * slots)
            head[1] = call.longest[0]
            head[2] = Int32(0)


def _read(pointer: cute.Pointer) -> Int32:
    """The one element at `pointer`."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _cut(number: Int32, limit: Int32) -> Int32:
    """`number`, cut to [0, limit]."""
    return cutlass.max(cutlass.min(number, limit), 0)


def _inclusive_sum(number: Int32) -> Int32:
    """The sum of the warp's numbers up to the lane's own."""
    lane = cute.arch.lane_idx()
    for step in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync(number, cutlass.max(lane - step, 0))
        number = number + Int32(cutlass.select_(lane >= step, below, Int32(0)))
    return number
