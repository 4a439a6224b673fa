"""Instruction descriptors of tcgen05.mma: known words, and every rule that rejects one."""

import pytest

from jax_fa4.emulator.layout import instruction, number


def word(m=128, n=128, a=1, b=1, accumulator=1, extra=0):
    return accumulator << 4 | a << 7 | b << 10 | (n >> 3) << 17 | (m >> 4) << 24 | extra


@pytest.mark.parametrize(
    ("bits", "m", "majors", "cta_group"),
    [
        (0x08200490, 128, (False, False), 1),
        (0x08210490, 128, (False, True), 1),
        (0x10200490, 256, (False, False), 2),
        (0x10210490, 256, (False, True), 2),
        (0x08218490, 128, (True, True), 2),
    ],
)
def test_words_of_known_kernels(bits, m, majors, cta_group):
    d = instruction.decode(bits, "f16", cta_group)
    assert (d.m, d.n, d.a, d.b, d.accumulator) == (m, 128, number.BF16, number.BF16, "f32")
    assert (d.a_mn_major, d.b_mn_major) == majors
    assert not d.negate_a
    assert not d.negate_b


def test_types_depend_on_the_kind():
    assert instruction.decode(word(a=0, b=0), "f16", 1).a is number.F16
    assert instruction.decode(word(a=2, b=2), "tf32", 1).b is number.TF32
    mixed = instruction.decode(word(a=0, b=1), "f8f6f4", 1)
    assert (mixed.a, mixed.b) == (number.E4M3, number.E5M2)


def test_signs_and_a_float16_accumulator():
    d = instruction.decode(word(accumulator=0, extra=1 << 13 | 1 << 14), "f16", 1)
    assert (d.negate_a, d.negate_b, d.accumulator) == (True, True, "f16")


@pytest.mark.parametrize(("m", "n", "cta_group"), [(64, 8, 1), (64, 248, 1), (128, 16, 1), (128, 256, 2), (256, 16, 2)])
def test_extreme_shapes_are_legal(m, n, cta_group):
    d = instruction.decode(word(m=m, n=n), "f16", cta_group)
    assert (d.m, d.n) == (m, n)


@pytest.mark.parametrize(
    ("bits", "kind", "cta_group", "message"),
    [
        (word(m=256), "f16", 1, "M is 256"),
        (word(m=64), "f16", 2, "M is 64"),
        (word(m=192), "f16", 2, "M is 192"),
        (word(n=0), "f16", 1, "N is 0"),
        (word(n=264), "f16", 1, "N is 264"),
        (word(n=24), "f16", 1, "N is 24, a multiple of 16"),
        (word(n=24, m=256), "f16", 2, "N is 24"),
        (word(n=16, a=0, b=0, extra=1 << 16), "f8f6f4", 2, "N is 16"),
        (word(a=2), "f16", 1, "operand A has type code 2, kind::f16"),
        (word(b=0), "tf32", 1, "operand A has type code 1, kind::tf32"),
        (word(a=5), "f8f6f4", 1, "e2m1, which is not modelled"),
        (word(accumulator=2), "f16", 1, "accumulator code 2"),
        (word(accumulator=0, a=2, b=2), "tf32", 1, "accumulator code 0"),
        (word(extra=1 << 2), "f16", 1, "bit 2 set"),
        (word(extra=1 << 3), "f16", 1, "bit 3 set"),
        (word(extra=1 << 29), "f16", 1, "bit 29 set"),
        (word(extra=1 << 31), "f16", 1, "bit 31 set"),
    ],
)
def test_illegal_words_are_reported(bits, kind, cta_group, message):
    with pytest.raises(ValueError, match=message):
        instruction.decode(bits, kind, cta_group)
