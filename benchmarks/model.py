"""How fast a kernel could be: clocks that each unit of an SM needs, beside what a benchmark measured.

    python -m jax_fa4 bench --cells prefill --out found.json
    python benchmarks/model.py found.json --clocks limits.json --out model.json    # Hopper, predicted beside measured
    python benchmarks/model.py --arch sm_100a                 # Blackwell: a model, nothing of it was measured

Of one step, the product of a tile of queries with a tile of keys, the tensor cores need the FLOP over their rate, the
special function units an exponential for each score, shared memory the bytes that operands and copies move, the
float32 units and the schedulers a slot for each instruction of the kernel's innermost loops, which are counted in its
machine code. The largest is the least that a step can take; a sum is what it takes if tensor cores and softmax never
work side by side. Steps make tiles, and tiles are dealt to SMs as they become free. The clock is the one that power
allows: of each call the one that `benchmarks/limits.py` read, or else the limit, of tensor cores that are always busy.
Needs the kernels in the cache, or their compiler, and cuobjdump; no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax_fa4 import configs
from jax_fa4.bench.cells import GRID, Cell, Direction
from jax_fa4.bench.report import from_json
from jax_fa4.bench.run import Row
from jax_fa4.configs import BackwardConfig, KernelConfig
from jax_fa4.configs.blackwell import ForwardSm100Config
from jax_fa4.configs.config import MMA_COLUMNS
from jax_fa4.configs.head_splits import head_splits
from jax_fa4.cubins import get
from jax_fa4.cubins.report import Resources, resources_of
from jax_fa4.spec import AttentionSpec, MaskSpec

WARPGROUP_WARPS = 4
WARPGROUP_ROWS = 64
WARPGROUPS = 2  # consumers of a backward
LANES = 32
FLOAT32 = {"FFMA": 1, "FADD": 1, "FMUL": 1, "FFMA2": 2, "FADD2": 2, "FMUL2": 2}  # slots of the float32 units, by opcode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU: what an SM does in a clock. `limit` is in TFLOP/s: products alone, at the clock that power allows them."""

    sms: int
    gigahertz: float
    limit: float
    tensor_flop: int  # 16-bit products, float32 sums
    exponentials: int
    smem_bytes: int = 128
    instructions: int = 4  # of warps; as many of them may be float32 arithmetic


# The H200 is limited at 1.6 GHz: calls of 4k and more that keep its tensor cores busy for 80% ran at 1.39 to 1.60.
MACHINES = {
    "sm_90a": Machine(sms=132, gigahertz=1.98, limit=132 * 4096 * 1.6e-3, tensor_flop=4096, exponentials=16),  # H200
    "sm_100a": Machine(sms=148, gigahertz=1.85, limit=2250, tensor_flop=8192, exponentials=16),  # B200, by datasheet
    "sm_103a": Machine(sms=148, gigahertz=1.85, limit=2250, tensor_flop=8192, exponentials=32),  # B300, by datasheet
}
NOTHING_MEASURED = "A model of {}: nothing here was measured."
TILE_CLOCKS = 4000  # of a tile beside its steps: first loads, last store. d64 of 1024 against 16384 keys, 2026-11-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Clocks of one step on each unit."""

    tensor: float
    exponentials: float
    float32: float
    smem: float
    issue: float

    @property
    def units(self) -> dict[str, float]:
        """By name."""
        return dataclasses.asdict(self)

    @property
    def bound(self) -> str:
        """The unit that needs most."""
        return max(self.units, key=self.units.__getitem__)

    @property
    def overlapped(self) -> float:
        """Clocks if all other units work beside that one."""
        return self.units[self.bound]

    @property
    def serial(self) -> float:
        """Clocks if the tensor cores wait for the rest and the rest for them."""
        return self.tensor + max(self.exponentials, self.float32, self.issue)


class Share(NamedTuple):
    """A loop, the warps of a CTA that run it, and how many steps each pass of theirs makes."""

    loop: Counter[str]
    warps: int
    steps: int = 1


