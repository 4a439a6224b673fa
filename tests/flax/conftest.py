"""What the tests of both Flax APIs share: `jax_fa4.flax.attention_fn` may err twice as much as Flax's own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jax_fa4 import testing

Compute = Callable[[Any], Any]  # a tree of arrays -> a tree of results


def _in_double_precision(compute: Compute, arguments: Any) -> Any:
    def widened(x: Any) -> Any:
        x = np.asarray(x)
        return x.astype(np.float64) if x.dtype == np.float32 else x

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compute(jax.tree.map(widened, arguments)))


def _assert_as_good_as(ours: Compute, flax: Compute, arguments: Any) -> None:
    """Both get float32 arguments; Flax's results from the same arguments in float64 are the truth."""
    ours, flax = jax.jit(ours), jax.jit(flax)
    exact = jax.tree.leaves(_in_double_precision(flax, arguments))
    results, reference = jax.tree.leaves(ours(arguments)), jax.tree.leaves(flax(arguments))
    assert len(results) == len(reference) == len(exact) > 0
    for result, rounded, truth in zip(results, reference, exact, strict=True):
        assert result.dtype == rounded.dtype
        error = np.abs(np.asarray(result, np.float64) - truth).max()
        assert error <= testing.error_bound(truth, rounded, "float32")


@pytest.fixture(autouse=True, scope="package")
def _quick_compilation() -> Iterator[None]:
    """Most of these programs run once, so time spent on optimising them is lost."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def assert_as_good_as() -> Callable[[Compute, Compute, Any], None]:
    return _assert_as_good_as
