"""Shared-memory matrix descriptors of wgmma and tcgen05, PTX ISA 9.7.15 and 9.7.16: 64 bits -> every element's address.

An MMA reads `rows` (M or N) times 32 bytes of K. Both majors are walks over 8 x 16-byte core matrices:

    K-major    a row's 16 bytes are neighbours in K;  core matrices follow each other by SBO along the rows
    MN-major   the 16 bytes are neighbours in M or N; LBO leads along the rows and SBO along K, unswizzled the reverse
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jax_fa4.emulator.layout import swizzle
from jax_fa4.emulator.layout.swizzle import Addresses, Swizzle

__all__ = ["K_BYTES", "Access", "MatrixDescriptor", "access", "decode_tcgen05", "decode_wgmma", "element_addresses"]

K_BYTES = 32  # of K that one wgmma or tcgen05.mma reads, whatever the element type

WGMMA_SWIZZLES = {0: swizzle.NONE, 1: swizzle.B128, 2: swizzle.B64, 3: swizzle.B32}
TCGEN05_SWIZZLES = {0: swizzle.NONE, 1: swizzle.B128_ATOM_32B, 2: swizzle.B128, 4: swizzle.B64, 6: swizzle.B32}
TCGEN05_VERSION = 1  # in bits 46-48


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixDescriptor:
    """Where one operand matrix starts in the CTA's shared memory and how its core matrices follow each other."""

    start: int  # byte offset, a multiple of 16
    leading_bytes: int  # LBO
    stride_bytes: int  # SBO
    swizzle: Swizzle


def _field(bits: int, low: int, width: int) -> int:
    return bits >> low & ((1 << width) - 1)


def _decode(bits: int, mode: Swizzle) -> MatrixDescriptor:
    if base_offset := _field(bits, 49, 3):
        raise ValueError(f"matrix descriptor {bits:#018x} has base offset {base_offset}; only 0 is modelled")
    return MatrixDescriptor(
        start=_field(bits, 0, 14) << 4,
        leading_bytes=_field(bits, 16, 14) << 4,
        stride_bytes=_field(bits, 32, 14) << 4,
        swizzle=mode,
    )


def _reject_reserved(bits: int, fields: tuple[tuple[int, int], ...]) -> None:
    for low, width in fields:
        if _field(bits, low, width):
            raise ValueError(f"matrix descriptor {bits:#018x} has reserved bits {low}-{low + width - 1} set")


@functools.lru_cache(maxsize=4096)
def decode_wgmma(bits: int) -> MatrixDescriptor:
    """The descriptor of wgmma. Raises ValueError for reserved bits and for a base offset."""
    _reject_reserved(bits, ((14, 2), (30, 2), (46, 3), (52, 10)))
    return _decode(bits, WGMMA_SWIZZLES[_field(bits, 62, 2)])


@functools.lru_cache(maxsize=4096)
def decode_tcgen05(bits: int) -> MatrixDescriptor:
    """The descriptor of tcgen05.mma and .cp. Raises ValueError for a wrong version, layout code or reserved bit."""
    _reject_reserved(bits, ((14, 2), (30, 2), (53, 8)))
    if (version := _field(bits, 46, 3)) != TCGEN05_VERSION:
        raise ValueError(f"matrix descriptor {bits:#018x} has version {version}, tcgen05 wants {TCGEN05_VERSION}")
    if _field(bits, 52, 1):
        raise ValueError(f"matrix descriptor {bits:#018x} has an absolute leading offset (bit 52), which sm_100a lacks")
    code = _field(bits, 61, 3)
    if code not in TCGEN05_SWIZZLES:
        raise ValueError(f"matrix descriptor {bits:#018x} has layout code {code}, which is reserved")
    return _decode(bits, TCGEN05_SWIZZLES[code])


def _k_major(d: MatrixDescriptor, x: Addresses, k: Addresses, size: int) -> Addresses:
    """LBO counts only without a swizzle: a swizzled row holds all 32 bytes of K."""
    per_chunk = 16 // size
    along_k = k // per_chunk * (d.leading_bytes if d.swizzle is swizzle.NONE else 16) + k % per_chunk * size
    return x % 8 * d.swizzle.span_bytes + x // 8 * d.stride_bytes + along_k


def _mn_major(d: MatrixDescriptor, x: Addresses, k: Addresses, size: int) -> Addresses:
    mode, per_span = d.swizzle, d.swizzle.span_bytes // size
    along_x, along_k = d.leading_bytes, d.stride_bytes
    if mode is swizzle.NONE:
        along_x, along_k = along_k, along_x
    k_rows = 4 if mode is swizzle.B128_ATOM_32B else 8  # rows of K in one core matrix
    return x % per_span * size + x // per_span * along_x + k % k_rows * mode.span_bytes + k // k_rows * along_k


@functools.lru_cache(maxsize=1024)
def element_addresses(descriptor: MatrixDescriptor, *, rows: int, element_bytes: int, mn_major: bool) -> Addresses:
    """Byte offset in the CTA's shared memory of element (row, k): int64 [rows, 32 / element_bytes], read-only.

    Raises ValueError for a pair of major and swizzle that no MMA reads.
    """
    atom_32b = descriptor.swizzle is swizzle.B128_ATOM_32B
    if atom_32b != (mn_major and element_bytes == 4):
        raise ValueError(
            f"a {'MN' if mn_major else 'K'}-major matrix of {element_bytes}-byte elements "
            f"can't have {'128-byte swizzle with 32-byte atoms' if atom_32b else 'this swizzle'}"
        )
    x = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(K_BYTES // element_bytes, dtype=np.int64)[None, :]
    walk = _mn_major if mn_major else _k_major
    addresses = descriptor.swizzle(descriptor.start + walk(descriptor, x, k, element_bytes))
    addresses.flags.writeable = False
    return addresses


class Access(NamedTuple):
    """What an MMA reads of a matrix, ready for indexing."""

    elements: Addresses  # [rows, 32 / element_bytes]: numbers of elements, counted from the start of shared memory
    words: Addresses  # the 32-bit words touched, ascending, each once
    first_byte: int
    end_byte: int


@functools.lru_cache(maxsize=1024)
def access(descriptor: MatrixDescriptor, *, rows: int, element_bytes: int, mn_major: bool) -> Access:
    """The elements of one operand and the memory that they cover. Raises ValueError as `element_addresses`."""
    addresses = element_addresses(descriptor, rows=rows, element_bytes=element_bytes, mn_major=mn_major)
    words = np.unique(addresses >> 2)
    for array in (elements := addresses // element_bytes, words):
        array.flags.writeable = False
    return Access(elements, words, int(words[0]) << 2, int(words[-1] + 1) << 2)
