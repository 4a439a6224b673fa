"""Our Hopper forward kernel, run in the emulator, against exact attention in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_fa4 import cubins, testing
from jax_fa4.configs import BackwardConfig, Config, KernelConfig, forward_config
from jax_fa4.emulator.launch import Options
from jax_fa4.rules.segments import key_blocks
from jax_fa4.spec import AttentionSpec, MaskSpec
from jax_fa4.testing import Cell

from .forward import Call, forward

pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")

BASE = Cell(batch=(1,), kv_heads=1, head_dim=64, dtype="bfloat16")


def cell(**changes) -> Cell:
    return dataclasses.replace(BASE, **changes)


SHAPES = [
    cell(q=1, k=1),
    cell(q=128, k=128, head_dim=128),
    cell(q=127, k=129, head_dim=128, dtype="float16", window=(100, None)),
    cell(q=65, k=300, batch=(2,), kv_heads=2, group=2),
    cell(q=193, k=257),
    cell(q=130, k=130, causal=True, head_dim=128),
    cell(q=200, k=77, causal=True),
    cell(q=70, k=400, causal=True, group=3),
    cell(q=150, k=300, window=(40, 10), dtype="float16"),
    cell(q=150, k=300, window=(130, None), dtype="float16"),
    cell(q=60, k=130, softmax_scale=-0.3, head_dim=128),
    cell(q=20, k=0),
    cell(q=70, k=90, head_dim=8, causal=True),
    cell(q=70, k=90, head_dim=72, head_dim_v=104),  # Q in registers has fewer columns than its row has for it
    cell(q=330, k=200, head_dim=192, head_dim_v=128, causal=True),
    cell(q=330, k=300, head_dim=256, causal=True),
    cell(q=20, k=130, head_dim=128, batch=(3,), q_lengths=(0, 7, 20), kv_lengths=(130, 0, 70), causal=True, q_offset=9),
    cell(q=70, k=150, softcap=3.0, sinks=True, mask="keys", group=2),
    cell(q=70, k=150, segments=3, bias="shared", kv_heads=2),
    cell(q=20, k=0, segments=1, bias="shared", mask="keys", sinks=True),
    cell(q=260, k=300, segments=4, head_dim=128, causal=True, kv_lengths=(170,)),
    cell(q=400, k=200, batch=(2,), head_dim=128, causal=True, q_lengths=(400, 100), kv_lengths=(100, 0), group=2),
]
MODES = {
    "late": Options(completion="late"),
    "early": Options(completion="early"),
    "random": Options(completion="random", order="random", seed=1),
    "strict": Options(strict=True),
}


def compiled(config: Config) -> str:
    """The kernel's PTX, compiled once for all tests."""
    return cubins.get(config).ptx


def window_of(x) -> tuple[int | None, int | None]:
    left, right = x.get("window") or (None, None)
    return left, 0 if x.get("causal") else right


def spec_of(cell: Cell, x) -> AttentionSpec:
    left, right = window_of(x)
    return AttentionSpec(
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        head_dim_v=cell.value_dim,
        group=cell.group,
        mask=MaskSpec(
            has_left=left is not None,
            has_right=right is not None,
            has_q_offset="q_offset" in x,
            has_q_lengths="q_lengths" in x,
            has_kv_lengths="kv_lengths" in x,
            has_segments="q_segment_ids" in x,
            has_dense="mask" in x,
        ),
        has_softcap="softcap" in x,
        has_sinks="sinks" in x,
        bias_dtype=str(x["bias"].dtype) if "bias" in x else None,
    )


def config_of(cell: Cell, x) -> KernelConfig:
    config = forward_config(spec_of(cell, x), "sm_90a")
    assert config is not None
    return config


def extras_of(cell: Cell, x, config: KernelConfig | BackwardConfig) -> dict[str, np.ndarray]:
    """The arrays that a kernel may read beside q, k and v, with kv heads behind the batch."""
    (batch,), kv_heads = cell.batch, cell.kv_heads
    extras = {}
    for name in ("q_offset", "q_lengths", "kv_lengths", "q_segment_ids", "kv_segment_ids"):
        if name in x:
            value = x[name][:, None]
            extras[name] = np.ascontiguousarray(np.broadcast_to(value, (batch, kv_heads, *value.shape[2:])))
    if "q_segment_ids" in x:
        ids = extras["q_segment_ids"], extras["kv_segment_ids"]
        m, n = config.tile_m, config.tile_n
        extras["key_blocks"] = np.asarray(key_blocks(*ids, tile_m=m, tile_n=n))
        extras["query_blocks"] = np.asarray(key_blocks(*reversed(ids), tile_m=n, tile_n=m))
    if "sinks" in x:
        extras["sinks"] = np.ascontiguousarray(np.broadcast_to(x["sinks"], (batch, cell.heads)))
    if "softcap" in x:
        extras["softcap"] = np.array([x["softcap"]], np.float32)
    for name, kind in (("mask", np.uint8), ("bias", None)):
        if name in x:
            array = x[name].reshape(*[1] * (4 - x[name].ndim), *x[name].shape)
            extras[name] = np.ascontiguousarray(array if kind is None else array.astype(kind))
            if array.dtype.itemsize == 2:
                extras[name] = extras[name].view(np.uint16)
    return extras


