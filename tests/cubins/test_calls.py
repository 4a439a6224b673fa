"""How many cubins the public call asks for."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_fa4
from jax_fa4 import launcher
from jax_fa4.cubins import lookup

pytestmark = pytest.mark.skipif(launcher.library() is None, reason="needs the launcher, which was not built")


@pytest.fixture
def lower(stand_in, monkeypatch):
    """Lowers a call of these sizes for an H200."""
    monkeypatch.setattr(lookup, "installed_compiler", stand_in.compiler)

    def lower(batch, seqlen, heads, head_dim=128, **options):
        q = jax.ShapeDtypeStruct((batch, seqlen, heads, head_dim), jnp.bfloat16)
        call = functools.partial(jax_fa4.attention, implementation="kernel", **options)
        with jax_fa4.target_arch("sm_90a"):
            jax.jit(call).trace(q, q, q).lower(lowering_platforms=("cuda",))

    return lower


def test_one_cubin_serves_every_size_scale_window_and_layout(lower, stand_in):
    lower(2, 128, 4, window=(32, 0))
    lower(1, 4097, 8, window=(1000, 7), softmax_scale=0.5, layout="BNTH")
    assert stand_in.count == 1


def test_other_code_is_another_cubin(lower, stand_in):
    lower(2, 128, 4)
    lower(2, 128, 4, causal=True)
    lower(2, 128, 4, head_dim=64)
    assert stand_in.count == 3