def instruction_clocks(shares: Iterable[Share], machine: Machine) -> dict[str, float]:
    """What a step takes of schedulers and float32 units."""
    issue = sum(share.loop.total() * share.warps / share.steps for share in shares)
    float32 = sum(
        slots * share.loop[opcode] * share.warps / share.steps for share in shares for opcode, slots in FLOAT32.items()
    )
    return {"issue": issue / machine.instructions, "float32": float32 / machine.instructions}


def lean_loop(resources: Resources, warps: int, scores: int) -> Share:
    """The loop of softmax with fewest instructions a step: no masks. Unrolling shows in its exponentials.

    A few of the special function unit's results are something else, such as quotients of whole numbers.
    """
    exponentials = scores / (warps * LANES)
    shares = [
        Share(loop, warps, max(round(loop["MUFU"] / exponentials), 1))
        for loop in resources.loops
        if loop["MUFU"] >= exponentials / 2
    ]
    return min(shares, key=lambda share: share.loop.total() / share.steps)


def forward_step(config: KernelConfig, resources: Resources, machine: Machine) -> Step:
    """tile_m queries by tile_n keys: two products, of which q and k, and v, come from shared memory.

    Some columns of q may be held in registers.
    """
    m, n, d, dv = config.tile_m, config.tile_n, config.columns, config.v_columns
    operands = m * (d - MMA_COLUMNS * config.q_register_steps) + config.warpgroups * n * (
        d + dv
    )  # a warpgroup reads its own rows and all keys
    copied = n * (d + dv)
    shares = [lean_loop(resources, config.warpgroups * WARPGROUP_WARPS, m * n)]
    return Step(
        tensor=2 * m * n * (d + dv) / machine.tensor_flop,
        exponentials=m * n / machine.exponentials,
        smem=2 * (operands + copied) / machine.smem_bytes,
        **instruction_clocks(shares, machine),
    )


def forward_step_sm100(config: ForwardSm100Config, resources: Resources, machine: Machine) -> Step:
    """A CTA's tiles of queries by tile_n keys. p is in tensor memory; some exponentials are polynomials.

    A CTA of a pair reads and loads half of k and v.
    """
    m, n, d, dv = config.q_tiles * config.map_rows, config.tile_n, config.columns, config.v_columns
    copied = n * (d + dv) / config.cta_group
    operands = m * d + config.q_tiles * copied
    softmax = lean_loop(resources, config.q_tiles * WARPGROUP_WARPS, m * n)
    correction = min((loop for loop in resources.loops if loop["LDTM"] and not loop["MUFU"]), key=Counter.total)
    products = min((loop for loop in resources.loops if loop["UTCHMMA"]), key=Counter.total)
    shares = [softmax, Share(correction, WARPGROUP_WARPS), Share(products, 1)]
    return Step(
        tensor=2 * m * n * (d + dv) / machine.tensor_flop,
        exponentials=softmax.loop["MUFU"] / softmax.steps * softmax.warps * LANES / machine.exponentials,
        smem=2 * (operands + copied) / machine.smem_bytes,
        **instruction_clocks(shares, machine),
    )


