"""Moves, selections and address conversions, PTX ISA 9.7.9."""

from __future__ import annotations

import numpy as np

from jax_fa4.emulator.decode import Form, Pure, family, op
from jax_fa4.emulator.memory import LOCAL_WINDOW, SHARED_WINDOW
from jax_fa4.emulator.text.module import Vector

SELECTABLE = "{b16,b32,b64,u16,u32,u64,s16,s32,s64,f32,f64}"
CONTAINER = {16: "b16", 32: "b32", 64: "b64", 128: "b128", 1: "pred"}
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


@op(f"selp.{SELECTABLE}", "$1 = $1 $1 pred")
def selp(a, b, p):
    return np.where(p, a, b)


@op("slct.{b32,u32,s32,f32}.s32", "$1 = $1 $1 s32")
def slct(a, b, c):
    return np.where(c >= 0, a, b)


@family("mov")
def mov(form: Form) -> Pure:
    """Copies; with a vector on one side packs or unpacks, the first element lowest."""
    (kind,) = form.types()
    form.end()
    width = {"pred": 1}.get(kind) or int(kind[1:])
    destination, source = form.operands
    if isinstance(destination, Vector):
        return _unpack(form, destination, width)
    if isinstance(source, Vector):
        return _pack(form, source, width)
    return form.pure(_copy, [(form.dst(0, kind), kind)], [form.src(1, kind)])


def _copy(a):
    return a


def _pack(form: Form, source: Vector, width: int) -> Pure:
    part = width // len(source.items)
    outputs = [(form.dst(0, CONTAINER[width]), CONTAINER[width])]
    inputs = [form.src(item, CONTAINER[part]) for item in source.items]
    if width == 128:
        return form.pure(lambda low, high: np.stack([low, high]), outputs, inputs)
    dtype = UNSIGNED[width]
    if len(source.items) == 2:
        shift = dtype(part)
        return form.pure(lambda low, high: high.astype(dtype) << shift | low, outputs, inputs)

    def pack(*parts):
        return np.stack(parts, axis=1).reshape(-1).view(dtype)

    return form.pure(pack, outputs, inputs)


def _unpack(form: Form, destination: Vector, width: int) -> Pure:
    count = len(destination.items)
    part = width // count
    outputs = [(form.dst(item, CONTAINER[part]), CONTAINER[part]) for item in destination.items]
    inputs = [form.src(1, CONTAINER[width])]
    if width == 128:
        return form.pure(lambda a: (a[0], a[1]), outputs, inputs)
    dtype = UNSIGNED[part]
    if count == 1:
        return form.pure(_copy, outputs, inputs)
    if count == 2:
        return form.pure(lambda a: (a.view(dtype)[::2], a.view(dtype)[1::2]), outputs, inputs)
    return form.pure(lambda a: tuple(a.view(dtype).reshape(32, count).T), outputs, inputs)


@family("cvta")
def cvta(form: Form) -> Pure:
    """Between a state space's addresses and generic ones; global and parameter addresses are generic already."""
    towards = form.has("to")
    space = form.take("shared", "shared::cta", "shared::cluster", "global", "local", "param", "const")
    form.take("u64")
    form.end()
    base = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space.partition("::")[0], 0)
    delta = np.uint64((-base if towards else base) & 0xFFFFFFFFFFFFFFFF)
    return form.pure(lambda a: a + delta, [(form.dst(0, "u64"), "u64")], [form.src(1, "u64")])


@family("mapa")
def mapa(form: Form) -> Pure:
    """The same shared offset in the CTA of the given rank."""
    form.take("shared::cluster", "shared::cluster", default="generic")
    kind = form.take("u32", "u64")
    form.end()
    base = np.uint64(SHARED_WINDOW)

    def in_rank(address, rank):
        offset = address.astype(np.uint64) & np.uint64(0xFFFFFF)
        moved = rank.astype(np.uint64) << np.uint64(24) | offset
        return moved.astype(np.uint32) if kind == "u32" else moved + base

    return form.pure(in_rank, [(form.dst(0, kind), kind)], [form.src(1, kind), form.src(2, "u32")])


@family("getctarank")
def getctarank(form: Form) -> Pure:
    form.take("shared::cluster", default="generic")
    kind = form.take("u32", "u64")
    form.end()
    return form.pure(
        lambda address: (address >> address.dtype.type(24)).astype(np.uint32) & np.uint32(0xFF),
        [(form.dst(0, "u32"), "u32")],
        [form.src(1, kind)],
    )


@family("isspacep")
def isspacep(form: Form) -> Pure:
    space = form.take("shared", "shared::cta", "shared::cluster", "global", "local", "param")
    form.end()
    window = {"shared": 0x7A, "shared::cta": 0x7A, "shared::cluster": 0x7A, "local": 0x7B, "param": 0x7C}.get(space)

    def is_in(a):
        top = a >> np.uint64(40)
        return ~np.isin(top, (0x7A, 0x7B, 0x7C)) if window is None else top == window

    return form.pure(
        is_in,
        [(form.dst(0, "pred"), "pred")],
        [form.src(1, "u64")],
    )
