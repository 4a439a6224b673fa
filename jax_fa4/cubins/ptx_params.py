"""A kernel's parameters and block size, read from the PTX that it was assembled from (PTX ISA, kernel parameters and
performance-tuning directives), and compared with what a launch plan passes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jax_fa4.configs.params import KernelParam, MapParam, PointerParam, ScalarParam
from jax_fa4.cubins.cubin import Cubin, Param
from jax_fa4.plan.params import Param as Passed
from jax_fa4.plan.params import Pointer, Record, Scalar, TensorMap
from jax_fa4.plan.plan import Launch

__all__ = ["check_config", "check_params", "params_of", "threads_of"]

TENSOR_MAP_BYTES = 128  # CUtensorMap, which the driver wants aligned to 64
TENSOR_MAP_ALIGN = 64
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[bsuf](?P<bits>\d+)"
    r"(?P<pointer>\s+\.ptr(?:\s+\.\w+)*?(?:\s+\.align\s+(?P<pointee>\d+))?)?\s+(?P<name>[\w$%]+)(?:\s*\[(?P<count>\d+)\])?"
)


def params_of(ptx: str, entry: str) -> tuple[Param, ...]:
    """Parameters of the kernel `entry`, in order. Raises ValueError for an absent entry or an unknown declaration."""
    declarations, _ = _header_of(ptx, entry)
    return tuple(_param(" ".join(text.split()), entry) for text in declarations.split(",") if text.strip())


def threads_of(ptx: str, entry: str) -> int | None:
    """Threads of a CTA if the kernel demands a number (`.reqntid`), else None."""
    _, directives = _header_of(ptx, entry)
    required = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    if required is None:
        return None
    x, y, z = (int(extent or 1) for extent in required.groups())
    return x * y * z


class Expected(NamedTuple):
    """What one side of a launch believes a parameter to be."""

    kind: str  # as in Param
    size: int  # bytes
    pointee_align: int | None = None  # bytes that the address is sure to be aligned to; None: not said
    text: str = ""  # for messages


def check_config(params: Sequence[Param], expected: Sequence[KernelParam], kernel: str) -> None:
    """Raises ValueError, with both sides in full, unless the PTX has the parameters that its config announces."""
    kinds = {MapParam: "tensor_map", PointerParam: "pointer", ScalarParam: "bytes"}
    announced = [Expected(kinds[type(p)], p.size, text=f"{p.name}: {kinds[type(p)]}[{p.size}]") for p in expected]
    if wrong := _differences(params, announced):
        raise ValueError("\n  ".join([f"the parameters of kernel {kernel} are not those of its config:", *wrong]))


def check_params(cubin: Cubin, launch: Launch) -> None:
    """Raises ValueError, with both sides in full, unless the launch passes what the kernel declares."""
    facts = (
        ("cubin", cubin.key, launch.cubin),
        ("entry", cubin.entry, launch.entry),
        ("threads", cubin.threads, launch.block),
        ("dynamic shared memory", cubin.smem_bytes, launch.smem_bytes),
    )
    wrong = [f"{what}: the kernel has {has}, the plan {passed}" for what, has, passed in facts if has != passed]
    wrong += _differences(cubin.params, [_passed(p) for p in launch.params])
    if wrong:
        raise ValueError("\n  ".join([f"the launch plan does not fit the kernel {cubin.entry}:", *wrong]))


def _passed(param: Passed) -> Expected:
    match param:
        case TensorMap():
            return Expected("tensor_map", param.size, text=f"tensor_map[{param.size}]")
        case Pointer():
            return Expected("pointer", param.size, param.align, f"pointer[{param.size}] aligned to {param.align}")
        case Scalar():
            return Expected("bytes", param.size, text=f"{param.dtype}[{param.size}]")
        case Record():
            return Expected("bytes", param.size, text=f"struct[{param.size}]")


def _differences(declared: Sequence[Param], expected: Sequence[Expected]) -> list[str]:
    """A line for every parameter if any differs, else nothing."""
    pairs = list(itertools.zip_longest(declared, expected))
    if all(_agree(d, e) for d, e in pairs):
        return []
    lines = []
    for n, (d, e) in enumerate(pairs):
        aligned = f" aligned to {d.pointee_align}" if d and d.kind == "pointer" else ""
        ptx = f"{d.kind}[{d.size}]{aligned}" if d else "nothing"
        mark = "" if _agree(d, e) else "   <- differs"
        lines.append(f"parameter {n}: PTX {ptx}, expected {e.text if e else 'nothing'}{mark}")
    return lines


def _agree(declared: Param | None, expected: Expected | None) -> bool:
    if declared is None or expected is None or declared.size != expected.size:
        return False
    if expected.kind == "pointer" and declared.kind == "bytes":
        return True  # the compiler may lower a pointer to a plain 64-bit word
    known = expected.pointee_align is None or expected.pointee_align >= declared.pointee_align
    return declared.kind == expected.kind and known


def _header_of(ptx: str, entry: str) -> tuple[str, str]:
    """(parameter list, performance directives) of an entry."""
    found = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\(([^)]*)\))?([^{{;]*)", _COMMENT.sub(" ", ptx))
    if found is None:
        raise ValueError(f"the PTX has no entry {entry}")
    return found[1] or "", found[2]


def _param(text: str, entry: str) -> Param:
    found = _PARAM.fullmatch(text)
    if found is None:
        raise ValueError(f"kernel {entry}: parameter declaration not understood: {text}")
    element = int(found["bits"]) // 8
    size = element * int(found["count"] or 1)
    align = int(found["align"] or element)
    kind: Literal["tensor_map", "pointer", "bytes"]
    if found["pointer"]:
        kind = "pointer"
    elif found["count"] and size == TENSOR_MAP_BYTES and align >= TENSOR_MAP_ALIGN:
        kind = "tensor_map"
    else:
        kind = "bytes"
    return Param(
        name=found["name"].removeprefix(f"{entry}_"),
        size=size,
        align=align,
        kind=kind,
        pointee_align=int(found["pointee"] or 1),
    )
