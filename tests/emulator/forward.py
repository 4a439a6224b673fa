"""One call of a forward kernel in the emulator: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_fa4.configs import KernelConfig, MapParam, PointerParam, ScalarParam
from jax_fa4.emulator.launch import Buffer, Launch, Options, Parameter, TensorMap
from jax_fa4.emulator.run import Result, run

LANES_OF_NAME = {"bfloat16": "bf16", "float16": "f16"}
LENGTH_AXIS = {"q_len": 1, "kv_len": 1, "q_heads": 2, "kv_heads": 2, "batch": 0, "head_dim": 3, "head_dim_v": 3}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """Operands [batch, length, heads, head_dim] as 16-bit patterns, and what else the kernel reads, by name.

    A mask or a bias is [batch or 1, q_heads or 1, q_len or 1, kv_len]; other arrays are as the kernel wants them.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    softmax_scale: float
    window_left: int = 0
    window_right: int = 0
    multiprocessors: int = 2  # of the device that runs it
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def launch(config: KernelConfig, call: Call) -> tuple[Launch, np.ndarray, np.ndarray]:
    """The launch, and the arrays that it fills: out (16-bit patterns) and lse, both poisoned with NaN."""
    batch, q_len, q_heads, _ = call.q.shape
    out = np.full((batch, q_len, q_heads, config.head_dim_v), 0xFFFF, np.uint16)
    lse = np.full((batch, q_heads, q_len), np.nan, np.float32)
    arrays: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse}
    arrays |= call.extras
    arrays["softmax_scale"] = np.array([call.softmax_scale], np.float32)
    arrays["window_left"] = np.array([call.window_left], np.int32)
    arrays["window_right"] = np.array([call.window_right], np.int32)
    sizes = {"q_len": q_len, "q_heads": q_heads, "batch": batch}
    sizes |= {"kv_len": call.k.shape[1], "kv_heads": call.k.shape[2]}
    sizes |= dense_strides(call.extras)
    for name, axis in (("batch", 0), ("row", 1), ("head", 2)):
        sizes[f"out_{name}_stride"] = out.strides[axis] // out.itemsize
    params = parameters(config, arrays, sizes)
    ctas = -(-q_len // config.tile_m) * q_heads * batch
    cluster = config.cluster_ctas
    if config.walks:
        ctas = min(ctas, max(call.multiprocessors // cluster, 1))
    shape = Launch(
        grid=(ctas * cluster, 1, 1),
        block=config.threads,
        cluster=(cluster, 1, 1),
        params=params,
        smem_bytes=config.smem_bytes,
    )
    return shape, out, lse


def dense_strides(extras: dict[str, np.ndarray]) -> dict[str, int]:
    """Strides of a mask and a bias in elements, 0 along axes that have one element for all."""
    strides = {}
    for name in ("mask", "bias"):
        if name in extras:
            shape = extras[name].shape
            for axis, size in enumerate(shape[:3]):
                stride = int(np.prod(shape[axis + 1 :])) if size > 1 else 0
                strides[f"{name}_{('batch', 'head', 'row')[axis]}_stride"] = stride
    return strides


def parameters(config, arrays: dict[str, np.ndarray], sizes: dict[str, int]) -> tuple[Parameter, ...]:
    """What `config.params` lists, bound to arrays [batch, length, heads, head_dim] and numbers by name."""
    return tuple(parameter(param, arrays, sizes) for param in config.params)


def parameter(param, arrays: dict[str, np.ndarray], sizes: dict[str, int]):
    """A kernel parameter as the emulator takes it, from arrays and extents by name."""
    if isinstance(param, PointerParam):
        return Buffer(arrays[param.name])
    if isinstance(param, ScalarParam):
        return np.dtype(param.dtype).type(sizes[param.name]).tobytes()
    assert isinstance(param, MapParam)  # the third kind
    array = arrays[param.name]
    if not array.size:  # a launch plan passes a harmless map for an empty array; the kernel copies nothing through it
        array = np.zeros([max(extent, 1) for extent in array.shape], array.dtype)
    axes = [LENGTH_AXIS[name] for name in param.dims]
    return TensorMap(
        buffer=Buffer(array),
        dtype=LANES_OF_NAME[param.dtype],
        dims=tuple(array.shape[axis] for axis in axes),
        strides=tuple(array.strides[axis] for axis in axes[1:]),
        box=param.box,
        swizzle=f"{param.swizzle}B",
    )


def forward(
    ptx: str, config: KernelConfig, call: Call, options: Options | None = None
) -> tuple[np.ndarray, np.ndarray, Result]:
    """out (16-bit patterns), lse and the run's result."""
    shape, out, lse = launch(config, call)
    result = run(ptx, shape, options)
    return out, lse, result
