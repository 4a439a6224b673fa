"""`python -m jax_fa4 emulate`: one random problem through its kernels in the emulator, and what the kernels did."""

from __future__ import annotations

import argparse
import collections
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_fa4 import arguments, configs, emulate, testing

if TYPE_CHECKING:
    from jax_fa4.emulator.stats import Stats

__all__ = ["add_arguments", "report"]

WARPS_OF_GROUP = 4  # a warpgroup has one role
MOST_OPCODES = 12  # of the instruction mix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The problem's sizes and options, as `attention` has them."""
    parser.add_argument("--arch", default="sm_90a", choices=sorted(configs.ALL), help="GPU architecture")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    sizes = {"batch": 1, "head-dim": 64, "q-len": 70, "kv-len": 130, "heads": 1, "kv-heads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--head-dim-v", type=int, help="default: the head dim")
    parser.add_argument("--layout", default="BTNH", choices=("BTNH", "BNTH"))
    parser.add_argument("--softmax-scale", type=float, help="default: 1 / sqrt(head dim)")
    parser.add_argument("--causal", action="store_true", help="hide the keys after a query's place")
    parser.add_argument("--window-left", type=int, help="how many keys before its place a query sees")
    parser.add_argument("--window-right", type=int, help="how many keys behind its place a query sees")
    parser.add_argument("--q-offset", type=int, help="place of query 0 among the keys of the first batch entry")
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--sinks", action="store_true")
    for name in ("bias", "mask"):
        parser.add_argument(f"--{name}", choices=("full", "keys", "shared"), help="a random one, with these axes")
    parser.add_argument("--segments", type=int, help="how many there are in a sequence")
    for name in ("q-lengths", "kv-lengths"):
        parser.add_argument(f"--{name}", type=arguments.numbers, help="one a batch entry, with commas between")
    parser.add_argument("--gradients", action="store_true", help="run the kernels of the gradients, too")
    parser.add_argument("--seed", type=arguments.at_least(0), default=0, help="of the problem (default: 0)")
    parser.add_argument(
        "--timeline",
        type=arguments.picture_to_write,
        metavar="FILE",
        help="draw who ran and who waited (.png, .svg), in the forward",
    )


def report(options: argparse.Namespace) -> tuple[str, bool]:
    """Runs the problem. Errors against float64 and what each warpgroup did; whether the results are right.

    Raises ValueError for sizes that no call has, NotImplementedError where there is no kernel.
    """
    from jax_fa4.emulator.launch import Options
    from jax_fa4.export import target_arch

    cell = _cell(options)
    x = testing.random(cell, options.seed)
    with target_arch(options.arch), emulate.recording(Options(record_timeline=options.timeline is not None)) as ran:
        found = _gradients(x, options.seed) if options.gradients else _forward(x)
    exact, rough = testing.attention(x), testing.rounded(x)
    wanted: dict[str, tuple[Any, Any]] = {"out": (exact.out, rough.out)}
    if options.gradients:
        dout, dlse = _cotangents(exact, options.seed)
        dout = dout.astype(testing.np_dtype(cell.dtype))
        exactly, roughly = testing.gradients(x, dout, dlse), testing.rounded_gradients(x, dout, dlse)
        wanted |= {f"d{name}": (exactly[name], roughly[name]) for name in "qkv"}
    factor = 3 if cell.softcap is not None else 2  # tanh.approx is not as exact as the rounded formula's
    lines, are_right = [], True
    for name, (right, rounded) in wanted.items():
        error, bound = _largest(found[name], right), testing.error_bound(right, rounded, cell.dtype, factor)
        are_right &= error <= bound
        lines.append(f"{name}: largest error {error:.2g}, at most {bound:.2g} is right")
    lines.append(f"lse: largest error {_largest(found['lse'], exact.lse):.2g}")
    parts = ["\n".join(lines)]
    for launch in ran:
        parts += [launch.entry, *_tables(launch.result.stats)]
    if ran and (timeline := ran[0].result.timeline) is not None:
        timeline.draw(str(options.timeline))
        parts.append(f"timeline: {options.timeline}")
    return "\n\n".join(parts), are_right


def _cell(options: argparse.Namespace) -> testing.Cell:
    if options.kv_heads < 1 or options.heads % options.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}")
    if min(options.batch, options.q_len, options.heads) < 1 or options.kv_len < 0:
        raise ValueError("--batch, --q-len and --heads must be at least 1, --kv-len at least 0")
    for name in ("q_lengths", "kv_lengths"):
        lengths = getattr(options, name)
        if lengths is not None and len(lengths) != options.batch:
            raise ValueError(f"--{name.replace('_', '-')} must name {options.batch} lengths, got {len(lengths)}")
    same = "head_dim head_dim_v dtype layout softmax_scale causal q_offset softcap sinks bias mask segments q_lengths"
    return testing.Cell(
        batch=(options.batch,),
        q=options.q_len,
        k=options.kv_len,
        kv_heads=options.kv_heads,
        group=options.heads // options.kv_heads,
        window=(options.window_left, options.window_right),
        kv_lengths=options.kv_lengths,
        **{name: getattr(options, name) for name in same.split()},
    )


def _forward(x: dict[str, Any]) -> dict[str, Any]:
    import jax_fa4

    out, lse = jax_fa4.attention(**x, implementation="emulate", return_lse=True)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def _gradients(x: dict[str, Any], seed: int) -> dict[str, Any]:
    import jax

    import jax_fa4

    others = {name: value for name, value in x.items() if name not in ("q", "k", "v")}
    attend = functools.partial(jax_fa4.attention, **others, implementation="emulate", return_lse=True)
    (out, lse), pull_back = jax.vjp(attend, x["q"], x["k"], x["v"])
    dout, dlse = _cotangents(testing.Forward(np.asarray(out), np.asarray(lse)), seed)
    dq, dk, dv = pull_back((dout.astype(out.dtype), dlse))
    return {"out": out, "lse": lse, "dq": np.asarray(dq), "dk": np.asarray(dk), "dv": np.asarray(dv)}


def _cotangents(results: testing.Forward, seed: int) -> tuple[Any, Any]:
    """Random ones of both results, float32."""
    rng = np.random.default_rng(seed + 1)
    dout, dlse = (rng.standard_normal(a.shape, np.float32) for a in results)
    return dout, dlse


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
