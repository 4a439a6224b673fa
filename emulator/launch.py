"""What a launch is made of: grid, block, cluster, shared memory and the kernel's parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "Launch", "Options", "Parameter", "Struct", "TensorMap"]

Extent3 = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """A pointer parameter: the address of a C-contiguous array, which the kernel may change in place.

    Two parameters that hold the same array object share one piece of global memory. `offset` is in bytes.
    """

    array: npt.NDArray[Any]
    offset: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TensorMap:
    """A `CUtensorMap` parameter, as given to the driver's encoder.

    Attributes:
      buffer: where the tensor lies; its offset is the tensor's start.
      dtype: "f16", "bf16", "f32", "tf32", "f64", "u8", "u16", "u32", "s32", "u64" or "s64".
      dims: extents, innermost first.
      strides: bytes, for all dimensions but the innermost.
      box: extents of a tile in elements, innermost first.
      element_strides: steps inside a tile; all ones if None.
      swizzle: how the tile's bytes are permuted in shared memory.
      oob_fill: what loads write outside of the tensor.
    """

    buffer: Buffer
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: Literal["none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B"] = "none"
    oob_fill: Literal["zero", "nan"] = "zero"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Struct:
    """A struct parameter of `size` bytes: (offset, value) of its fields; bytes between them are zero."""

    size: int
    fields: tuple[tuple[int, bytes | Buffer], ...]


Parameter = bytes | Buffer | TensorMap | Struct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch; `params` in the order of the entry's parameters, `smem_bytes` is the dynamic shared memory."""

    grid: Extent3
    block: Extent3 | int
    params: tuple[Parameter, ...]
    cluster: Extent3 = (1, 1, 1)
    smem_bytes: int = 0

    @property
    def block_extent(self) -> Extent3:
        """The block as three extents."""
        return (self.block, 1, 1) if isinstance(self.block, int) else self.block

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return int(np.prod(self.block_extent))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a launch.

    Attributes:
      completion: when asynchronous operations complete, see `schedule`.
      order: warps in turn ("round_robin") or in a seeded random order with random slices ("random").
      seed: of everything random.
      strict: also raise for hazards that known-good kernels tolerate.
      allow_unwaited_stores: let a CTA end with bulk stores that nobody waited for: the text forbids it, but a public
        kernel that is known to work ends so.
      exact_mma: matrix units bit by bit as measured, instead of one float32 matrix product an instruction.
      check_races: keep shadow memory and vector clocks of shared and tensor memory.
      resident_clusters: how many clusters run at a time.
      max_steps: a warp that has used up slices of more than this many steps is taken to be in an endless loop.
      record_timeline: keep events for `timeline`.
    """

    completion: Literal["early", "late", "random"] = "late"
    order: Literal["round_robin", "random"] = "round_robin"
    seed: int = 0
    strict: bool = False
    allow_unwaited_stores: bool = False
    exact_mma: bool = False
    check_races: bool = True
    resident_clusters: int = 1
    max_steps: int = 100_000_000
    record_timeline: bool = False
