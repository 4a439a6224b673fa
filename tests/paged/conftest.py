"""Sequences in pages: random pools and tables whose unused rows are NaN."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.blockwise import blocks

DRAWS = 4  # of inputs that a bound is measured on: by chance the error of a few numbers may be far too small
Call = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    whole, blocks.BLOCK = blocks.BLOCK, 4
    yield
    blocks.BLOCK = whole


@pytest.fixture(scope="session")
def paged() -> Callable[..., Call]:
    """paged(kv_lengths, queries, page_size, seed=0, **options): keyword arguments of `attention_paged`."""
    return _paged


@pytest.fixture(scope="session")
def check() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """check(make) compares out and lse of the call make(seed) with the definition, and returns them."""
    return _check


def _paged(
    kv_lengths: list[int],
    queries: int,
    page_size: int,
    seed: int = 0,
    *,
    group: int = 2,
    dtype: Any = "float32",
    **options: Any,
) -> Call:
    """`queries` of each sequence, or with cu_seqlens_q of all; pages lie in any order, one pool holds a few more."""
    rng = np.random.default_rng(seed)
    used = [-(-length // page_size) for length in kv_lengths]
    num_pages, slots = sum(used) + 2, max(used) + 1

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(testing.np_dtype(dtype))

    lead = () if "cu_seqlens_q" in options else (len(kv_lengths),)
    pools = {"k_pages": normal(num_pages, page_size, 2, 16), "v_pages": normal(num_pages, page_size, 2, 8)}
    table = np.full((len(kv_lengths), slots), -7, np.int32)
    free = iter(rng.permutation(num_pages))
    is_used = np.zeros((num_pages, page_size), bool)
    for sequence, length in enumerate(kv_lengths):
        for slot in range(used[sequence]):
            table[sequence, slot] = page = next(free)
            is_used[page] = np.arange(page_size) + slot * page_size < length
    for pool in pools.values():
        pool[~is_used] = np.nan
    integers = {name: np.asarray(value, np.int32) for name, value in options.items() if isinstance(value, list)}
    lengths = np.asarray(kv_lengths, np.int32)
    q = normal(*lead, queries, 2 * group, 16)
    return {"q": q, **pools, "page_table": table, "kv_lengths": lengths, **options, **integers}


def _check(make: Callable[[int], Call]) -> tuple[np.ndarray, np.ndarray]:
    calls = [make(seed) for seed in range(DRAWS)]
    exact = [testing.attention_paged(x) for x in calls]
    rounded = [testing.attention_paged(x, testing.rounded) for x in calls]
    out, lse = (np.asarray(a) for a in jax_fa4.attention_paged(**calls[0], return_lse=True))
    for name, value, dtype in (("out", out, calls[0]["q"].dtype.name), ("lse", lse, "float32")):
        every = (np.stack([getattr(draw, name) for draw in draws]) for draws in (exact, rounded))
        bound = testing.error_bound(*every, dtype, 3)
        expected = getattr(exact[0], name)
        np.testing.assert_allclose(value.astype(np.float64), expected, rtol=0, atol=bound, err_msg=name)
    return out, lse
