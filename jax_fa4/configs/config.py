"""All that a kernel is compiled from, with the shared memory, registers and parameters that follow from it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_fa4.configs.features import feature_names, feature_params
from jax_fa4.configs.params import Extent, KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.configs.schedule import schedule_param

__all__ = [
    "ArrayConfig",
    "BlockConfig",
    "KernelConfig",
    "check_registers",
    "consumer_registers",
    "round_up",
    "rows_of",
    "swizzle_bytes",
]

HEAD_DIM_LIMIT = 256  # of q and k, and of v
SMEM_LIMIT = 227 * 1024  # bytes of shared memory a CTA may opt into, sm_90 and sm_100
REGISTER_FILE = 64 * 1024  # 32-bit registers of an SM
WARPGROUP = 128  # threads that issue a wgmma together
WARPGROUP_ROWS = 64  # query rows of a wgmma
SWIZZLE_BYTES = 128  # of one row of the widest shared memory atom
SMEM_ALIGNMENT = 1024  # bytes, of each tile and ring
MBARRIER_BYTES = 8
WORD_BYTES = 4
TILE_WORDS = 8  # that tell of a tile: five, padded
PACKED_WORDS = 16  # of one of a packed sequence: eight more, and which tile follows
REGISTER_STEP = 8  # setmaxnreg takes multiples of it
FEWEST_REGISTERS = 24  # of a thread that setmaxnreg leaves
REGISTER_LIMIT = 240  # a thread: 255 exist, setmaxnreg rounds down
PRODUCER_REGISTERS = {1: 56, 2: 24, 3: 32}  # a thread, by consumer warpgroups: the rest divides into REGISTER_STEPs
OTHER_REGISTERS = 32  # of a consumer thread beside its accumulators: statistics, descriptors, addresses, ring states
ROW_THREADS = 4  # that share a row of scores
MMA_COLUMNS = (
    16  # wgmma contracts over so many elements: head dims are padded to a multiple, with zeros that TMA fills in
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayConfig:
    """What every kernel knows of the arrays that it reads."""

    arch: str
    dtype: Literal["bfloat16", "float16"]
    head_dim: int
    head_dim_v: int

    def _check_call(self) -> None:
        """What every architecture demands of a call's types and extents."""
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be bfloat16 or float16, got {self.dtype}")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) % 8 or not 0 < getattr(self, name) <= HEAD_DIM_LIMIT:
                raise ValueError(f"{name} must be a multiple of 8 up to {HEAD_DIM_LIMIT}, got {getattr(self, name)}")

    @property
    def dims(self) -> str:
        """The head dims in a kernel's name."""
        return f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")

    @property
    def element_bytes(self) -> int:
        """Of every array but statistics and scratch."""
        return 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(ArrayConfig):
    """What forward kernels share: blocks of `tile_n` keys stand in a ring of `kv_stages` for K and another for V."""

    tile_n: int
    kv_stages: int
    has_left: bool = False
    has_right: bool = False
    has_q_offset: bool = False
    has_q_lengths: bool = False
    has_kv_lengths: bool = False
    has_cu_seqlens: bool = False

    @property
    def columns(self) -> int:
        """Of Q and K in shared memory: head_dim, padded."""
        return round_up(self.head_dim, MMA_COLUMNS)

    @property
    def v_columns(self) -> int:
        """Of V, and of O where that leaves through shared memory: head_dim_v, padded."""
        return round_up(self.head_dim_v, MMA_COLUMNS)

    @property
    def k_bytes(self) -> int:
        """Of one stage of the K ring."""
        return self.tile_n * self.columns * self.element_bytes

    @property
    def v_bytes(self) -> int:
        """Of one stage of the V ring."""
        return self.tile_n * self.v_columns * self.element_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig(BlockConfig):
    """One compiled kernel; no length, batch, head count, scale or window value is part of it.

    A CTA owns `tile_m` query rows of one head: 64 for each consumer warpgroup, besides one producer warpgroup. It walks
    over key blocks of `tile_n` keys, held in a ring of `kv_stages` for K and another for V. Where it is `persistent` a
    CTA computes tile after tile: with two `q_stages` the next one's queries arrive meanwhile and O leaves as a tile,
    with one they arrive during the last steps and O leaves row by row. `staggered`: how softmax orders a thread's rows;
    `exp2_period`: of so many weights of a row that a thread has, a polynomial computes one, or of 0 none (both in
    core/softmax.py). A consumer holds Q of the first `q_register_steps` steps of 16 columns in registers, so that
    products read less of shared memory. `tells_tiles`: the load warp finds which tile is next for the consumers, too.
    `scales_late`: a consumer scales O for new maxima beside the products of the next S, not before them.
    `trusts_maxima`: where nothing hides a key of a block, softmax doesn't ask whether a row has one.
    The flags say what a call has beside q, k and v. Raises ValueError where shared memory, registers or an instruction
    forbid it.
    """

    kernel: Literal["forward", "grouped", "decode"]
    tile_m: int
    q_stages: int = 1
    persistent: bool = False
    staggered: bool = False
    exp2_period: int = 0
    q_register_steps: int = 0
    tells_tiles: bool = True
    scales_late: bool = False
    trusts_maxima: bool = False
    has_segments: bool = False
    has_mask: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    bias: Literal["float32", "bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        if self.arch != "sm_90a":
            raise ValueError(f"arch must be sm_90a, got {self.arch}")
        self._check_call()
        if self.tile_m % WARPGROUP_ROWS or self.warpgroups not in PRODUCER_REGISTERS:
            raise ValueError(f"tile_m must be 64, 128 or 192, got {self.tile_m}")
        if not 0 <= self.q_register_steps <= self.columns // MMA_COLUMNS:
            raise ValueError(
                f"q_register_steps must be at most {self.columns // MMA_COLUMNS}, got {self.q_register_steps}"
            )
        if self.tile_n % 16 or not 0 < self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 up to 256, got {self.tile_n}")
        if self.exp2_period and self.exp2_period not in range(2, self.tile_n // ROW_THREADS + 1):
            raise ValueError(f"exp2_period must be 0 or from 2 to {self.tile_n // ROW_THREADS}, got {self.exp2_period}")
        self._check_smem()
        check_registers(self.threads, producer=self.producer_registers)
        needed = self.accumulator_registers + OTHER_REGISTERS
        if needed > self.consumer_registers:
            raise ValueError(
                f"tile_m={self.tile_m}, tile_n={self.tile_n}, head_dim_v={self.head_dim_v} need {needed} registers "
                f"a thread, {self.consumer_registers} exist"
            )

    def _check_call(self) -> None:
        super()._check_call()
        if self.bias not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"bias must be None, float32, bfloat16 or float16, got {self.bias}")

    def _check_smem(self) -> None:
        if self.kv_stages < 1:
            raise ValueError(f"kv_stages must be at least 1, got {self.kv_stages}")
        if self.q_stages not in (1, 2):
            raise ValueError(f"q_stages must be 1 or 2, got {self.q_stages}")
        if self.q_stages == 2 and not self.persistent:
            raise ValueError("q_stages=2 needs persistent=True: the second stage is for the next tile")
        if self.smem_bytes > SMEM_LIMIT:
            needs = " needs" if self.q_stages == 1 else f" and q_stages={self.q_stages} need"
            raise ValueError(f"kv_stages={self.kv_stages}{needs} {self.smem_bytes} bytes of smem, {SMEM_LIMIT} exist")

    @property
    def name(self) -> str:
        """What profilers show, but for a suffix."""
        return "_".join(["jax_fa4", self.kernel, self.arch, self.dtype, self.dims, *feature_names(self)])

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def map_rows(self) -> int:
        """Rows of Q and O that one tensor copy moves."""
        return WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Of a CTA, the producer warpgroup included."""
        return (1 + self.warpgroups) * WARPGROUP

    @property
    def producer_registers(self) -> int:
        """A thread of the producer warpgroup keeps so many."""
        return PRODUCER_REGISTERS[self.warpgroups]

    @property
    def consumer_registers(self) -> int:
        """A consumer thread gets so many: an equal part of what the producer leaves."""
        return consumer_registers(self.producer_registers, self.warpgroups)

    @property
    def accumulator_registers(self) -> int:
        """Of a consumer thread: scores and output in float32, weights and a part of Q in 16 bit."""
        columns = self.tile_n + self.v_columns + (self.tile_n + self.q_register_steps * MMA_COLUMNS) // 2
        return columns * WARPGROUP_ROWS // WARPGROUP

    @property
    def cluster_ctas(self) -> int:
        """CTAs that compute a tile together, and share its blocks of K and V."""
        return 1

    @property
    def walks(self) -> bool:
        """Whether a CTA computes tile after tile."""
        return self.persistent

    @property
    def k_rows(self) -> int:
        """Keys of a block of K that one of them holds."""
        return self.tile_n

    @property
    def v_part_columns(self) -> int:
        """Columns of a block of V that one of them holds."""
        return self.v_columns

    @property
    def q_slots(self) -> int:
        """Places in shared memory for a warpgroup's rows of Q, through which its O leaves."""
        return self.q_stages * self.warpgroups

    @property
    def q_bytes(self) -> int:
        """Of the Q tile."""
        return self.tile_m * self.columns * self.element_bytes

    @property
    def q_slot_bytes(self) -> int:
        """Of such a place, whichever is wider: Q or, where it leaves through it, O."""
        columns = max(self.columns, self.v_columns) if self.out_by_tma else self.columns
        return WARPGROUP_ROWS * columns * self.element_bytes

    @property
    def out_by_tma(self) -> bool:
        """O leaves through the slot of Q, which waits for it: where that is the only one, rows leave from registers."""
        return self.q_stages > 1 or not self.persistent

    @property
    def waits_for_schedule(self) -> bool:
        """Whether it may start beside the kernel that lists its tiles, and waits for its end."""
        return self.has_cu_seqlens

    @property
    def takes_tiles(self) -> bool:
        """Whether CTAs take tiles as they get to them, by the tickets of a schedule, rather than equal shares."""
        return self.persistent and self.has_cu_seqlens and self.tells_tiles and self.q_stages > 1

    @property
    def tile_places(self) -> int:
        """Tiles that shared memory tells of at a time: those whose Q may be there, and as many that are being read."""
        return 2 * self.q_stages if self.persistent else 1

    @property
    def tile_words(self) -> int:
        """32-bit words that it has for each of them."""
        return PACKED_WORDS if self.has_cu_seqlens else TILE_WORDS

    @property
    def tile_bytes(self) -> int:
        """Of all these words."""
        return self.tile_words * WORD_BYTES * self.tile_places

    @property
    def barrier_bytes(self) -> int:
        """A full and an empty barrier for each place of Q and each stage of both rings."""
        return 2 * (self.q_slots + 2 * self.kv_stages) * MBARRIER_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        rings = (round_up(self.kv_stages * stage, SMEM_ALIGNMENT) for stage in (self.k_bytes, self.v_bytes))
        return self.q_slots * self.q_slot_bytes + sum(rings) + self.tile_bytes + self.barrier_bytes

    @property
    def has_padding(self) -> bool:
        """Whether queries may be in no sequence."""
        return self.has_q_lengths or self.has_cu_seqlens

    @property
    def clears_values(self) -> bool:
        """Whether what lies in a block beyond the last key may be NaN."""
        return self.has_kv_lengths or self.has_cu_seqlens

    @property
    def row_step(self) -> int | None:
        """Of packed sequences: what tiles start at multiples of, if the one that is not full is a sequence's first."""
        return WARPGROUP_ROWS if self.partial_first else None

    @property
    def longest_first(self) -> bool:
        """With a right edge a head's later tiles see more keys, or, for a window, as many."""
        return self.has_right

    @property
    def partial_first(self) -> bool:
        """The tile that is not full sees the fewest keys then; `key_blocks` are of tiles that start at multiples."""
        return self.has_right and not self.has_segments

    @property
    def params(self) -> tuple[KernelParam, ...]:
        """The kernel's parameters, in order."""

        def tensor_map(name: str, dims: tuple[Extent, ...], rows: int, columns: int) -> MapParam:
            swizzle = swizzle_bytes(columns * self.element_bytes)
            box = (swizzle // self.element_bytes, rows, 1, 1)
            return MapParam(name=name, dtype=self.dtype, dims=dims, box=box, swizzle=swizzle)

        extents: tuple[Extent, ...] = ("q_len", "kv_len", "q_heads", "kv_heads", "batch")
        out_map = tensor_map("out", ("head_dim_v", "q_len", "q_heads", "batch"), self.map_rows, self.v_columns)
        out_rows = rows_of("out", self.dtype, ("batch", "q_len", "q_heads", "head_dim_v"))
        return (
            tensor_map("q", ("head_dim", "q_len", "q_heads", "batch"), self.map_rows, self.columns),
            tensor_map("k", ("head_dim", "kv_len", "kv_heads", "batch"), self.k_rows, self.columns),
            tensor_map("v", ("head_dim_v", "kv_len", "kv_heads", "batch"), self.tile_n, self.v_part_columns),
            *((out_map,) if self.out_by_tma else ()),
            PointerParam(name="lse", dtype="float32", dims=("batch", "q_heads", "q_len")),
            *((schedule_param("q"),) if self.has_cu_seqlens else ()),
            *(out_rows if self.has_cu_seqlens or not self.out_by_tma else ()),
            *feature_params(self, ranges="key_blocks", tiles="q_tiles"),
            *(ScalarParam(name=name) for name in extents),
        )


def rows_of(name: str, dtype: str, dims: tuple[Extent, ...]) -> tuple[PointerParam | ScalarParam, ...]:
    """An array whose rows a kernel also writes one by one: its address, and its strides."""
    steps = ("batch", "row", "head")
    return (
        PointerParam(name=name, dtype=dtype, dims=dims, pointee_align=16),
        *(
            ScalarParam(name=f"{name}_{step}_stride", dtype="int64", size=8, align=8)  # type: ignore[arg-type]
            for step in steps
        ),
    )


def consumer_registers(producer_registers: int, warpgroups: int) -> int:
    """A thread of so many consumer warpgroups gets so many: an equal part of what the producer's leave."""
    left = (REGISTER_FILE // WARPGROUP - producer_registers) // warpgroups
    return min(left // REGISTER_STEP * REGISTER_STEP, REGISTER_LIMIT)


def check_registers(threads: int, **kept: int) -> None:
    """Roles that give registers away must start with at least what they keep: else the instruction is illegal."""
    launch = REGISTER_FILE // threads // REGISTER_STEP * REGISTER_STEP
    for role, registers in kept.items():
        if registers > launch or registers % REGISTER_STEP or registers < FEWEST_REGISTERS:
            raise ValueError(
                f"{role}_registers must be a multiple of {REGISTER_STEP} from {FEWEST_REGISTERS} to {launch}, with "
                f"which {threads} threads start, got {registers}"
            )


def swizzle_bytes(row_bytes: int) -> int:
    """The widest pattern whose rows divide a tile's row."""
    return next(width for width in (SWIZZLE_BYTES, SWIZZLE_BYTES // 2, SWIZZLE_BYTES // 4) if row_bytes % width == 0)


def round_up(n: int, step: int) -> int:
    """The least multiple of `step` that is at least `n`."""
    return -(-n // step) * step
