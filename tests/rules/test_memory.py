"""No array of the size of the score matrix exists, in a derivative of any order."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from jax_fa4 import attention
from jax_fa4.blockwise.blocks import BLOCK

pytestmark = pytest.mark.usefixtures("quick_compilation")
T, S, D = 1031, 1283, 8


def largest_tensor(function, *args):
    """Elements of the largest array in the lowered program."""
    text = jax.jit(function).lower(*args).as_text()
    return max(math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)\w+>", text))


def loss(q, k):
    out, lse = attention(q, k, k, causal=True, softcap=2.0, return_lse=True)
    return (out**3).sum() + jnp.sin(lse).sum()


ORDERS = {
    "results": loss,
    "grad": jax.grad(loss, (0, 1)),
    "jvp": lambda q, k: jax.jvp(loss, (q, k), (q, k)),
    "jvp-of-grad": lambda q, k: jax.jvp(jax.grad(loss, (0, 1)), (q, k), (q, k)),
    "grad-of-grad": jax.grad(lambda q, k: (jax.grad(loss)(q, k) ** 2).sum(), (0, 1)),
}


@pytest.mark.parametrize("function", ORDERS.values(), ids=ORDERS)
def test_the_largest_array_is_a_block_of_scores(function):
    q, k = jax.ShapeDtypeStruct((T, 1, D), jnp.float32), jax.ShapeDtypeStruct((S, 1, D), jnp.float32)
    assert largest_tensor(function, q, k) <= T * BLOCK < T * S / 4


def temporary_bytes(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("function", [ORDERS["grad"], ORDERS["grad-of-grad"]], ids=["grad", "grad-of-grad"])
def test_memory_grows_with_the_sum_of_the_lengths(function):
    short, long = (temporary_bytes(function, *[((length, 1, D), "float32")] * 2) for length in (1024, 4096))
    assert long <= 4.5 * short


def test_a_mask_and_a_bias_are_read_block_by_block():
    queries, keys = 64, 64 * BLOCK
    square = (queries, keys)
    used = temporary_bytes(
        lambda q, k, bias, mask: attention(q, k, k, bias=bias, mask=mask),
        *(((queries, 1, D), "float32"), ((keys, 1, D), "float32"), (square, "float32"), (square, "bool")),
    )
    assert used < queries * keys  # a copy of the mask alone would be that many bytes