def backward_step(config: BackwardConfig, resources: Resources, machine: Machine) -> Step:
    """tile_m queries by a CTA's share of tile_n keys: five products.

    ds and dq leave through shared memory, dq in float32. The traffic of CTAs that share a tile of keys is that of one.
    """
    m, n, d, dv = config.tile_m, config.tile_n, config.columns, config.v_columns
    dk, dv_columns, warpgroups, ctas = config.dk_columns, config.dv_columns, WARPGROUPS, config.key_ctas
    held = MMA_COLUMNS * (config.k_register_steps + config.v_register_steps)
    scores = n * (d + dv - held) + warpgroups * m * (d + dv)  # k and v by rows, but what is held; q and dout whole
    gradients = warpgroups * m * (dk + dv_columns)  # p and ds come from registers
    readers = 1 if config.is_wide else warpgroups * WARPGROUP_ROWS // m  # of the same rows of ds
    dq = readers * m * n + m // WARPGROUP_ROWS * n * d  # ds by rows, with all of k
    moved = m * (d + dv) + m * n + config.dq_bytes  # q and dout arrive, ds is written, dq written and read
    depth = MMA_COLUMNS * (config.k_steps + config.v_steps)
    return Step(
        tensor=2 * m * n * (depth + d + dk + dv_columns) / ctas / machine.tensor_flop,
        exponentials=m * n / ctas / machine.exponentials,
        smem=2 * (scores + gradients + dq + moved) / ctas / machine.smem_bytes,
        **instruction_clocks([lean_loop(resources, warpgroups * WARPGROUP_WARPS, m * n // ctas)], machine),
    )


def makespan(tiles: Iterable[float], workers: int) -> float:
    """When the last tile ends, if each goes to the worker that is free first."""
    free = [0.0] * workers
    for clocks in tiles:
        heapq.heapreplace(free, free[0] + clocks)
    return max(free)


def steps_of_tiles(cell: Cell, tile_m: int, tile_n: int, *, of_keys: bool) -> list[int]:
    """Steps of each tile of queries of one head, or of each tile of keys, in which some query sees some key."""
    left, right = cell.window
    right = 0 if cell.causal else right
    shift = cell.kv_len - cell.q_len
    if of_keys:  # a key sees the queries that see it
        left, right, shift = right, left, -shift
        own, other, own_tile, other_tile = cell.kv_len, cell.q_len, tile_n, tile_m
    else:
        own, other, own_tile, other_tile = cell.q_len, cell.kv_len, tile_m, tile_n
    counts = []
    for start in range(0, own, own_tile):
        last = min(start + own_tile, own) - 1
        low = 0 if left is None else max(start + shift - left, 0)
        high = other if right is None else min(last + shift + right + 1, other)
        counts.append(max(math.ceil(high / other_tile) - low // other_tile, 0))
    return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one direction of a cell, in TFLOP/s."""

    step: Step
    tile: str
    overlapped: float
    serial: float


def predict(cell: Cell, direction: Direction, arch: str, machine: Machine) -> Prediction | None:
    """None where there is no kernel."""
    spec = AttentionSpec(
        dtype="bfloat16",
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
        group=cell.q_heads // cell.kv_heads,
        mask=MaskSpec(has_left=cell.window[0] is not None, has_right=cell.causal or cell.window[1] is not None),
    )
    if direction == "forward":
        forward = configs.forward_config(spec, arch)
        if forward is None:
            return None
        step_of = forward_step_sm100 if isinstance(forward, ForwardSm100Config) else forward_step
        step, tile = step_of(forward, _resources(forward), machine), (forward.tile_m, forward.tile_n)
        ctas = forward.cluster_ctas
        counts = steps_of_tiles(cell, *tile, of_keys=False) * (cell.batch * cell.q_heads)
    else:
        backward = configs.backward_config(spec, arch)
        if backward is None:
            return None
        step, tile = backward_step(backward, _resources(backward), machine), (backward.tile_m, backward.tile_n)
        ctas, kv_heads = 1, cell.batch * cell.kv_heads
        splits = head_splits(backward, q_len=cell.q_len, kv_len=cell.kv_len, group=spec.group, kv_heads=kv_heads)
        heads = math.ceil(spec.group / splits)
        of_heads = [heads * count for count in steps_of_tiles(cell, *tile, of_keys=True)]
        counts = of_heads * (kv_heads * splits * backward.key_ctas)
    counts.sort(reverse=True)

    def speed(clocks_a_step: float) -> float:
        clocks = makespan((count * clocks_a_step + TILE_CLOCKS for count in counts), machine.sms // ctas)
        return min(cell.work(direction) * machine.gigahertz * 1e9 / clocks / 1e12, machine.limit)

    return Prediction(
        step=step, tile="{}x{}".format(*tile), overlapped=speed(step.overlapped), serial=speed(step.serial)
    )


@functools.cache
def _resources(config: KernelConfig | BackwardConfig) -> Resources:
    return resources_of(get(config))


Clocks = Mapping[tuple[str, str], float]  # GHz of a cell's name and a direction


def clocks_of(text: str) -> Clocks:
    """Those that `limits.py --out` wrote."""
    return {(kernel["cell"], kernel["direction"]): kernel["GHz"] for kernel in json.loads(text)["kernels"]}


def compare(
    rows: Iterable[Row], arch: str, machine: Machine, clocks: Clocks = MappingProxyType({})
) -> list[dict[str, Any]]:
    """A record for each row that has a kernel, with the measured speed where there is one.

    Where a row's clock is known, it takes the place of the limit.
    """
    records = []
    for row in rows:
        clock = clocks.get((str(row.cell), row.direction))
        at_clock = machine if clock is None else dataclasses.replace(machine, gigahertz=clock, limit=math.inf)
        found = predict(row.cell, row.direction, arch, at_clock)
        if found is None:
            continue
        measured = row.figures["jax_fa4"].speed if "jax_fa4" in row.figures else None
        records.append(
            {
                "id": str(row.cell),
                "direction": row.direction,
                "tile": found.tile,
                "clocks": {unit: round(clocks) for unit, clocks in found.step.units.items()},
                "bound": found.step.bound,
                "gigahertz": clock,
                "overlapped": round(found.overlapped, 1),
                "serial": round(found.serial, 1),
                "measured": None if measured is None else round(measured, 1),
            }
        )
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """A row a record: clocks of a step, and TFLOP/s."""
    width = max(len(record["id"]) for record in records)
    units = list(records[0]["clocks"])
    head = ["", "tile", *units, "overlapped", "serial", "measured", "share"]
    lines = ["clocks of a step on each unit; TFLOP/s if they overlap, if not, and measured; measured over overlapped"]
    lines.append(f"{'':{width}}  {'':8}" + "".join(f"{name:>13}" for name in head[1:]))
    for record in records:
        measured = record["measured"]
        share = "-" if measured is None else f"{measured / record['overlapped']:.2f}"
        marked = [f"{clocks}{'*' if unit == record['bound'] else ''}" for unit, clocks in record["clocks"].items()]
        speeds = [
            f"{record['overlapped']:.0f}",
            f"{record['serial']:.0f}",
            "-" if measured is None else f"{measured:.0f}",
        ]
        cells = [record["tile"], *marked, *speeds, share]
        lines.append(f"{record['id']:{width}}  {record['direction']:8}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Reads a benchmark's JSON, prints and writes predictions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="?", help="what `bench --out` wrote, on such a GPU")
    parser.add_argument("--arch", choices=sorted(MACHINES), default="sm_90a")
    parser.add_argument("--clocks", type=pathlib.Path, help="what `limits.py --out` wrote, on the same GPU")
    parser.add_argument("--limit", type=float, help="TFLOP/s of products alone, for calls without a clock of their own")
    parser.add_argument("--gigahertz", type=float, help="of the SMs")
    parser.add_argument("--out", type=pathlib.Path, help="also write the predictions to this JSON file")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("limit", "gigahertz") if getattr(args, name) is not None}
    machine = dataclasses.replace(MACHINES[args.arch], **given)
    rows: Iterable[Row] = (
        Row(cell=cell, direction=direction, figures={}, refused={}) for cell in GRID for direction in cell.directions
    )
    if args.results:
        rows = from_json(args.results.read_text()).rows
    clocks = clocks_of(args.clocks.read_text()) if args.clocks else {}
    records = compare((row for row in rows if row.cell.kind == "prefill"), args.arch, machine, clocks)
    if not records:
        parser.error(f"no prefill cell of {args.results} has a kernel for {args.arch}")
    if args.out:
        about = {"results": args.results.name} if args.results else {"note": NOTHING_MEASURED.format(args.arch)}
        about |= {"clocks": args.clocks.name} if args.clocks else {}
        found = {"arch": args.arch, **about, "machine": dataclasses.asdict(machine), "predictions": records}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if not args.results:
        print(NOTHING_MEASURED.format(args.arch))
    print(table(records))


if __name__ == "__main__":
    main()
