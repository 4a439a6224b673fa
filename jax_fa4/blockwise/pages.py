"""Keys and values that lie in pages of a pool, in the order that a page table gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa4.blockwise.blocks import Blocks

__all__ = ["add_to_pages", "rows_of_pages"]


def rows_of_pages(pool: jax.Array, page_table: jax.Array, blocks: Blocks, first: jax.Array) -> jax.Array:
    """A block of keys [*B, keys, K, D] of a pool [*B[:-1], num_pages, page_size, K, D]; other pages aren't touched."""
    page_size = pool.shape[-3]
    start = blocks.start(first) // page_size
    table = jax.lax.dynamic_slice_in_dim(page_table, start, blocks.size // page_size, axis=-1)
    pages = _take(pool, _within(table, pool))
    return pages.reshape(*pages.shape[:-4], blocks.size, *pages.shape[-2:])


def add_to_pages(rows: jax.Array, page_table: jax.Array, pool: jax.Array) -> jax.Array:
    """Sums rows [*B, S, K, D], one a key of the table, into zeros in the pool's shape."""
    pages = rows.reshape(*rows.shape[:-3], page_table.shape[-1], *pool.shape[-3:])
    table = jnp.broadcast_to(_within(page_table, pool), pages.shape[:-3])
    return _add(jnp.zeros(pool.shape, rows.dtype), table, pages)


def _within(page_table: jax.Array, pool: jax.Array) -> jax.Array:
    return jnp.clip(page_table, 0, pool.shape[-4] - 1)


_take = jnp.vectorize(lambda pool, table: pool[table], signature="(p,s,k,d),(b,n)->(b,n,s,k,d)")
_add = jnp.vectorize(
    lambda pool, table, rows: pool.at[table].add(rows), signature="(p,s,k,d),(b,n),(b,n,s,k,d)->(p,s,k,d)"
)
