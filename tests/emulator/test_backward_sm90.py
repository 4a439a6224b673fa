"""Our Hopper backward kernels, run in the emulator, against the gradients of exact attention in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.configs import backward_config
from jax_fa4.emulator.errors import Deadlock
from jax_fa4.emulator.launch import Launch, Options
from jax_fa4.emulator.run import run
from jax_fa4.spec import AttentionSpec
from jax_fa4.testing import Cell

from .backward import Call, backward
from .forward import parameters
from .test_forward_sm90 import MODES, cell, compiled, extras_of, spec_of, window_of

pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")

LENGTHS = cell(
    q=130, k=140, batch=(3,), q_lengths=(0, 7, 130), kv_lengths=(140, 0, 70), causal=True, q_offset=9, head_dim=8
)
SHAPES = [
    cell(q=1, k=1),
    cell(q=128, k=128, head_dim=128, dtype="float16"),
    cell(q=63, k=129, head_dim=128, dtype="float16"),
    cell(q=65, k=130, batch=(2,), kv_heads=2, group=2),
    cell(q=193, k=127),
    cell(q=130, k=130, causal=True, head_dim=128),
    cell(q=200, k=77, causal=True),
    cell(q=70, k=300, causal=True, group=3),
    cell(q=150, k=200, window=(40, 10), head_dim=96),
    cell(q=150, k=140, window=(20, None)),
    cell(q=60, k=130, softmax_scale=-0.3),
    cell(q=20, k=0),
    cell(q=0, k=20),
    cell(q=70, k=140, head_dim=72, head_dim_v=104, group=2),
    LENGTHS,
    cell(q=70, k=150, softcap=3.0, sinks=True, mask="keys", group=2),
    cell(q=70, k=260, segments=3, bias="shared", kv_heads=2, head_dim=128, head_dim_v=64),
    cell(q=280, k=200, segments=2, head_dim=128),  # some tiles hold one segment
    cell(q=100, k=140, head_dim=192, head_dim_v=128, causal=True, dtype="float16"),
]


def emulate(
    cell: Cell, options: Options, seed: int = 0, *, deterministic: bool = False, poisoned: bool = False, **changes
):
    """(operands, dout, dlse, gradients by name, results of the runs); `poisoned`: NaN beyond every length."""
    x = testing.random(cell, seed) | changes
    rng = np.random.default_rng(seed + 1)
    forward = testing.rounded(x)
    dtype = testing.np_dtype(cell.dtype)
    dout = rng.standard_normal(forward.out.shape).astype(dtype)
    dlse = rng.standard_normal(forward.lse.shape).astype(np.float32)
    spec = dataclasses.replace(spec_of(cell, x), deterministic=deterministic)
    config = backward_config(spec, "sm_90a")
    assert config is not None
    left, right = window_of(x)
    arrays = {"q": x["q"], "k": x["k"], "v": x["v"], "out": forward.out.astype(dtype), "dout": dout}
    for name, array in arrays.items() if poisoned else ():
        arrays[name] = with_nan_beyond(array, x["kv_lengths" if name in ("k", "v") else "q_lengths"])
    call = Call(
        **{name: np.ascontiguousarray(a).view(np.uint16) for name, a in arrays.items()},
        lse=forward.lse.astype(np.float32),
        dlse=dlse,
        softmax_scale=cell.head_dim**-0.5 if x.get("softmax_scale") is None else x["softmax_scale"],
        window_left=left or 0,
        window_right=right or 0,
        extras=extras_of(cell, x, config),
    )
    gradients, results = backward(compiled, config, call, options)
    return x, dout, dlse, {name[1:]: a.view(dtype) for name, a in gradients.items()}, results


def with_nan_beyond(array: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A copy of [batch, length, heads, head_dim] whose rows beyond a length are NaN."""
    is_beyond = np.arange(array.shape[1]) >= lengths[:, None]
    return np.where(is_beyond[..., None, None], np.array(np.nan, array.dtype), array)


def assert_exact(x, dout, dlse, gradients, dtype: str) -> None:
    exact, rough = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
    factor = 3 if "softcap" in x else 2
    for name, gradient in gradients.items():
        error = np.abs(gradient.astype(np.float64) - exact[name]).max(initial=0)
        assert error <= testing.error_bound(exact[name], rough[name], dtype, factor), name


@pytest.mark.parametrize("cell", SHAPES, ids=str)
def test_backward_gives_the_gradients_of_attention(cell):
    *x, _ = emulate(cell, MODES["late"])
    assert_exact(*x, cell.dtype)


