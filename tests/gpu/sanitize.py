"""Small forward calls for NVIDIA's compute-sanitizer; lengths lie one under and one over tile multiples.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --report-api-errors no python tests/gpu/sanitize.py

With the platform's allocator every array is an allocation of its own, so a touch beyond its end is seen. Errors of API
calls are left out, because the launcher asks for one parameter more than a kernel has to learn that there is none.
"""

import itertools

import numpy as np

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

for head_dim, causal, (q, k) in itertools.product(
    (64, 128), (False, True), ((1, 1), (127, 129), (193, 191), (129, 300), (300, 65))
):
    x = testing.random(
        Cell(batch=(1,), q=q, k=k, kv_heads=1, group=2, head_dim=head_dim, dtype="bfloat16", causal=causal)
    )
    out, lse = jax_fa4.attention(**x, return_lse=True, implementation="kernel")
    exact = testing.attention(x)
    assert np.abs(np.asarray(out, np.float64) - exact.out).max() < 0.05
    assert np.array_equal(np.isinf(lse), np.isinf(exact.lse))
print("done")  # noqa: T201
