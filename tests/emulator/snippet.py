"""Runs a few lines of PTX: wraps them into an entry with plenty of registers, and returns what they store."""

from __future__ import annotations

import numpy as np

from jax_fa4.emulator.launch import Buffer, Launch, Options, Parameter, TensorMap
from jax_fa4.emulator.run import Result, run

HEADER = """
.version 9.4
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry snippet({parameters})
{{
.reg .pred %p<64>;
.reg .b16 %h<64>;
.reg .b32 %r<512>;
.reg .b64 %d<128>;
.reg .b128 %q<8>;
"""

DECLARATIONS = {
    Buffer: ".param .u64 .ptr .global .align 16 p{}",
    TensorMap: ".param .align 64 .b8 p{}[128]",
}


def _declare(index: int, parameter: Parameter) -> str:
    if isinstance(parameter, bytes):
        return f".param .align 8 .b8 p{index}[{len(parameter)}]"
    return DECLARATIONS[type(parameter)].format(index)


def module_text(body: str, params: tuple[Parameter, ...], target: str = "sm_90a") -> str:
    """A module whose only entry is `body` (without the closing `ret`); parameters are p0, p1, ..."""
    parameters = ", ".join(_declare(index, parameter) for index, parameter in enumerate(params))
    return HEADER.format(target=target, parameters=parameters) + body + "\nret;\n}\n"


def run_body(
    body: str,
    *,
    params: tuple[Parameter, ...] = (),
    threads: int = 32,
    smem: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    options: Options | None = None,
    target: str = "sm_90a",
) -> Result:
    """Run `body`; arrays of Buffer parameters change in place. Registers: %p %h %r %d %q; shared memory: smem."""
    launch = Launch(grid=grid, block=threads, cluster=cluster, smem_bytes=smem, params=params)
    return run(module_text(body, params, target), launch, options)


def evaluate(instruction: str, inputs: dict[str, np.ndarray], output: str, dtype, *, lanes: int = 32) -> np.ndarray:
    """The values of register `output` after `instruction`, one a lane, when `inputs` (register -> values) are loaded
    first.

    Registers are named by kind and number: "r1", "d2", "h3", "p4".
    """
    bits = {"r": 32, "d": 64, "h": 16, "p": 32}
    result = np.zeros(lanes, {"r": np.uint32, "d": np.uint64, "h": np.uint16, "p": np.uint32}[output[0]])
    arrays = [result]
    lines = ["mov.u32 %r500, %tid.x;", "ld.param.b64 %d100, [p0];"]
    for index, (name, values) in enumerate(inputs.items(), start=1):
        width = bits[name[0]]
        lines.append(f"ld.param.b64 %d{100 + index}, [p{index}];")
        lines.append(f"mad.wide.u32 %d{100 + index}, %r500, {width // 8}, %d{100 + index};")
        if name[0] == "p":
            lines.append(f"ld.global.b32 %r501, [%d{100 + index}];\nsetp.ne.b32 %{name}, %r501, 0;")
            arrays.append(np.ascontiguousarray(values).astype(np.uint32))
        else:
            lines.append(f"ld.global.b{width} %{name}, [%d{100 + index}];")
            arrays.append(np.ascontiguousarray(values))
    lines.append(instruction)
    if output[0] == "p":
        lines.append(f"selp.b32 %r502, 1, 0, %{output};")
    stored = "r502" if output[0] == "p" else output
    lines.append(f"mad.wide.u32 %d100, %r500, {bits[output[0]] // 8}, %d100;")
    lines.append(f"st.global.b{bits[output[0]]} [%d100], %{stored};")
    run_body("\n".join(lines), params=tuple(Buffer(array) for array in arrays))
    return result.view(dtype)