@pytest.mark.parametrize("mode", MODES)
def test_keys_gradients_do_not_depend_on_when_copies_complete_or_who_runs_first(mode):
    ragged = cell(q=140, k=150, causal=True, head_dim=128)
    *_, expected, _ = emulate(ragged, MODES["late"])
    *_, gradients, _ = emulate(ragged, MODES[mode])
    for name in "kv":
        assert np.array_equal(gradients[name].view(np.uint16), expected[name].view(np.uint16))


@pytest.mark.parametrize("mode", ["random", "strict"])
def test_wide_heads_pass_weights_and_dscores_on_in_time(mode):
    wide = cell(q=70, k=70, head_dim=8, head_dim_v=200, softcap=3.0, group=2, q_lengths=True, kv_lengths=True)
    *x, _ = emulate(wide, MODES[mode])
    assert_exact(*x, wide.dtype)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_deterministic_sum_does_not_depend_on_who_runs_first(seed):
    local = cell(q=200, k=400, window=(100, 150), q_offset=50)
    options = dataclasses.replace(MODES["random"], seed=seed)
    *x, expected, _ = emulate(local, MODES["late"], deterministic=True)
    *_, gradients, _ = emulate(local, options, deterministic=True)
    assert_exact(*x, expected, local.dtype)
    for name in "qkv":
        assert np.array_equal(gradients[name].view(np.uint16), expected[name].view(np.uint16))


def test_what_lies_beyond_a_length_changes_nothing_even_as_nan():
    *_, expected, _ = emulate(LENGTHS, MODES["late"])
    *_, gradients, _ = emulate(LENGTHS, MODES["late"], poisoned=True)
    for name in "qkv":
        np.testing.assert_array_equal(gradients[name].astype(np.float32), expected[name].astype(np.float32))


@pytest.mark.parametrize("head_dim", [64, 136])
def test_weights_of_missing_keys_that_overflow_reach_no_gradient(head_dim):
    """lse far below -88: exp(-lse) is inf in rows of the tile beyond kv_len, which hold zeros."""
    small = cell(q=64, k=70, head_dim=head_dim)
    x = testing.random(small)
    opposite = {"q": np.abs(x["q"]) + x["q"].dtype.type(2), "k": -np.abs(x["k"]) - x["k"].dtype.type(2)}
    x, dout, dlse, gradients, _ = emulate(small, MODES["late"], softmax_scale=0.3, **opposite)
    assert testing.attention(x).lse.max() < -100
    assert_exact(x, dout, dlse, gradients, small.dtype)


def test_each_tile_of_keys_multiplies_five_times():
    *_, results = emulate(cell(q=128, k=256), MODES["early"])
    assert [result.stats.total("wgmma_flops") for result in results] == [0, 5 * 2 * 128 * 256 * 64, 0]


def test_one_cta_of_postprocess_waits_for_the_grid_ahead_and_all_for_their_sums():
    *_, results = emulate(cell(q=100, k=1, head_dim=128), MODES["late"])
    ctas = [result.stats.opcodes[0]["griddepcontrol.launch_dependents"] for result in results]
    waits = [result.stats.opcodes[0]["griddepcontrol.wait"] for result in results]
    assert (ctas, waits) == ([2, 1, 2], [0, 1, 1])


def postprocess_with(done):
    """dq of four query heads, two for each of the counts in `done`, of sums that are all one; 4 are to add."""
    config = backward_config(AttentionSpec(dtype="float16", head_dim=72, head_dim_v=72, group=2), "sm_90a").postprocess
    dq = np.full((1, config.tile_m, 4, config.head_dim), np.nan, np.float16)
    arrays = {"dq": dq.view(np.uint16), "softmax_scale": np.array([0.5], np.float32)}
    arrays["dq_sum"] = np.ones((1, 4, config.tile_m, config.sum_columns), np.float32)
    arrays |= {"dq_turn": np.ones((1, 4, 1, config.dq_parts), np.int32), "dq_done": np.array([done], np.int32)}
    sizes = {"q_len": config.tile_m, "q_heads": 4, "kv_heads": 2, "dq_adders": 4}
    params = parameters(config, arrays, sizes)
    launch = Launch(grid=(4, 1, 1), block=config.threads, params=params, smem_bytes=config.smem_bytes)
    run(compiled(config), launch)
    return dq


def test_postprocess_turns_sums_to_which_all_have_added():
    np.testing.assert_array_equal(postprocess_with(done=[4, 4]), 0.5)


@pytest.mark.parametrize("done", [(3, 4), (4, 3)], ids=str)
def test_postprocess_waits_for_the_last_that_adds_to_each_head(done):
    with pytest.raises(Deadlock):
        postprocess_with(done)
