"""The merge of partial results of splits: exact for any number of splits, whatever lies in those that saw no key."""

import math

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.configs import CombineConfig
from jax_fa4.configs.decode import COMBINE_WARPS
from jax_fa4.emulator.launch import Buffer, Launch
from jax_fa4.emulator.run import run
from jax_fa4.kernels.build import compile_kernel

BATCH, KV_HEADS, Q_LEN, GROUP, DIM = 1, 2, 3, 2, 96
MANY, FEW = (
    CombineConfig(
        arch="sm_90a", dtype="float16", head_dim_v=DIM, has_many_splits=many, has_split_counts=True, has_sinks=True
    )
    for many in (True, False)
)


@pytest.fixture(scope="module")
def ptx():
    return {config: compile_kernel(config).ptx for config in (MANY, FEW)}


def partial_results(counts):
    """Results of as many splits as `counts` says for each query of each kv head; NaN in those behind."""
    rng, most = np.random.default_rng(0), counts.max()
    outs = rng.standard_normal((BATCH, KV_HEADS, most, Q_LEN, GROUP, DIM)).astype(np.float32)
    lses = (5 * rng.standard_normal((BATCH, KV_HEADS, Q_LEN, GROUP, most))).astype(np.float32)
    lses[..., 0, 1] = -np.inf  # the first query of the second split sees no key
    behind = np.arange(most) >= counts[..., None]
    lses[np.broadcast_to(behind[..., None, :], lses.shape)] = np.nan
    outs[np.isneginf(lses).transpose(0, 1, 4, 2, 3) | np.isnan(lses).transpose(0, 1, 4, 2, 3)] = np.nan
    return outs, lses, rng.standard_normal((BATCH, KV_HEADS * GROUP)).astype(np.float32)


def combined(ptx, config, outs, lses, counts, sinks):
    out = np.full((BATCH, Q_LEN, KV_HEADS * GROUP, DIM), np.nan, np.float16)
    lse = np.full((BATCH, KV_HEADS * GROUP, Q_LEN), np.nan, np.float32)
    strides = [np.int64(s // 2).tobytes() for s in out.strides[:3]]
    sizes = [np.int32(n).tobytes() for n in (Q_LEN, KV_HEADS * GROUP, KV_HEADS, BATCH, lses.shape[-1])]
    arrays = (Buffer(a) for a in (outs, lses, out, lse, counts.astype(np.int32), sinks))
    ctas = math.ceil(BATCH * KV_HEADS * Q_LEN * GROUP * config.row_warps / COMBINE_WARPS)
    run(ptx[config], Launch(grid=(ctas, 1, 1), block=config.threads, params=(*arrays, *strides, *sizes)))
    return out, lse


def exact(outs, lses, counts, sinks):
    out, lse = np.zeros((BATCH, Q_LEN, KV_HEADS * GROUP, DIM)), np.full((BATCH, KV_HEADS * GROUP, Q_LEN), -np.inf)
    for b, h, t, g in np.ndindex(BATCH, KV_HEADS, Q_LEN, GROUP):
        if (count := counts[b, h, t]) < 0:
            continue
        logits = lses[b, h, t, g, :count].astype(np.float64)
        lse[b, h * GROUP + g, t] = total = np.logaddexp.reduce([*logits, sinks[b, h * GROUP + g]])
        parts = np.where(np.isneginf(logits)[:, None], 0, outs[b, h, :count, t, g])
        out[b, t, h * GROUP + g] = np.exp(logits - total) @ parts
    return out, lse


@pytest.mark.parametrize(("config", "most"), [(FEW, 8), (FEW, 3), (MANY, 37), (MANY, 16)], ids=str)
def test_splits_are_summed_by_their_weights(ptx, config, most):
    counts = np.array([[[most, 0, -1], [2, most, most - 1]]])
    outs, lses, sinks = partial_results(counts)
    out, lse = combined(ptx, config, outs, lses, counts, sinks)
    expected_out, expected_lse = exact(outs, lses, counts, sinks)
    np.testing.assert_allclose(out.astype(np.float64), expected_out, rtol=0, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)


def test_both_kernels_give_the_same_bits(ptx):
    counts = np.array([[[8, 5, 1], [2, 0, -1]]])
    outs, lses, sinks = partial_results(counts)
    few, many = (combined(ptx, config, outs, lses, counts, sinks) for config in (FEW, MANY))
    for a, b in zip(few, many, strict=True):
        assert a.tobytes() == b.tobytes()
