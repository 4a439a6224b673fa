"""`python -m jax_fa4 emulate`: one random problem through a kernel in the emulator, and what the kernel did."""

from __future__ import annotations

import argparse
import collections
import math
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_fa4 import configs, emulate
from jax_fa4.spec import AttentionSpec, MaskSpec
from jax_fa4.support import why_unsupported

if TYPE_CHECKING:
    from jax_fa4.emulator.stats import Stats

__all__ = ["add_arguments", "report"]

WARPS_OF_GROUP = 4  # a warpgroup has one role
MOST_OPCODES = 12  # of the instruction mix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The problem's sizes, as `attention` has them."""
    parser.add_argument("--arch", default="sm_90a", choices=sorted(configs.ALL), help="GPU architecture")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    for name, default in (("head-dim", 64), ("q-len", 70), ("kv-len", 130), ("heads", 1), ("kv-heads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--causal", action="store_true", help="hide the keys after a query's place")
    parser.add_argument("--seed", type=int, default=0, help="of the problem (default: 0)")
    parser.add_argument(
        "--timeline", type=pathlib.Path, metavar="FILE", help="draw who ran and who waited (.png, .svg)"
    )


def report(options: argparse.Namespace) -> tuple[str, bool]:
    """Runs the problem. Errors against float64 and what each warpgroup did; whether the result is right."""
    from jax_fa4 import testing
    from jax_fa4.emulator.launch import Options

    if options.kv_heads < 1 or options.heads % options.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}")
    if min(options.q_len, options.heads) < 1 or options.kv_len < 0:
        raise ValueError("--q-len and --heads must be at least 1, --kv-len at least 0")
    cell = testing.Cell(
        batch=(1,),
        q=options.q_len,
        k=options.kv_len,
        kv_heads=options.kv_heads,
        group=options.heads // options.kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        causal=options.causal,
    )
    spec = AttentionSpec(
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim,
        group=cell.group,
        mask=MaskSpec(has_right=cell.causal),
    )
    if reason := why_unsupported(spec, options.arch):
        raise ValueError(reason)
    x = testing.random(cell, options.seed)
    result = emulate.forward(
        *(x[name] for name in "qkv"),
        spec=spec,
        arch=options.arch,
        softmax_scale=1 / math.sqrt(cell.head_dim),
        options=Options(record_timeline=options.timeline is not None),
    )
    exact, rough = testing.attention(x), testing.rounded(x)
    bound = testing.error_bound(exact.out, rough.out, cell.dtype)
    error = _largest(result.out, exact.out)
    found = f"out: largest error {error:.2g}, at most {bound:.2g} is right; lse: {_largest(result.lse, exact.lse):.2g}"
    parts = [found, *_tables(result.runs[0].stats)]
    timeline = result.runs[0].timeline
    if timeline is not None:
        timeline.draw(str(options.timeline))
        parts.append(f"timeline: {options.timeline}")
    return "\n\n".join(parts), error <= bound


def _largest(found: Any, exact: Any) -> float:
    """Largest difference; equal infinities don't differ, a NaN does."""
    found = np.asarray(found, np.float64)
    with np.errstate(invalid="ignore"):
        return float(np.where(found == exact, 0.0, np.abs(found - exact)).max(initial=0.0))


def _tables(stats: Stats) -> tuple[str, str]:
    """Counts of all warpgroups (of warp instructions), and the commonest opcodes."""
    names = ("instructions", "MUFU", "FMA", "TMA load B", "TMA store B", "MMA FLOP")
    rows = ["warpgroup" + "".join(f"{name:>14}" for name in names)]
    for group, columns in sorted(_by_group(stats).items()):
        rows.append(f"{group:>9}" + "".join(f"{columns[name]:>14,}" for name in names))
    mix: collections.Counter[str] = collections.Counter()
    for opcodes in stats.opcodes.values():
        for opcode, count in opcodes.items():
            mix[opcode.partition(".")[0]] += count
    shares = (f"{name} {count / stats.instructions:.1%}" for name, count in mix.most_common(MOST_OPCODES))
    return "\n".join(rows), f"instruction mix: {', '.join(shares)}"


def _by_group(stats: Stats) -> dict[int, collections.Counter[str]]:
    from jax_fa4.emulator.stats import MUFU

    groups: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for warp, opcodes in stats.opcodes.items():
        columns, amounts = groups[warp // WARPS_OF_GROUP], stats.amounts[warp]
        for opcode, count in opcodes.items():
            base = opcode.partition(".")[0]
            columns["instructions"] += count
            columns["MUFU"] += count * (base in MUFU)
            columns["FMA"] += count * (base == "fma")
        columns["TMA load B"] += amounts["tma_load_bytes"]
        columns["TMA store B"] += amounts["tma_store_bytes"]
        columns["MMA FLOP"] += amounts["wgmma_flops"] + amounts["tcgen05_flops"]
    return groups
