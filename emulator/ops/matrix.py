"""`ldmatrix` and `stmatrix`: tiles of 16 and 8 bit between shared memory and fragments, PTX ISA 9.7.14.5."""

from __future__ import annotations

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.ops.memory import load_shared, store_shared
from jax_fa4.emulator.state import Lanes, Warp

LANE = np.arange(32)
ROW_BYTES = 16


def _shape(form: Form) -> tuple[int, bool]:
    """How many tiles of 16 bit, and whether they are transposed."""
    form.take("sync")
    form.take("aligned")
    form.take("m8n8")
    count = int(form.take("x1", "x2", "x4")[1:])
    transposed = form.has("trans")
    form.take("shared", "shared::cta")
    form.take("b16")
    form.end()
    return count, transposed


def fragment_rows(transposed: bool):
    """Row and column, in a tile, of half h of the register of lane l: two arrays [32, 2]."""
    outer = np.repeat((LANE // 4)[:, None], 2, axis=1)
    inner = 2 * (LANE % 4)[:, None] + np.arange(2)
    return (inner, outer) if transposed else (outer, inner)


def _byte_tiles(form: Form, shape: str, counts: tuple[str, ...]) -> int:
    """How many tiles of bytes; those exist only transposed."""
    form.take("sync")
    form.take("aligned")
    form.take(shape)
    form.take("trans")
    count = int(form.take(*counts)[1:])
    form.take("shared", "shared::cta")
    form.take("b8")
    form.end()
    return count


def _load_bytes(form: Form) -> Effect:
    """m16n16: byte e of register 2i + h of lane l is row 4 (l % 4) + e, byte l / 4 + 8 h of tile i."""
    count = _byte_tiles(form, "m16n16", ("x1", "x2"))
    destinations, where = form.dsts(0, "b32"), form.shared(1)
    rows, columns = 4 * (LANE % 4)[:, None] + np.arange(4), np.repeat((LANE // 4)[:, None], 4, axis=1)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "ldmatrix")
        words = load_shared(warp, where.at(warp)[: 16 * count], 4, ROW_BYTES // 4, "ldmatrix")
        tiles = words.view(np.uint8).reshape(count, 16, 16)
        for index, destination in enumerate(destinations):
            if destination is not None:
                part = np.ascontiguousarray(tiles[index // 2, rows, columns + 8 * (index % 2)])
                warp.v[destination][...] = part.view(np.uint32).reshape(32)

    return form.effect(execute)


def _store_bytes(form: Form) -> Effect:
    """m16n8: byte e of register i of lane l is row 2 (l % 4) + e % 2, byte l / 4 + 8 (e / 2) of tile i."""
    count = _byte_tiles(form, "m16n8", ("x1", "x2", "x4"))
    where, sources = form.shared(0), form.srcs(1, "b32")
    byte = np.arange(4)
    rows, columns = 2 * (LANE % 4)[:, None] + byte % 2, (LANE // 4)[:, None] + 8 * (byte // 2)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "stmatrix")
        tiles = np.empty((count, 8, 16), np.uint8)
        for i, source in enumerate(sources):
            tiles[i, rows, columns] = warp.v[source].view(np.uint8).reshape(32, 4)
        warp.writing_lanes |= lanes.bits
        store_shared(warp, where.at(warp)[: 8 * count], tiles.reshape(8 * count, 16).view(np.uint32), "stmatrix")

    return form.effect(execute)


@family("ldmatrix")
def ldmatrix(form: Form) -> Effect:
    if "m16n16" in form.modifiers:
        return _load_bytes(form)
    count, transposed = _shape(form)
    destinations, where = form.dsts(0, "b32"), form.shared(1)
    rows, columns = fragment_rows(transposed)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "ldmatrix")
        words = load_shared(warp, where.at(warp)[: 8 * count], 4, ROW_BYTES // 4, "ldmatrix")
        tiles = words.view(np.uint16).reshape(count, 8, 8)
        for tile, destination in zip(tiles, destinations, strict=True):
            if destination is not None:
                warp.v[destination][...] = np.ascontiguousarray(tile[rows, columns]).view(np.uint32).reshape(32)

    return form.effect(execute)


@family("stmatrix")
def stmatrix(form: Form) -> Effect:
    if "m16n8" in form.modifiers:
        return _store_bytes(form)
    count, transposed = _shape(form)
    where, sources = form.shared(0), form.srcs(1, "b32")
    rows, columns = fragment_rows(transposed)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "stmatrix")
        tiles = np.empty((count, 8, 8), np.uint16)
        for i, source in enumerate(sources):
            tiles[i, rows, columns] = warp.v[source].view(np.uint16).reshape(32, 2)
        values = tiles.reshape(8 * count, 8).view(np.uint32)
        warp.writing_lanes |= lanes.bits
        store_shared(warp, where.at(warp)[: 8 * count], values, "stmatrix")

    return form.effect(execute)
