"""Checks of values that only the device knows, for when JAX_FA4_CHECK=1: a program then raises where it runs."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

__all__ = ["ENVIRONMENT_VARIABLE", "check_pages", "is_on"]

ENVIRONMENT_VARIABLE = "JAX_FA4_CHECK"


def is_on() -> bool:
    """Whether calls that are traced now check values; a compiled program stays as it was traced.

    Raises ValueError if the environment says neither 1 nor 0.
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def check_pages(page_table: jax.Array, used: jax.Array, num_pages: int) -> None:
    """Raises in the running program if an entry of page_table [B, P] that is `used`, bool [B, P], names no page."""
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    worst = jnp.argmax(wrong)  # the first of them
    sequence, slot = jnp.unravel_index(worst, wrong.shape) if wrong.size else (0, 0)
    page = page_table.reshape(-1)[worst] if wrong.size else 0

    def report(count: int, sequence: int, slot: int, page: int) -> None:
        if count:
            raise ValueError(
                f"page_table[{sequence}, {slot}] must be from 0 to {num_pages - 1}, got {page}; {count} used entries "
                f"are outside the pool"
            )

    jax.debug.callback(report, wrong.sum(), sequence, slot, page)