def call_of(cell: Cell, x, config: KernelConfig) -> Call:
    left, right = window_of(x)
    scale = x.get("softmax_scale")
    q, k, v = (np.ascontiguousarray(x[name]).view(np.uint16) for name in ("q", "k", "v"))
    return Call(
        q=q,
        k=k,
        v=v,
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window_left=left or 0,
        window_right=right or 0,
        extras=extras_of(cell, x, config),
    )


def emulate(cell: Cell, options: Options, seed: int = 0, **changes):
    x = testing.random(cell, seed) | changes
    config = config_of(cell, x)
    out, lse, result = forward(compiled(config), config, call_of(cell, x, config), options)
    return x, out.view(testing.np_dtype(cell.dtype)), lse, result


def assert_exact(x, out: np.ndarray, lse: np.ndarray, dtype: str, exp2_error: float = 0.0) -> None:
    assert_as_exact(
        testing.Forward(out, lse),
        testing.attention(x),
        testing.rounded(x),
        dtype,
        3 if "softcap" in x else 2,
        exp2_error,
    )


def assert_as_exact(got, exact, rough, dtype: str, factor: int, exp2_error: float = 0.0) -> None:
    """`exp2_error`: the largest relative error of a weight, and so the largest error of a row's lse."""
    error = np.abs(got.out.astype(np.float64) - exact.out).max(initial=0)
    assert error <= testing.error_bound(exact.out, rough.out, dtype, factor)
    seen = np.isfinite(exact.lse)
    assert np.array_equal(np.isfinite(got.lse), seen)
    lse_error = exp2_error + 1e-5 * max(1, np.abs(exact.lse[seen]).max(initial=0))
    assert np.abs(got.lse[seen] - exact.lse[seen]).max(initial=0) <= lse_error


@pytest.mark.parametrize("cell", SHAPES, ids=str)
def test_forward_is_attention(cell):
    x, out, lse, _ = emulate(cell, MODES["late"])
    assert_exact(x, out, lse, cell.dtype)


def test_any_share_of_the_weights_may_come_from_a_polynomial():
    some = cell(q=150, k=300, causal=True)
    x, plain, _, _ = emulate(some, MODES["late"])
    config = dataclasses.replace(config_of(some, x), exp2_period=4)
    out, lse, _ = forward(compiled(config), config, call_of(some, x, config), MODES["late"])
    assert not np.array_equal(out, plain.view(out.dtype))
    assert_exact(x, out.view(plain.dtype), lse, some.dtype, exp2_error=8.6e-5)


def test_blocks_without_a_tile_s_segments_are_not_copied():
    documents = cell(q=192, k=768, segments=3)
    q_ids, kv_ids = np.ones((1, 192), np.int32), np.repeat(np.arange(3, dtype=np.int32), (150, 450, 168))[None]
    x, out, lse, result = emulate(documents, MODES["late"], q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    assert_exact(x, out, lse, documents.dtype)
    assert result.stats.total("tma_load_bytes") == (192 + 2 * 4 * 128) * 64 * 2  # Q, four blocks of K and V


def test_keys_beyond_a_length_may_be_nan():
    padded = cell(q=20, k=200, batch=(3,), kv_lengths=(70, 131, 128))
    x, expected, _, _ = emulate(padded, MODES["late"])
    for name in "kv":
        for entry, length in enumerate(x["kv_lengths"]):
            x[name][entry, length:] = np.nan
    _, out, _, _ = emulate(padded, MODES["random"], k=x["k"], v=x["v"])
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_results_do_not_depend_on_when_copies_complete_or_who_runs_first(mode, seed):
    ragged = cell(q=140, k=270, causal=True, head_dim=128)
    _, expected, _, _ = emulate(ragged, MODES["late"], seed)
    options = dataclasses.replace(MODES[mode], seed=seed)
    _, out, _, _ = emulate(ragged, options, seed)
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_the_bit_accurate_matrix_units_agree_with_float32_products():
    small = cell(q=64, k=64)
    x, out, lse, _ = emulate(small, dataclasses.replace(MODES["late"], exact_mma=True))
    assert_exact(x, out, lse, small.dtype)


def test_each_tile_loads_its_keys_once_and_multiplies_them_twice():
    _, _, _, result = emulate(cell(q=128, k=256, head_dim=128, causal=True), MODES["early"])
    tile = 128 * 128
    assert result.stats.total("tma_load_bytes") == 2 * tile * 5
    assert result.stats.total("wgmma_flops") == 2 * 2 * tile * 256
