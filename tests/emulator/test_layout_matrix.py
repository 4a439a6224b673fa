"""Matrix descriptors against the ISA's canonical layouts (nested shapes and strides) and tiles that TMA writes."""

import itertools

import numpy as np
import pytest

from jax_fa4.emulator.layout import matrix, swizzle
from jax_fa4.emulator.layout.matrix import MatrixDescriptor
from jax_fa4.emulator.layout.tensor_map import TensorMap

SWIZZLES = {"none": swizzle.NONE, "32B": swizzle.B32, "64B": swizzle.B64, "128B": swizzle.B128}


def wgmma_bits(start, leading, stride, mode):
    code = {swizzle.NONE: 0, swizzle.B128: 1, swizzle.B64: 2, swizzle.B32: 3}[mode]
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62


def tcgen05_bits(start, leading, stride, mode):
    code = {swizzle.NONE: 0, swizzle.B128_ATOM_32B: 1, swizzle.B128: 2, swizzle.B64: 4, swizzle.B32: 6}[mode]
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | code << 61


def nested(index, modes):
    """Offset of an index under modes ((size, stride), ...), the first running fastest; the last has no bound."""
    offset = 0
    for size, stride in modes[:-1]:
        index, digit = divmod(index, size)
        offset += digit * stride
    return offset + index * modes[-1][1]


def canonical(mode, mn_major, t, lbo, sbo):
    """The ISA's canonical layouts in elements, t of them in 16 bytes: modes of the rows and modes of K."""
    u = mode.span_bytes // 16
    if not mn_major:
        k_step = lbo if mode is swizzle.NONE else t
        return ((8, u * t), (0, sbo)), ((t, 1), (0, k_step))
    if mode is swizzle.NONE:
        return ((t, 1), (0, sbo)), ((8, t), (0, lbo))
    return ((u * t, 1), (0, lbo)), ((8, u * t), (0, sbo))


