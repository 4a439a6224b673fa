"""`ldmatrix` and `stmatrix`: 8x8 tiles of 16 bit between shared memory and fragments, PTX ISA 9.7.14.5."""

from __future__ import annotations

import numpy as np

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.ops.memory import load_shared, store_shared
from jax_fa4.emulator.state import Lanes, Warp

LANE = np.arange(32)
ROW_BYTES = 16


def _shape(form: Form) -> tuple[int, bool]:
    """How many tiles, and whether they are transposed."""
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


@family("ldmatrix")
def ldmatrix(form: Form) -> Effect:
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
    count, transposed = _shape(form)
    where, sources = form.shared(0), form.srcs(1, "b32")
    rows, columns = fragment_rows(transposed)

    def execute(warp: Warp, lanes: Lanes) -> None:
        warp.require_converged(lanes, "stmatrix")
        tiles = np.empty((count, 8, 8), np.uint16)
        for i, source in enumerate(sources):
            tiles[i, rows, columns] = warp.v[source].view(np.uint16).reshape(32, 2)
        values = tiles.reshape(8 * count, 8).view(np.uint32)
        store_shared(warp, where.at(warp)[: 8 * count], values, "stmatrix")

    return form.effect(execute)
