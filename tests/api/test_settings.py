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
