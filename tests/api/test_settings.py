"""JAX settings that a user's program may have: a call works under each, derivatives included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

CELL = Cell(
    q=5,
    k=3,
    group=2,
    causal=True,
    softcap=2.0,
    sinks=True,
    bias="shared",
    mask="keys",
    segments=2,
    q_lengths=(5, 3),
    kv_lengths=(0, 3),
    dtype="bfloat16",
)
SETTINGS = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_check_tracer_leaks": True,
}


@pytest.fixture
def setting(request):
    before = getattr(jax.config, request.param)
    jax.config.update(request.param, SETTINGS[request.param])
    yield
    jax.config.update(request.param, before)


@pytest.mark.parametrize("setting", SETTINGS, indirect=True)
@pytest.mark.usefixtures("setting")
def test_a_call_and_its_derivatives_work_under_the_setting():
    x = testing.random(CELL)
    wrt = {name: jnp.asarray(x[name]) for name in ("q", "k", "v", "sinks", "bias")}

    @jax.jit
    def program(wrt):
        return jax.value_and_grad(lambda wrt: jax_fa4.attention(**{**x, **wrt}).astype(jnp.float32).sum())(wrt)

    value, gradients = program(wrt)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves((value, gradients)))


POOL, TABLE = np.ones((5, 4, 2, 16), np.float32), np.array([[0, 1, 2], [3, 4, 0]])
ROWS, NEW = np.ones((6, 2, 16), np.float32), np.ones((2, 3, 2, 16), np.float32)
CUTS, POSITIONS = np.array([0, 2, 6]), np.array([[4, 5, 6], [0, 1, 2]])
OTHERS = {
    "varlen": lambda x: jax_fa4.attention_varlen(x * ROWS, ROWS, ROWS, CUTS, causal=True, return_lse=True),
    "paged": lambda x: jax_fa4.attention_paged(x * NEW, POOL, POOL, TABLE, np.array([7, 3]), return_lse=True),
    "paged-packed": lambda x: jax_fa4.attention_paged(
        x * ROWS, POOL, POOL, TABLE, np.array([7, 3]), cu_seqlens_q=CUTS, return_lse=True
    ),
    "append": lambda x: jax_fa4.append_kv(POOL, POOL, x * NEW, x * NEW, TABLE, POSITIONS),
    "append-packed": lambda x: jax_fa4.append_kv(POOL, POOL, x * ROWS, x * ROWS, TABLE, np.arange(6), cu_seqlens=CUTS),
    "combine": lambda x: jax_fa4.combine(x * np.ones((3, 2, 6, 4, 16), np.float32), np.ones((3, 2, 4, 6), np.float32)),
    "jax-nn": lambda x: jax_fa4.dot_product_attention(x * NEW, NEW, NEW, is_causal=True, return_residual=True),
}


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_other_calls_need_no_promotion_by_jax(call, x64):
    def loss(x):
        return sum(result.sum() for result in jax.tree.leaves(call(x)))

    with jax.enable_x64(x64), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        gradient = jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((), np.float32))
    assert gradient.dtype == np.float32
