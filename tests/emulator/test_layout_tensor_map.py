"""Boxes of tensor maps against loops over their elements."""

import itertools

import numpy as np
import pytest

from jax_fa4.emulator.layout import swizzle
from jax_fa4.emulator.layout.tensor_map import TensorMap

VALID = {"address": 0x1000, "dtype": "bf16", "dims": (64, 100), "strides": (128,), "box": (64, 8)}

TENSORS = {
    "1d": TensorMap(address=0, dtype="f32", dims=(100,), strides=(), box=(64,)),
    "2d": TensorMap(address=0, dtype="bf16", dims=(60, 7), strides=(128,), box=(64, 4)),
    "3d": TensorMap(address=0, dtype="u8", dims=(33, 5, 3), strides=(48, 240), box=(32, 3, 2)),
    "4d": TensorMap(address=0, dtype="f16", dims=(64, 3, 2, 2), strides=(256, 768, 128), box=(16, 2, 1, 2)),
    "5d": TensorMap(address=0, dtype="u32", dims=(8, 3, 2, 2, 3), strides=(32, 96, 192, 384), box=(4, 2, 2, 1, 2)),
    "steps": TensorMap(
        address=0, dtype="bf16", dims=(32, 9, 5), strides=(64, 576), box=(16, 7, 4), element_strides=(2, 3, 2)
    ),
}


def elements(tensor, coordinates):
    """(inside, byte offset) of each element in the order of the box: innermost dimension fastest."""
    steps = (1, *tensor.element_strides[1:])
    counts = [-(-b // s) for b, s in zip(tensor.box, steps, strict=True)]
    strides = (tensor.element_bytes, *tensor.strides)
    for index in itertools.product(*(range(c) for c in reversed(counts))):
        at = [c + i * s for c, i, s in zip(coordinates, reversed(index), steps, strict=True)]
        inside = all(0 <= a < d for a, d in zip(at, tensor.dims, strict=True))
        yield inside, sum(a * s for a, s in zip(at, strides, strict=True))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("corner", ["start", "negative", "end", "beyond"])
def test_a_box_holds_the_elements_at_its_coordinates(name, corner):
    tensor = TENSORS[name]
    shift = {"start": lambda d: 0, "negative": lambda d: -1, "end": lambda d: d - 1, "beyond": lambda d: d + 3}[corner]
    coordinates = tuple(shift(d) for d in tensor.dims)
    clip = tensor.clip(coordinates)
    inside = np.zeros(tensor.box_shape, bool)
    offsets = []
    if clip is not None:
        inside[clip.inside] = True
        steps = np.array(clip.strides)
        offsets = [clip.address + int(np.dot(index, steps)) for index in np.ndindex(clip.shape)]
    expected = list(elements(tensor, coordinates))
    assert list(inside.ravel()) == [is_inside for is_inside, _ in expected]
    assert offsets == [offset for is_inside, offset in expected if is_inside]


@pytest.mark.parametrize("name", TENSORS)
def test_the_bytes_signalled_are_those_of_the_whole_box(name):
    tensor = TENSORS[name]
    count = len(list(elements(tensor, (0,) * tensor.rank)))
    assert tensor.box_bytes == count * tensor.element_bytes
    assert np.prod(tensor.box_shape) == count


MODES = {name: swizzle.by_name(name) for name in swizzle.BY_NAME}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("start", [1024, 1152, 5 * 128])
def test_bytes_lie_where_the_swizzle_puts_their_linear_address(mode, start):
    width = mode.span_bytes // 2
    tensor = TensorMap(address=0, dtype="bf16", dims=(width, 99), strides=(256,), box=(width, 40), swizzle=mode)
    lowest = tensor.units(start)[:, None] * 8
    assert (np.sort(lowest + np.arange(8), axis=1).ravel() == mode(start + np.arange(tensor.box_bytes))).all()


def test_fill_is_zero_unless_asked_for_nan():
    assert TensorMap(**VALID).fill == 0


@pytest.mark.parametrize(("dtype", "bits"), [("f16", 0x7FF7), ("bf16", 0x7FF7), ("tf32", 0x7FF77FF7)])
def test_nan_fill_repeats_the_16_bits_that_hardware_writes(dtype, bits):
    assert TensorMap(**VALID | {"dtype": dtype, "box": (16, 1)}, fills_nan=True).fill == bits


@pytest.mark.parametrize(("dtype", "unsigned"), [("f16", "u2"), ("f32", "u4"), ("f64", "u8")])
def test_the_fill_is_a_nan_of_the_type(dtype, unsigned):
    fill = TensorMap(**VALID | {"dtype": dtype, "box": (8, 1)}, fills_nan=True).fill
    assert np.isnan(np.array(fill, unsigned).view(unsigned.replace("u", "f")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 0x1008}, "address 0x1008"),
        ({"dims": (64, 0)}, "dims"),
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (64,) + (1,) * 5}, "rank is 6"),
        ({"strides": ()}, "strides doesn't fit rank 2"),
        ({"strides": (120,)}, "multiples of 16"),
        ({"strides": (1 << 40,)}, "below"),
        ({"box": (64, 257)}, "box"),
        ({"box": (64, 0)}, "box"),
        ({"box": (4, 8)}, "inner box of 8 bytes is not a multiple of 16"),
        ({"box": (128, 8), "swizzle": swizzle.B128}, "exceeds the swizzle's span"),
        ({"box": (32, 8), "swizzle": swizzle.B128}, "pitch is undocumented"),
        ({"element_strides": (1, 9)}, "element strides"),
        ({"dtype": "u16", "fills_nan": True}, "NaN fill"),
    ],
)
def test_maps_that_the_driver_refuses_are_reported(change, message):
    with pytest.raises(ValueError, match=message):
        TensorMap(**(VALID | change))
