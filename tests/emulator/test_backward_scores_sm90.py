"""Our Hopper kernel for gradients by bias and softcap, run in the emulator, against exact attention in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jax_fa4 import testing
from jax_fa4.configs import ScoresConfig, backward_config, score_configs
from jax_fa4.emulator.launch import Launch, Options
from jax_fa4.emulator.run import run
from jax_fa4.testing import Cell

from .forward import dense_strides, parameters
from .test_backward_sm90 import with_nan_beyond
from .test_forward_sm90 import MODES, cell, compiled, extras_of, spec_of, window_of

pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")

LENGTHS = cell(q=70, k=200, batch=(2,), group=2, bias="full", q_lengths=(20, 70), kv_lengths=(0, 130))
# of two heads of keys, whose tiles follow each other in the only slot there is room for
WIDE = cell(q=20, k=70, batch=(2,), kv_heads=2, head_dim=256, bias="shared", segments=3, dtype="float16")
LOCAL = cell(q=150, k=140, batch=(2,), bias="keys", window=(40, 10), q_offset=9, dtype="float16")
CAPPED = cell(q=70, k=150, softcap=3.0, mask="keys", group=2, head_dim=72, head_dim_v=104, sinks=True)


def emulate(cell: Cell, name: str, options: Options, *, poisoned: bool = False):
    """(operands, dout, dlse, the gradient in its argument's shape); `poisoned`: NaN beyond every length.

    A bias is float16 where the other operands are.
    """
    x = testing.random(cell)
    if "bias" in x and cell.dtype == "float16":
        x["bias"] = x["bias"].astype(np.float16)
    rng, forward = np.random.default_rng(1), testing.rounded(x)
    dout = rng.standard_normal(forward.out.shape).astype(testing.np_dtype(cell.dtype))
    dlse = rng.standard_normal(forward.lse.shape).astype(np.float32)
    main = backward_config(spec_of(cell, x), "sm_90a")
    assert main is not None
    (config,) = score_configs(main, (name,), bias_has_rows="bias" in x and x["bias"].shape[-2] == cell.q)
    arrays = {"q": x["q"], "k": x["k"], "v": x["v"], "dout": dout}
    for each, array in arrays.items() if poisoned else ():
        arrays[each] = with_nan_beyond(array, x["kv_lengths" if each in ("k", "v") else "q_lengths"])
    arrays = {each: np.ascontiguousarray(array).view(np.uint16) for each, array in arrays.items()}
    left, right = window_of(x)
    arrays |= {"window_left": np.array([left or 0], np.int32), "window_right": np.array([right or 0], np.int32)}
    arrays["softmax_scale"] = np.array([cell.head_dim**-0.5], np.float32)
    arrays |= statistics(forward, dout, dlse, config.tile_m) | extras_of(cell, x, main)
    gradient = launch(config, arrays, options)
    if config.kept == "tiles":
        gradient = gradient.view(x[name].dtype)
    return x, dout, dlse, gradient.reshape(np.shape(x[name]))


def statistics(forward, dout, dlse, tile_m):
    """What the first kernel of a backward makes of its results."""
    empty = np.isneginf(forward.lse)
    delta = (forward.out.astype(np.float32) * dout.astype(np.float32)).sum(axis=-1).swapaxes(1, 2) - dlse
    more = [(0, 0), (0, 0), (0, -forward.lse.shape[-1] % tile_m)]
    lse_log2 = np.where(empty, np.inf, forward.lse * math.log2(math.e)).astype(np.float32)
    return {
        "lse_log2": np.pad(lse_log2, more, constant_values=np.inf),
        "delta": np.pad(np.where(empty, 0, delta).astype(np.float32), more),
    }


def launch(config: ScoresConfig, arrays: dict[str, np.ndarray], options: Options) -> np.ndarray:
    """The result of the kernel, poisoned with NaN before; heads and parts that it leaves apart are summed."""
    (batch, q_len, q_heads, _), (kv_len, kv_heads) = arrays["q"].shape, arrays["k"].shape[1:3]
    sizes = {"q_len": q_len, "kv_len": kv_len, "q_heads": q_heads, "kv_heads": kv_heads, "batch": batch}
    sizes |= dense_strides(arrays)
    tiles, entries = -(-kv_len // config.tile_n), q_heads * batch
    if config.kept == "tiles":
        result = np.full_like(arrays["bias"], {2: 0xFFFF, 4: np.nan}[arrays["bias"].itemsize])
        sizes["bias_batches"], sizes["bias_heads"] = result.shape[:2]
        sizes["query_shares"] = 1 if result.shape[:2] == (batch, q_heads) else -(-q_len // config.tile_m)
        entries = math.prod(result.shape[:2]) * sizes["query_shares"]
    else:
        result = np.full((batch, q_heads, kv_len if config.kept == "rows" else tiles), np.nan, np.float32)
    params = parameters(config, {**arrays, config.result.name: result}, sizes)
    grid = (tiles * entries, 1, 1)
    run(compiled(config), Launch(grid=grid, block=config.threads, params=params, smem_bytes=config.smem_bytes), options)
    if config.kept == "tiles":
        return result
    return result.sum(axis=1) if config.kept == "rows" else result.sum()


def assert_exact(x, dout, dlse, gradient, name, dtype):
    exact, rough = testing.gradients(x, dout, dlse)[name], testing.rounded_gradients(x, dout, dlse)[name]
    error = np.abs(gradient.astype(np.float64) - exact).max()
    assert error <= testing.error_bound(exact, rough, dtype, factor=3)


@pytest.mark.parametrize(
    ("cell", "name", "mode"),
    [(WIDE, "bias", "random"), (LOCAL, "bias", "early"), (CAPPED, "softcap", "late")],
    ids=["tiles", "rows", "total"],
)
def test_the_kernel_gives_the_gradient_of_attention(cell, name, mode):
    assert_exact(*emulate(cell, name, MODES[mode]), name, cell.dtype)


def test_scores_beyond_a_length_have_gradients_of_zero_even_beside_nan():
    *x, expected = emulate(LENGTHS, "bias", MODES["strict"])
    assert_exact(*x, expected, "bias", "bfloat16")
    *_, gradient = emulate(LENGTHS, "bias", MODES["late"], poisoned=True)
    np.testing.assert_array_equal(gradient, expected)
    assert not gradient[~np.broadcast_to(testing.visible(x[0]), gradient.shape)].any()
