"""All that a Blackwell forward kernel is compiled from, and what follows: roles, tensor memory, barriers, smem."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, Self

from jax_fa4.configs.config import (
    MBARRIER_BYTES,
    MMA_COLUMNS,
    REGISTER_FILE,
    REGISTER_STEP,
    SMEM_LIMIT,
    KernelConfig,
    round_up,
    rows_of,
)
from jax_fa4.configs.params import Extent, KernelParam

__all__ = ["ROLES", "TMEM_COLUMNS", "Barrier", "ForwardSm100Config", "Role", "Schedule", "SmemPlan", "TmemMap"]

ARCHS = ("sm_100a", "sm_103a")
WARP = 32
THREADS = 512
Q_TILES = (1, 2)  # of a CTA, computed in turn
TILE_ROWS = 128  # queries of one, a lane of tensor memory each
TILE_N = 128  # keys of a block
WARPGROUP_WARPS = 4
TMEM_COLUMNS = 512  # of 32 bits, all that an SM has
EARLY_WEIGHTS = 96  # columns of P with which its product begins; the rest follows behind
SCORES = 2  # places for S in tensor memory: of two query tiles, or of two blocks of one
IDLE_REGISTERS = 24  # of a thread that has nothing to do: the fewest there are
MAX_KV_STAGES = 32
UNEVEN_KV_STAGES = 3  # K V K, then V K V: slots of two sizes
RESPONSE_BYTES = 16  # which tile is next, as cluster launch control tells it
TMEM_ADDRESS_BYTES = 8  # where the allocation tells its address; padded, for barriers follow


Schedule = Literal["single", "static", "dynamic"]


class Role(NamedTuple):
    """What some warps of a CTA do."""

    name: str
    first_warp: int
    warps: int


ROLES = (
    Role("softmax0", 0, 4),
    Role("softmax1", 4, 4),
    Role("correction", 8, 4),
    Role("mma", 12, 1),
    Role("epilogue", 13, 1),
    Role("load", 14, 1),
    Role("schedule", 15, 1),  # empty unless the hardware says which tile is next
)


class Barrier(NamedTuple):
    """An mbarrier, or one for each Q tile, place of S or slot of a ring. A kernel initialises a table of them."""

    name: str
    number: int
    arrivals: int  # a phase
    arrives: str  # who, and with how many arrivals each
    waits: str
    means: str  # what is true once a phase is complete


class TmemMap(NamedTuple):
    """First columns. Lane = row of the tile."""

    scores: tuple[int, ...]  # float32, TILE_N columns for each place of S
    weights: tuple[int, ...]  # 16 bit, two a column, over the second half of each place
    out: tuple[int, ...]  # float32, v_columns for each Q tile
    end: int  # one past the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmemPlan:
    """Shared memory of a CTA: its tiles of Q, O beside or over them, the ring of K and V, statistics, barriers.

    Head dims are padded ones of 16-bit elements. A CTA of a pair holds half of each block: half of K's keys, and half
    of V's columns. `barriers`: all but the two of each slot.
    """

    columns: int
    v_columns: int
    q_tiles: int
    cta_group: int
    out_over_q: bool  # O leaves through the bytes of Q
    out_by_tma: bool  # else O doesn't come here
    is_dynamic: bool  # which tile is next is told here
    barriers: int
    kv_stages: int

    @property
    def q_bytes(self) -> int:
        """Of the tiles of Q."""
        return self.q_tiles * TILE_ROWS * self.columns * 2

    @property
    def q_room(self) -> int:
        """Bytes for Q, and for O."""
        out = self.q_tiles * TILE_ROWS * self.v_columns * 2 if self.out_by_tma else 0
        return max(self.q_bytes, out) if self.out_over_q else self.q_bytes + out

    @property
    def k_bytes(self) -> int:
        """Of a block of K."""
        return TILE_N // self.cta_group * self.columns * 2

    @property
    def v_bytes(self) -> int:
        """Of a block of V."""
        return TILE_N * self.v_columns // self.cta_group * 2

    @property
    def kv_is_uneven(self) -> bool:
        """Whether a slot is as large as what it holds: K and V in turn, of different sizes.

        Where three slots for the larger one don't fit, three that hold K V K in one round and V K V in the next may.
        """
        even = self.q_room + self.kv_stages * max(self.k_bytes, self.v_bytes) + self.other_bytes
        return self.kv_stages == UNEVEN_KV_STAGES and self.k_bytes > self.v_bytes and even > SMEM_LIMIT

    @property
    def kv_bytes(self) -> int:
        """Of the ring."""
        if self.kv_is_uneven:
            return 2 * self.k_bytes + self.v_bytes
        return self.kv_stages * max(self.k_bytes, self.v_bytes)

    @property
    def other_bytes(self) -> int:
        """Statistics, the next tile, barriers and the address of tensor memory."""
        statistics = (SCORES + self.q_tiles) * TILE_ROWS * 4  # factors for earlier output, and those at the end
        response = RESPONSE_BYTES if self.is_dynamic else 0
        return statistics + response + (self.barriers + 2 * self.kv_stages) * MBARRIER_BYTES + TMEM_ADDRESS_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        return self.q_room + self.kv_bytes + self.other_bytes

    @property
    def most_kv_stages(self) -> int:
        """Slots for K and V that fit, instead of `kv_stages`; 0 or 1 are too few."""
        plans = (dataclasses.replace(self, kv_stages=n) for n in range(MAX_KV_STAGES, 0, -1))
        return next((plan.kv_stages for plan in plans if plan.total <= SMEM_LIMIT), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSm100Config(KernelConfig):
    """The forward of sm_100a and sm_103a: a CTA of 16 warps owns one or two tiles of 128 queries of one head.

    With `cta_group=2` two CTAs multiply as one: each has query tiles of its own, half the keys of a block of K and
    half the columns of one of V, and `tile_m` counts the queries of both. A lone query tile has two places for S, so
    that the next block is multiplied while softmax works on this one.

    K and V blocks share a ring of `kv_stages`. Registers are those of a thread, by role; all warps that are neither
    softmax nor correction have the same. Of every `exp2_period` weights in 32 columns, the last four are computed by a
    polynomial in place of the special-function unit, from fragment `exp2_first` on and never in the last; 0: none.
    `schedule`: a CTA computes a single tile; or, persistent, one after the other: every n-th of a static order or,
    dynamic, those of CTAs that have not started (cluster launch control). O has room of its own then, so that the next
    tile begins meanwhile.
    Unless `out_by_tma` the correction warps store O themselves, each row where it belongs.
    Raises ValueError where shared memory, tensor memory or registers forbid it.
    """

    softmax_registers: int
    correction_registers: int
    other_registers: int
    cta_group: Literal[1, 2] = 1
    exp2_first: int = 0
    schedule: Schedule = "single"
    out_by_tma: bool = True

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch must be {' or '.join(ARCHS)}, got {self.arch}")
        self._check_call()
        if self.cta_group not in (1, 2):
            raise ValueError(f"cta_group must be 1 or 2, got {self.cta_group}")
        rows = [self.cta_group * n * TILE_ROWS for n in Q_TILES]
        if self.tile_m not in rows or self.tile_n != TILE_N:
            wanted = f"{rows[0]} or {rows[1]} x {TILE_N}"
            raise ValueError(f"tiles must be {wanted}, got {self.tile_m} x {self.tile_n}")
        if self.cta_group == 2 and self.has_kv_lengths:
            raise ValueError("cta_group=2 takes no kv_lengths: half of what lies beyond them is in the other CTA")
        if self.schedule not in ("single", "static", "dynamic"):
            raise ValueError(f"schedule must be single, static or dynamic, got {self.schedule}")
        if self.schedule == "static" and self.visits_differ:
            raise ValueError("schedule=static takes tiles that all visit the same keys: no window, lengths or segments")
        if self.is_persistent and self.has_kv_lengths:
            raise ValueError(f"schedule={self.schedule} takes no kv_lengths: which slot to clear is unknown")
        if self.kv_stages < 2:
            raise ValueError(f"kv_stages must be at least 2, one for K and one for V, got {self.kv_stages}")
        self._check_smem()
        if self.tmem.end > TMEM_COLUMNS:
            raise ValueError(f"head_dim_v={self.head_dim_v} needs {self.tmem.end} columns, {TMEM_COLUMNS} exist")
        registers = [getattr(self, f"{name}_registers") for name in ("softmax", "correction", "other")]
        if any(n % REGISTER_STEP for n in registers):
            raise ValueError(f"registers must be multiples of {REGISTER_STEP}, got {registers}")
        softmax, correction, other = registers
        total = (softmax + self.second_softmax_registers + correction + other) * WARPGROUP_WARPS * WARP
        if total > REGISTER_FILE:
            raise ValueError(f"registers {registers} take {total} of a CTA, {REGISTER_FILE} exist")
        if self.exp2_period and self.exp2_period not in range(4, WARP + 1, 2):
            raise ValueError(f"exp2_period must be 0 or an even number from 4 to {WARP}, got {self.exp2_period}")

    @property
    def map_rows(self) -> int:
        """Rows of Q and O that one tensor copy moves."""
        return TILE_ROWS

    @property
    def q_tiles(self) -> int:
        """Tiles of 128 queries of a CTA."""
        return self.tile_m // (self.cta_group * TILE_ROWS)

    @property
    def waits_for_schedule(self) -> bool:
        """It starts behind the kernel that lists its tiles."""
        return False

    @property
    def cluster_ctas(self) -> int:
        """CTAs that compute a tile together."""
        return self.cta_group

    @property
    def walks(self) -> bool:
        """Whether a CTA computes tiles of a static order, so that the grid is as many CTAs as run at a time."""
        return self.schedule == "static"

    @property
    def is_persistent(self) -> bool:
        """Whether a CTA computes tile after tile."""
        return self.schedule != "single"

    @property
    def is_dynamic(self) -> bool:
        """Whether the hardware says which tile is next."""
        return self.schedule == "dynamic"

    @property
    def launch_registers(self) -> int:
        """Of each thread when the CTA starts."""
        return REGISTER_FILE // self.threads

    @property
    def second_softmax_registers(self) -> int:
        """Of a thread of the warps for the second query tile; they are idle where there is none."""
        return self.softmax_registers if self.q_tiles == 2 else IDLE_REGISTERS

    @property
    def v_columns(self) -> int:
        """Of V and O: head_dim_v, padded to what a product of a pair can halve."""
        return round_up(self.head_dim_v, MMA_COLUMNS * self.cta_group)

    @property
    def k_rows(self) -> int:
        """Keys of a block of K that a CTA holds."""
        return self.tile_n // self.cta_group

    @property
    def v_part_columns(self) -> int:
        """Columns of a block of V that a CTA holds."""
        return self.v_columns // self.cta_group

    @property
    def load_warps(self) -> int:
        """Warps that load."""
        return 1

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return THREADS

    @property
    def mma_depth(self) -> int:
        """Columns that one instruction contracts."""
        return MMA_COLUMNS

    @property
    def longest_first(self) -> bool:
        """Tiles differ in length only where the mask has a right edge and no left one."""
        return self.has_right and not self.has_left

    @property
    def smem(self) -> SmemPlan:
        """Where shared memory goes."""
        return SmemPlan(
            columns=self.columns,
            v_columns=self.v_columns,
            q_tiles=self.q_tiles,
            cta_group=self.cta_group,
            out_over_q=not self.is_persistent,
            is_dynamic=self.is_dynamic,
            out_by_tma=self.out_by_tma,
            barriers=sum(barrier.number for barrier in self.barriers if not barrier.name.startswith("kv.")),
            kv_stages=self.kv_stages,
        )

    def fitted(self) -> Self:
        """The same with as many slots for K and V as shared memory has room for."""
        return dataclasses.replace(self, kv_stages=self.smem.most_kv_stages)

    @property
    def q_bytes(self) -> int:
        """Of a CTA's tiles of Q."""
        return self.smem.q_bytes

    @property
    def k_bytes(self) -> int:
        """Of a block of K in one CTA."""
        return self.smem.k_bytes

    @property
    def v_bytes(self) -> int:
        """Of a block of V in one CTA."""
        return self.smem.v_bytes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.smem.total

    @property
    def tile_readers(self) -> int:
        """Warps that are told of the next tile; of a pair, one CTA multiplies."""
        others = 3 if self.out_by_tma else 2  # epilogue, load, schedule
        return self.cta_group * ((self.q_tiles + 1) * WARPGROUP_WARPS + others) + 1

    @property
    def out_offset(self) -> int:
        """Bytes from Q to O: O goes over Q, which no product reads any more then, unless the next Q is there."""
        return self.q_bytes if self.is_persistent else 0

    @property
    def visits_differ(self) -> bool:
        """Whether some tile may visit other keys than the next one."""
        edges = self.has_left or self.has_right or self.has_segments
        return edges or self.has_q_lengths or self.has_kv_lengths or self.has_cu_seqlens

    @property
    def row_step(self) -> None:
        """Tiles of packed sequences start at multiples of tile_m."""

    @property
    def kv_stage_bytes(self) -> int:
        """From one slot to the next; the middle one of an uneven ring lies half the difference further or nearer."""
        sizes = (self.k_bytes, self.v_bytes)
        return sum(sizes) // 2 if self.smem.kv_is_uneven else max(sizes)

    @property
    def kv_shift_bytes(self) -> int:
        """By which the middle slot of an uneven ring lies further, in a round that it holds V, or nearer."""
        return (self.k_bytes - self.v_bytes) // 2 if self.smem.kv_is_uneven else 0

    @property
    def tmem(self) -> TmemMap:
        """The column map: two places for S, then O of each query tile; P over the second half of its S."""
        scores = tuple(i * TILE_N for i in range(SCORES))
        first = SCORES * TILE_N
        return TmemMap(
            scores=scores,
            weights=tuple(column + TILE_N // 2 for column in scores),
            out=tuple(first + i * self.v_columns for i in range(self.q_tiles)),
            end=first + self.q_tiles * self.v_columns,
        )

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order; a schedule is the last."""
        if self.out_by_tma:
            return super().params
        named = {param.name: param for param in super().params}
        schedule = [param for name in ("q_schedule",) if (param := named.pop(name, None))]
        shape: tuple[Extent, ...] = ("batch", "q_len", "q_heads", "head_dim_v")
        rows = {param.name: param for param in rows_of("out", self.dtype, shape)}
        before = {name: named.pop(name) for name in ("q", "k", "v")}
        others = {name: param for name, param in named.items() if name not in rows}
        return (*before.values(), *rows.values(), *others.values(), *schedule)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier, in the order of shared memory."""
        tiles, stages, places = self.q_tiles, self.kv_stages, SCORES
        warps, of_both = WARPGROUP_WARPS * self.cta_group, " of both CTAs" if self.cta_group == 2 else ""
        bytes_of, over_q = f"load (1 + bytes{of_both})", "" if self.is_persistent else ", over Q"
        softmax, correction = "softmax (1 a warp)", "correction (1 a warp)"
        both = f"softmax and correction{of_both} (1 a warp, {2 * warps})"
        if tiles == 2:
            s_full, o_full = (
                "S is in tensor memory, and O complete but for it",
                "O is complete, and Q is not read any more",
            )
        else:
            s_full, o_full = (
                "S is in tensor memory",
                "O is complete up to this block, and Q is not read behind the last",
            )
        table = [
            Barrier("q.full", tiles, 1, bytes_of, "mma", "the Q tile is in smem"),
            Barrier("kv.full", stages, 1, bytes_of, "mma", "a block of K or V is in the slot"),
            Barrier("kv.empty", stages, 1, "mma (commit)", "load", "every product that reads the slot is complete"),
            Barrier("s.full", places, 1, "mma (commit)", "softmax", s_full),
            Barrier(
                "p.full",
                places,
                2 * warps,
                both,
                "mma",
                f"{EARLY_WEIGHTS} columns of P are written, O is rescaled for them",
            ),
            Barrier(
                "p.last",
                places,
                warps,
                f"softmax{of_both} (1 a warp)",
                "mma",
                "the other columns of P are written, S is read",
            ),
            Barrier("stats", places, 4, softmax, "correction", "the factors for O of this block are in smem"),
            Barrier("total", tiles, 4, softmax, "correction", "the factors that normalise O are in smem"),
            Barrier("o.full", tiles, 1, "mma (commit)", "correction", o_full),
        ]
        if self.out_by_tma:
            table.append(Barrier("out.full", tiles, 4, correction, "epilogue", f"the rounded O is in smem{over_q}"))
        if self.is_dynamic:
            table += [
                Barrier("tile.full", 1, 1, "schedule (1 + bytes)", "all", "which tile is next is in smem"),
                Barrier("tile.empty", 1, self.tile_readers, f"all{of_both} (1 a warp)", "schedule", "all have read it"),
            ]
        if self.is_persistent:
            table += [
                Barrier("q.empty", tiles, 1, "mma (commit)", "load", "every product that reads the Q tile is complete"),
                Barrier("total.empty", tiles, 4, correction, "softmax", "the factors that normalise O are read"),
            ]
        if self.is_persistent and self.out_by_tma:
            table.append(Barrier("out.empty", tiles, 1, "epilogue (1)", "correction", "the rounded O has left smem"))
        table.append(Barrier("tmem.idle", 1, 4, correction, "mma", "nobody uses tensor memory: it may be freed"))
        return tuple(table)