@pytest.mark.parametrize(("element_bytes", "mn_major"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
@pytest.mark.parametrize("mode", SWIZZLES.values(), ids=SWIZZLES)
def test_addresses_follow_the_canonical_layout(mode, mn_major, element_bytes):
    start, lbo, sbo = 2048, 0x1400, 0x2800
    t = 16 // element_bytes
    row_modes, k_modes = canonical(mode, mn_major, t, lbo // element_bytes, sbo // element_bytes)
    addresses = matrix.element_addresses(
        MatrixDescriptor(start=start, leading_bytes=lbo, stride_bytes=sbo, swizzle=mode),
        rows=72,
        element_bytes=element_bytes,
        mn_major=mn_major,
    )
    assert addresses.shape == (72, 32 // element_bytes)
    for row, k in itertools.product(range(72), range(32 // element_bytes)):
        element = nested(row, row_modes) + nested(k, k_modes)
        assert addresses[row, k] == mode(np.array(start + element * element_bytes)), (row, k)


def tile_by_tma(rows, columns, mode, element_bytes, start):
    """Addresses [rows, columns] of a tile that TMA copies block by block, each as wide as the swizzle."""
    width = mode.span_bytes // element_bytes
    dtype = {1: "u8", 2: "bf16", 4: "f32"}[element_bytes]
    addresses = np.empty((rows, columns), np.int64)
    for block in range(columns // width):
        box = TensorMap(address=0, dtype=dtype, dims=(width, rows), strides=(1024,), box=(width, rows), swizzle=mode)
        units = 8 * box.units(start + block * box.box_bytes)[:, None]
        pieces = (units + np.arange(0, 8, element_bytes)).ravel()
        addresses[:, block * width : (block + 1) * width] = pieces.reshape(rows, width)
    return addresses


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("mode", [swizzle.B32, swizzle.B64, swizzle.B128], ids=["32B", "64B", "128B"])
def test_k_steps_inside_a_swizzled_tile_advance_by_32_bytes(mode, element_bytes):
    """A tile of 64 rows by 256 bytes of K: step by step through the atom, then on to the next block of columns."""
    start, k_elements = 4096, 32 // element_bytes
    tile = tile_by_tma(64, 256 // element_bytes, mode, element_bytes, start)
    for step in range(256 // 32):
        block, inside = divmod(step * 32, mode.span_bytes)
        first = start + block * 64 * mode.span_bytes + inside
        descriptor = matrix.decode_wgmma(wgmma_bits(first, 16, 8 * mode.span_bytes, mode))
        got = matrix.element_addresses(descriptor, rows=64, element_bytes=element_bytes, mn_major=False)
        assert (got == tile[:, step * k_elements : (step + 1) * k_elements]).all(), step


@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("mode", [swizzle.B32, swizzle.B64, swizzle.B128], ids=["32B", "64B", "128B"])
def test_a_tile_with_rows_of_k_is_read_mn_major(mode, element_bytes):
    """V as it lies in memory, [K rows, N columns]: LBO jumps to the next block of N, SBO to the next 8 rows of K."""
    start, k_elements = 8192, 32 // element_bytes
    tile = tile_by_tma(2 * k_elements, 256 // element_bytes, mode, element_bytes, start)
    block_bytes = 2 * k_elements * mode.span_bytes
    for step in range(2):
        first = start + step * k_elements * mode.span_bytes
        descriptor = matrix.decode_tcgen05(tcgen05_bits(first, block_bytes, 8 * mode.span_bytes, mode))
        rows = 256 // element_bytes
        got = matrix.element_addresses(descriptor, rows=rows, element_bytes=element_bytes, mn_major=True)
        assert (got == tile[step * k_elements : (step + 1) * k_elements].T).all(), step


def test_32_byte_atoms_serve_mn_major_words():
    """32 words of N in a row, 4 rows of K in a core matrix, which is what the tensor map with 32-byte atoms writes."""
    width, k_elements, start = 32, 8, 1024
    box = TensorMap(
        address=0, dtype="tf32", dims=(width, 8), strides=(1024,), box=(width, 8), swizzle=swizzle.B128_ATOM_32B
    )
    tile = (8 * box.units(start)[:, None] + np.array([0, 4])).reshape(8, width)
    descriptor = matrix.decode_tcgen05(tcgen05_bits(start, 4096, 512, swizzle.B128_ATOM_32B))
    got = matrix.element_addresses(descriptor, rows=width, element_bytes=4, mn_major=True)
    assert got.shape == (width, k_elements)
    assert (got == tile.T).all()


def test_fields_of_a_known_wgmma_descriptor():
    descriptor = matrix.decode_wgmma(0x4000004000010000 | 0x1234)
    assert descriptor == MatrixDescriptor(start=0x12340, leading_bytes=16, stride_bytes=1024, swizzle=swizzle.B128)


def test_fields_of_a_known_tcgen05_descriptor():
    descriptor = matrix.decode_tcgen05(0x4000404004000000 | 0x40)
    assert descriptor == MatrixDescriptor(start=0x400, leading_bytes=16384, stride_bytes=1024, swizzle=swizzle.B128)


@pytest.mark.parametrize("mode", SWIZZLES.values(), ids=SWIZZLES)
def test_both_encodings_say_the_same(mode):
    fields = (0x3C010, 0x2000, 0x1230, mode)
    assert matrix.decode_wgmma(wgmma_bits(*fields)) == matrix.decode_tcgen05(tcgen05_bits(*fields))


@pytest.mark.parametrize(
    ("decode", "bits", "message"),
    [
        (matrix.decode_wgmma, 1 << 49, "base offset 1"),
        (matrix.decode_wgmma, 1 << 14, "reserved bits 14-15"),
        (matrix.decode_wgmma, 1 << 46, "reserved bits 46-48"),
        (matrix.decode_wgmma, 1 << 60, "reserved bits 52-61"),
        (matrix.decode_tcgen05, 0, "version 0"),
        (matrix.decode_tcgen05, 1 << 47, "version 2"),
        (matrix.decode_tcgen05, 1 << 46 | 1 << 52, "absolute leading offset"),
        (matrix.decode_tcgen05, 1 << 46 | 3 << 61, "layout code 3"),
        (matrix.decode_tcgen05, 1 << 46 | 1 << 55, "reserved bits 53-60"),
    ],
)
def test_bits_that_must_be_zero_are_reported(decode, bits, message):
    with pytest.raises(ValueError, match=message):
        decode(bits)


@pytest.mark.parametrize(
    ("mode", "element_bytes", "mn_major"),
    [
        (swizzle.B128, 4, True),
        (swizzle.NONE, 4, True),
        (swizzle.B128_ATOM_32B, 2, True),
        (swizzle.B128_ATOM_32B, 4, False),
    ],
)
def test_majors_that_no_mma_reads_are_reported(mode, element_bytes, mn_major):
    descriptor = MatrixDescriptor(start=0, leading_bytes=16, stride_bytes=1024, swizzle=mode)
    with pytest.raises(ValueError, match="can't have"):
        matrix.element_addresses(descriptor, rows=64, element_bytes=element_bytes, mn_major=mn_major)
