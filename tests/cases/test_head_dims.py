"""Every head dim and every way to share kv heads."""

import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAIRS = [(8, 8), (72, 72), (104, 104), (192, 128), (256, 256), (64, 160)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
def test_head_dims_of_q_and_v_may_be_any_multiples_of_8(check, head_dim, head_dim_v):
    check(Cell(q=3, k=5, kv_heads=1, group=2, head_dim=head_dim, head_dim_v=head_dim_v, causal=True, dtype="bfloat16"))


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 8), (2, 4), (3, 1)])
def test_query_heads_share_kv_heads_in_order(check, kv_heads, group):
    cell = Cell(q=3, k=4, kv_heads=kv_heads, group=group)
    results, x = check(cell), testing.random(cell)
    repeated = jax_fa4.attention(x["q"], np.repeat(x["k"], group, 2), np.repeat(x["v"], group, 2))
    np.testing.assert_allclose(results["out"], repeated, rtol=0, atol=1e-6)


def test_heads_that_do_not_divide_are_refused():
    q, kv = np.ones((1, 4, 33, 16), np.float32), np.ones((1, 4, 2, 16), np.float32)
    with pytest.raises(ValueError, match="q must have a multiple of k's 2 heads, got 33"):
        jax_fa4.attention(q, kv, kv)
