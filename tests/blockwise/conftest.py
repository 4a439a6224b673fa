"""Blockwise attention on operands directly, in blocks so small that every sequence has several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jax_fa4 import blockwise, testing
from jax_fa4.blockwise import blocks
from jax_fa4.operands import Operands

BLOCK = 4
forward_jit = jax.jit(blockwise.forward)
backward_jit = jax.jit(blockwise.backward, static_argnums=3)
tangent_jit = jax.jit(blockwise.tangent)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """These programs run once: half of the time goes if XLA optimises them less."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def forward() -> Callable[[Operands], blockwise.Results]:
    """forward(x): results in numpy, as are those of the next two."""
    return lambda x: blockwise.Results(*jax.device_get(forward_jit(x)))


@pytest.fixture
def backward() -> Callable[..., dict[str, Any]]:
    """backward(x, saved, cotangents, *wrt): gradients by name."""
    return lambda x, saved, cotangents, *wrt: dict(
        zip(wrt, jax.device_get(backward_jit(x, saved, cotangents, wrt)), strict=True)
    )


@pytest.fixture
def tangent() -> Callable[..., blockwise.Results]:
    """tangent(x, saved, tangents by name)."""
    return lambda x, saved, tangents: jax.device_get(tangent_jit(x, saved, tangents))


@pytest.fixture
def operands() -> Callable[[testing.Cell], Operands]:
    """The operands of a cell's `testing.random`, as numpy arrays."""
    return _operands


def _operands(cell: testing.Cell) -> Operands:
    x = testing.random(cell)
    left, right = x.pop("window", (None, None))
    right = 0 if x.pop("causal", False) else right
    axes = len(cell.batch)

    def with_batch_axes(a: np.ndarray[Any, Any], behind: int) -> np.ndarray[Any, Any]:
        return a.reshape((1,) * (axes + behind - a.ndim) + a.shape)

    for name, behind in (("bias", 3), ("mask", 3), ("sinks", 1)):
        if name in x:
            x[name] = with_batch_axes(x[name], behind)
            if cell.dtype == "float64" and name != "mask":
                x[name] = x[name].astype(np.float64)
    bounds = {"window_left": left, "window_right": right}
    x |= {name: np.asarray(value, np.int32) for name, value in bounds.items() if value is not None}
    scalars = {"softmax_scale": x.pop("softmax_scale", 1 / math.sqrt(cell.head_dim)), "softcap": x.pop("softcap", None)}
    x |= {name: np.asarray(value, np.float64) for name, value in scalars.items() if value is not None}
    return Operands(**x)
