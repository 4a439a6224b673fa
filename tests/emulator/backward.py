"""One backward in the emulator: its three kernels one after the other, numpy arrays in, numpy arrays out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_fa4.configs import BackwardConfig, Config
from jax_fa4.emulator.launch import Launch, Options
from jax_fa4.emulator.run import Result, run

from .forward import dense_strides, parameters


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """Operands [batch, length, heads, head_dim] as 16-bit patterns, statistics [batch, heads, q_len], scalars.

    `extras` holds what else the kernels read, by name, as the forward's does.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    dout: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray
    softmax_scale: float
    window_left: int = 0
    window_right: int = 0
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def backward(
    ptx_of: Callable[[Config], str], config: BackwardConfig, call: Call, options: Options | None = None
) -> tuple[dict[str, np.ndarray], list[Result]]:
    """dq, dk and dv (16-bit patterns, by name; poisoned with NaN before), and the results of the runs."""
    batch, q_len, q_heads, _ = call.q.shape
    kv_len, kv_heads = call.k.shape[1:3]
    padded = -(-q_len // config.tile_m) * config.tile_m
    arrays: dict[str, Any] = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    arrays |= call.extras
    arrays |= {name: np.array([arrays[name]], np.int32) for name in ("window_left", "window_right")}
    arrays["softmax_scale"] = np.array([call.softmax_scale], np.float32)
    arrays |= {f"d{name}": np.full(arrays[name].shape, 0xFFFF, np.uint16) for name in ("q", "k", "v")}
    arrays |= {name: np.full((batch, q_heads, padded), np.nan, np.float32) for name in ("lse_log2", "delta")}
    arrays["dq_turn"] = np.full((batch, q_heads, padded // config.tile_m, config.dq_parts), -1, np.int32)
    arrays["dq_done"] = np.full((batch, kv_heads), -1, np.int32)
    arrays["dq_sum"] = np.full((batch, q_heads, padded, config.sum_columns), np.nan, np.float32)
    sizes = {"q_len": q_len, "q_heads": q_heads, "batch": batch, "kv_len": kv_len, "kv_heads": kv_heads}
    sizes["dq_adders"] = -(-kv_len // config.tile_n) * config.tile_adders
    sizes |= dense_strides(call.extras)

    results = []
    for kernel in config.kernels:
        tiles = (
            -(-kv_len // config.tile_n) * kv_heads * config.cluster_ctas
            if kernel is config
            else padded // config.tile_m * q_heads
        )
        if tiles * batch == 0:
            continue  # as a launch plan does with an empty grid
        params = parameters(kernel, arrays, sizes)
        grid = (tiles * batch, 1, 1)
        cluster = (config.cluster_ctas if kernel is config else 1, 1, 1)
        shape = Launch(grid=grid, block=kernel.threads, cluster=cluster, params=params, smem_bytes=kernel.smem_bytes)
        results.append(run(ptx_of(kernel), shape, options))
    return {name: arrays[name] for name in ("dq", "dk", "dv")}, results
