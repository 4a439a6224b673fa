"""Random arrays of a cell, on JAX's default device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.bench.cells import Cell

__all__ = ["Operands", "random_operands"]

POOL = 4_194_301  # random numbers, a prime: making new ones for each cell would take longer than the benchmark


class Operands(NamedTuple):
    """Layouts are those of `attention`, of `attention_varlen` where cu_seqlens is there, or of `attention_paged`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    cu_seqlens: jax.Array | None = None  # [documents + 1] int32
    page_table: jax.Array | None = None  # [batch, pages] int32, in no order
    kv_lengths: jax.Array | None = None  # [batch] int32


def random_operands(cell: Cell, seed: int = 0) -> Operands:
    """Standard normal bfloat16 values; large arrays repeat them, out of step with every axis."""
    q_shape: tuple[int, ...] = (cell.batch, cell.q_len)
    kv_shape: tuple[int, ...] = (cell.batch, cell.kv_len)
    more = {}
    if cell.kind == "varlen":
        q_shape = kv_shape = (cell.q_len,)
        more["cu_seqlens"] = jnp.asarray(np.cumsum((0, *cell.lengths)), jnp.int32)
    if cell.page_size is not None:
        num_pages = cell.batch * cell.kv_len // cell.page_size
        kv_shape = (num_pages, cell.page_size)
        pages = np.random.default_rng(seed).permutation(num_pages).reshape(cell.batch, -1)
        more["page_table"] = jnp.asarray(pages, jnp.int32)
        more["kv_lengths"] = jnp.full(cell.batch, cell.kv_len, jnp.int32)
    shapes = (
        (*q_shape, cell.q_heads, cell.head_dim),
        (*kv_shape, cell.kv_heads, cell.head_dim),
        (*kv_shape, cell.kv_heads, cell.head_dim_v),
        (*q_shape, cell.q_heads, cell.head_dim_v),
    )
    arrays = (jnp.asarray(np.resize(np.roll(_pool(seed), n * POOL // 5), shape)) for n, shape in enumerate(shapes))
    return Operands(*arrays, **more)


@functools.cache
def _pool(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(POOL, np.float32).astype(jnp.bfloat16)
