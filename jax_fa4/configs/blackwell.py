"""All that a Blackwell forward kernel is compiled from, and what follows: roles, tensor memory, barriers, smem."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_fa4.configs.config import MBARRIER_BYTES, REGISTER_FILE, REGISTER_STEP, SMEM_LIMIT, KernelConfig
from jax_fa4.configs.decode import strides
from jax_fa4.configs.params import Extent, KernelParam, PointerParam

__all__ = ["ROLES", "Barrier", "ForwardSm100Config", "Role", "TmemMap", "kv_stages_that_fit"]

ARCHS = ("sm_100a", "sm_103a")
WARP = 32
THREADS = 512
Q_TILES = 2  # of a CTA at most, computed in turn
TILE_ROWS = 128  # queries of one, a lane of tensor memory each
TILE_N = 128  # keys of a block
WARPGROUP_WARPS = 4
TMEM_COLUMNS = 512  # of 32 bits, all that an SM has
EARLY_WEIGHTS = 96  # columns of P with which its product begins; the rest follows behind
MAX_HEAD_DIM = 192
MAX_KV_STAGES = 32
UNEVEN_KV_STAGES = 3  # K V K, then V K V: slots of two sizes
STATISTICS = 2  # a row: the factor for earlier output, and the one at the end
TMEM_ADDRESS_BYTES = 8  # where the allocation tells its address; padded, for barriers follow


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
    Role("empty", 15, 1),
)


class Barrier(NamedTuple):
    """An mbarrier, or one for each Q tile or slot of a ring; a table of them is what a kernel initialises."""

    name: str
    number: int
    arrivals: int  # a phase
    arrives: str  # who, and with how many arrivals each
    waits: str
    means: str  # what is true once a phase is complete


class TmemMap(NamedTuple):
    """First columns, for each Q tile. Lane = row of the tile."""

    scores: tuple[int, ...]  # float32, TILE_N columns
    weights: tuple[int, ...]  # 16 bit, two a column, over the second half of the scores
    out: tuple[int, ...]  # float32, v_columns
    end: int  # one past the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSm100Config(KernelConfig):
    """The forward of sm_100a and sm_103a: a CTA of 16 warps owns two tiles of 128 queries of one head.

    K and V blocks share a ring of `kv_stages`. Registers are those of a thread, by role; all warps that are neither
    softmax nor correction have the same. Of every `exp2_period` weights of a row, four are computed by a polynomial
    in place of the special-function unit, from the 32-column fragment `exp2_first` on and never in the last; 0: none.
    `is_persistent`: a CTA computes tile after tile, and O has room of its own, so that the next tile begins meanwhile.
    Unless `out_by_tma` the correction warps store O themselves, each row where it belongs.
    Raises ValueError where shared memory, tensor memory or registers forbid it.
    """

    softmax_registers: int
    correction_registers: int
    other_registers: int
    exp2_period: int = 0
    exp2_first: int = 0
    is_persistent: bool = False
    out_by_tma: bool = True

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch must be {' or '.join(ARCHS)}, got {self.arch}")
        self._check_call()
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}")
        if self.tile_m not in (TILE_ROWS, Q_TILES * TILE_ROWS) or self.tile_n != TILE_N:
            wanted = f"{TILE_ROWS} or {Q_TILES * TILE_ROWS} x {TILE_N}"
            raise ValueError(f"tiles must be {wanted}, got {self.tile_m} x {self.tile_n}")
        if self.kv_stages < 2:
            raise ValueError(f"kv_stages must be at least 2, one for K and one for V, got {self.kv_stages}")
        self._check_smem()
        if self.tmem.end > TMEM_COLUMNS:
            raise ValueError(f"head_dim_v={self.head_dim_v} needs {self.tmem.end} columns, {TMEM_COLUMNS} exist")
        registers = [getattr(self, f"{name}_registers") for name in ("softmax", "correction", "other")]
        if any(n % REGISTER_STEP for n in registers):
            raise ValueError(f"registers must be multiples of {REGISTER_STEP}, got {registers}")
        softmax, correction, other = registers
        total = (2 * softmax + correction + other) * WARPGROUP_WARPS * WARP
        if total > REGISTER_FILE:
            raise ValueError(f"registers {registers} take {total} of a CTA, {REGISTER_FILE} exist")
        if self.is_persistent and self.visits_differ:
            raise ValueError("is_persistent takes tiles that all visit the same keys: no window, lengths or segments")
        if self.exp2_period and (self.exp2_period < 4 or WARP % self.exp2_period):
            raise ValueError(f"exp2_period must be 0, 4, 8, 16 or 32, got {self.exp2_period}")

    @property
    def map_rows(self) -> int:
        """Rows of Q and O that one tensor copy moves."""
        return TILE_ROWS

    @property
    def q_tiles(self) -> int:
        """Tiles of 128 queries that share the blocks of K and V: two, or one where a CTA has no more rows."""
        return self.tile_m // TILE_ROWS

    @property
    def load_warps(self) -> int:
        """Warps that load."""
        return 1

    @property
    def clears_values(self) -> bool:
        """Whether rows of V beyond a sequence come into shared memory, where they may be NaN."""
        return self.has_kv_lengths

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return THREADS

    @property
    def longest_first(self) -> bool:
        """Tiles differ in length only where the mask has a right edge and no left one."""
        return self.has_right and not self.has_left

    @property
    def q_room(self) -> int:
        """Bytes for both Q tiles, and for O if it doesn't leave through them."""
        return _q_room(self.columns, self.v_columns, self.q_tiles, is_persistent=self.is_persistent)

    @property
    def out_offset(self) -> int:
        """Bytes from Q to O: O goes over Q, which no product reads any more then, unless the next Q is there."""
        return self.q_bytes if self.is_persistent else 0

    @property
    def visits_differ(self) -> bool:
        """Whether some tile may visit other keys than the next one."""
        edges = self.has_left or self.has_right or self.has_segments
        return edges or self.has_q_lengths or self.has_kv_lengths

    @property
    def kv_is_uneven(self) -> bool:
        """Whether a slot is as large as what it holds: K and V in turn, of different sizes.

        Where three slots for the larger one don't fit, three that hold K V K in one round and V K V in the next may.
        """
        others = self.q_room + _other_bytes(self.kv_stages, self.q_tiles, is_persistent=self.is_persistent)
        return _is_uneven(others, self.k_bytes, self.v_bytes, self.kv_stages)

    @property
    def kv_stage_bytes(self) -> int:
        """From one slot to the next; the middle one of an uneven ring lies half the difference further or nearer."""
        return (self.k_bytes + self.v_bytes) // 2 if self.kv_is_uneven else max(self.k_bytes, self.v_bytes)

    @property
    def kv_shift_bytes(self) -> int:
        """By which the middle slot of an uneven ring lies further, in a round that it holds V, or nearer."""
        return (self.k_bytes - self.v_bytes) // 2 if self.kv_is_uneven else 0

    @property
    def kv_bytes(self) -> int:
        """Of the ring."""
        return _ring_bytes(self.k_bytes, self.v_bytes, self.kv_stages, uneven=self.kv_is_uneven)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return (
            self.q_room + self.kv_bytes + _other_bytes(self.kv_stages, self.q_tiles, is_persistent=self.is_persistent)
        )

    @property
    def tmem(self) -> TmemMap:
        """The column map: S0 S1 O0 O1, P over the second half of its S."""
        tiles = range(self.q_tiles)
        scores = tuple(i * TILE_N for i in tiles)
        first, out = self.q_tiles * TILE_N, self.v_columns
        return TmemMap(
            scores=scores,
            weights=tuple(column + TILE_N // 2 for column in scores),
            out=tuple(first + i * out for i in tiles),
            end=first + self.q_tiles * out,
        )

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""
        if self.out_by_tma:
            return super().params
        shape: tuple[Extent, ...] = ("batch", "q_len", "q_heads", "head_dim_v")
        address = PointerParam(name="out", dtype=self.dtype, dims=shape, pointee_align=16)
        params: list[KernelParam] = list(super().params)
        at = next(i for i, param in enumerate(params) if param.name == "out")
        return (*params[:at], address, *strides("out"), *params[at + 1 :])

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier, in the order of shared memory."""
        return _barriers(self.kv_stages, self.q_tiles, is_persistent=self.is_persistent)


def _barriers(kv_stages: int, q_tiles: int, *, is_persistent: bool) -> tuple[Barrier, ...]:
    tiles, stages = q_tiles, kv_stages
    both = f"softmax and correction (1 a warp, {2 * WARPGROUP_WARPS})"
    table = (
        Barrier("q.full", tiles, 1, "load (1 + bytes)", "mma", "the Q tile is in smem"),
        Barrier("kv.full", stages, 1, "load (1 + bytes)", "mma", "a block of K or V is in the slot"),
        Barrier("kv.empty", stages, 1, "mma (commit)", "load", "every product that reads the slot is complete"),
        Barrier("s.full", tiles, 1, "mma (commit)", "softmax", "S is in tensor memory, and O complete but for it"),
        Barrier("p.full", tiles, 8, both, "mma", f"{EARLY_WEIGHTS} columns of P are written, O is rescaled for them"),
        Barrier("p.last", tiles, 4, "softmax (1 a warp)", "mma", "the other columns of P are written, S is read"),
        Barrier("stats", tiles, 4, "softmax (1 a warp)", "correction", "the factors for O of this block are in smem"),
        Barrier("total", tiles, 4, "softmax (1 a warp)", "correction", "the factors that normalise O are in smem"),
        Barrier("o.full", tiles, 1, "mma (commit)", "correction", "O is complete, and Q is not read any more"),
        Barrier("out.full", tiles, 4, "correction (1 a warp)", "epilogue", "the rounded O is in smem, over Q"),
        Barrier("tmem.idle", 1, 4, "correction (1 a warp)", "mma", "nobody uses tensor memory: it may be freed"),
    )
    again = (
        Barrier("q.empty", tiles, 1, "mma (commit)", "load", "every product that reads the Q tile is complete"),
        Barrier("total.empty", tiles, 4, "correction (1 a warp)", "softmax", "the factors that normalise O are read"),
        Barrier("out.empty", tiles, 1, "epilogue (1)", "correction", "the rounded O has left smem"),
    )
    return (*table, *again) if is_persistent else table


def _ring_bytes(k_bytes: int, v_bytes: int, kv_stages: int, *, uneven: bool) -> int:
    return 2 * k_bytes + v_bytes if uneven else kv_stages * max(k_bytes, v_bytes)


def _q_room(columns: int, v_columns: int, q_tiles: int, *, is_persistent: bool) -> int:
    width = columns + v_columns if is_persistent else max(columns, v_columns)
    return q_tiles * TILE_ROWS * width * 2


def _other_bytes(kv_stages: int, q_tiles: int, *, is_persistent: bool) -> int:
    """Statistics, barriers and the address of tensor memory."""
    barriers = (
        sum(barrier.number for barrier in _barriers(kv_stages, q_tiles, is_persistent=is_persistent)) * MBARRIER_BYTES
    )
    return STATISTICS * q_tiles * TILE_ROWS * 4 + barriers + TMEM_ADDRESS_BYTES


def _is_uneven(other_bytes: int, k_bytes: int, v_bytes: int, kv_stages: int) -> bool:
    even = other_bytes + _ring_bytes(k_bytes, v_bytes, kv_stages, uneven=False)
    return kv_stages == UNEVEN_KV_STAGES and k_bytes > v_bytes and even > SMEM_LIMIT


def kv_stages_that_fit(columns: int, v_columns: int, *, q_tiles: int = Q_TILES, is_persistent: bool = False) -> int:
    """Slots for K and V beside the tiles of Q, for padded head dims of 16-bit elements; 0 or 1 are too few."""
    q_room = _q_room(columns, v_columns, q_tiles, is_persistent=is_persistent)
    k_bytes, v_bytes = (TILE_N * n * 2 for n in (columns, v_columns))

    def fits(kv_stages: int) -> bool:
        others = q_room + _other_bytes(kv_stages, q_tiles, is_persistent=is_persistent)
        uneven = _is_uneven(others, k_bytes, v_bytes, kv_stages)
        return others + _ring_bytes(k_bytes, v_bytes, kv_stages, uneven=uneven) <= SMEM_LIMIT

    return next((n for n in range(MAX_KV_STAGES, 0, -1) if fits(n)), 0)
