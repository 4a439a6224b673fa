"""Exact attention in numpy, inputs for it, and the error that a result may have: for this package's tests and users'.

Example:
  >>> import jax_fa4
  >>> from jax_fa4 import testing
  >>> cell = testing.Cell(q=7, k=9, causal=True, dtype="bfloat16")
  >>> x = testing.random(cell)  # keyword arguments of jax_fa4.attention
  >>> exact, rounded = testing.attention(x), testing.rounded(x)
  >>> error = abs(jax_fa4.attention(**x) - exact.out).max()
  >>> bool(error <= testing.error_bound(exact.out, rounded.out, cell.dtype))
  True

Nothing here is fast: whole score matrices are made, in float64. Shape letters as in `jax_fa4.attention`.
"""

from jax_fa4.testing.bounds import error_bound, error_ratio
from jax_fa4.testing.cells import Cell, np_dtype, random
from jax_fa4.testing.packed import attention_paged, attention_varlen, gradients_varlen
from jax_fa4.testing.reference import Forward, attention, gradients, rounded, rounded_gradients, visible

__all__ = [
    "Cell",
    "Forward",
    "attention",
    "attention_paged",
    "attention_varlen",
    "error_bound",
    "error_ratio",
    "gradients",
    "gradients_varlen",
    "np_dtype",
    "random",
    "rounded",
    "rounded_gradients",
    "visible",
]
