"""How fast a kernel could be: clocks that each unit of an SM needs, beside what a benchmark measured.

    python -m jax_fa4 bench --cells prefill --out found.json
    python benchmarks/model.py found.json --out model.json

Of one step, the product of a tile of queries with a tile of keys, the tensor cores need the FLOP over their rate, the
special function units an exponential for each score, shared memory the bytes that operands and copies move, and the
schedulers a slot for each instruction of the kernel's innermost loop, which is counted in its machine code. The largest
is the least that a step can take; their sum is what it takes if nothing overlaps. Steps make tiles, and tiles are dealt
to SMs as they become free. Nothing can be faster than the power limit, which is what a large matrix product reaches.
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
from collections.abc import Iterable, Sequence

from jax_fa4 import configs
from jax_fa4.bench.cells import Cell
from jax_fa4.bench.report import from_json
from jax_fa4.bench.run import Row
from jax_fa4.configs import BackwardConfig, KernelConfig
from jax_fa4.cubins import get
from jax_fa4.cubins.report import Resources, resources_of
from jax_fa4.spec import AttentionSpec, MaskSpec

WARPGROUP_WARPS = 4
WARPGROUP_ROWS = 64
LANES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU: what an SM does in a clock."""

    sms: int
    gigahertz: float
    tensor_flop: int  # 16-bit products, float32 sums
    exponentials: int
    smem_bytes: int
    instructions: int  # of warps


H200 = Machine(sms=132, gigahertz=1.98, tensor_flop=4096, exponentials=16, smem_bytes=128, instructions=4)
MATMUL_TFLOPS = 690.0  # of 8192 x 8192 x 8192 in bfloat16 on an H200 under sustained load
TILE_CLOCKS = 4000  # of a tile beside its steps: first loads, last store. d64 of 1024 against 16384 keys, 2026-11-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Clocks of one step on each unit."""

    tensor: float
    exponentials: float
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
        return self.tensor + max(self.exponentials, self.issue)


def forward_step(config: KernelConfig, resources: Resources, machine: Machine) -> Step:
    """tile_m queries by tile_n keys: two products, of which q and k, and v, come from shared memory."""
    m, n, d, dv = config.tile_m, config.tile_n, config.columns, config.v_columns
    operands = m * d + config.warpgroups * n * (d + dv)  # a warpgroup reads its own rows and all keys
    copied = n * (d + dv)
    return Step(
        tensor=2 * m * n * (d + dv) / machine.tensor_flop,
        exponentials=m * n / machine.exponentials,
        smem=2 * (operands + copied) / machine.smem_bytes,
        issue=_issue_clocks(resources, config.warpgroups, m * n, machine),
    )


def backward_step(config: BackwardConfig, resources: Resources, machine: Machine) -> Step:
    """tile_m queries by tile_n keys: five products. ds goes through shared memory, and dq, in float32, leaves by it."""
    m, n, d, dv = config.tile_m, config.tile_n, config.head_dim, config.head_dim_v
    warpgroups = config.warpgroups
    scores = n * (d + dv) + warpgroups * m * (d + dv)  # k and v by rows; q and dout whole
    gradients = warpgroups * m * (d + dv)  # p and ds come from registers
    dq = m * n + (m // WARPGROUP_ROWS) * n * d
    moved = m * (d + dv) + m * n + 2 * 2 * m * d  # q and dout arrive, ds is written, dq written and read, as float32
    return Step(
        tensor=2 * m * n * (3 * d + 2 * dv) / machine.tensor_flop,
        exponentials=m * n / machine.exponentials,
        smem=2 * (scores + gradients + dq + moved) / machine.smem_bytes,
        issue=_issue_clocks(resources, warpgroups, m * n, machine),
    )


def _issue_clocks(resources: Resources, warpgroups: int, scores: int, machine: Machine) -> float:
    """Of the leanest loop, the one without masks; what it unrolls is told by its exponentials."""
    warps = warpgroups * WARPGROUP_WARPS
    exponentials = scores / (warps * LANES)
    lean = min(loop.total() / max(round(loop["MUFU"] / exponentials), 1) for loop in resources.loops)
    return lean * warps / machine.instructions


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


def predict(row: Row, machine: Machine, matmul_tflops: float) -> Prediction | None:
    """None where there is no kernel."""
    cell = row.cell
    spec = AttentionSpec(
        dtype="bfloat16",
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
        group=cell.q_heads // cell.kv_heads,
        mask=MaskSpec(has_left=cell.window[0] is not None, has_right=cell.causal or cell.window[1] is not None),
    )
    if row.direction == "forward":
        forward = configs.forward_config(spec, "sm_90a")
        if forward is None:
            return None
        config: KernelConfig | BackwardConfig = forward
        step = forward_step(forward, _resources(forward), machine)
        counts = steps_of_tiles(cell, forward.tile_m, forward.tile_n, of_keys=False) * (cell.batch * cell.q_heads)
    else:
        backward = configs.backward_config(spec, "sm_90a")
        if backward is None:
            return None
        config = backward
        step = backward_step(backward, _resources(backward), machine)
        group = cell.q_heads // cell.kv_heads
        counts = [group * count for count in steps_of_tiles(cell, backward.tile_m, backward.tile_n, of_keys=True)] * (
            cell.batch * cell.kv_heads
        )
    counts.sort(reverse=True)

    def speed(clocks_a_step: float) -> float:
        clocks = makespan((count * clocks_a_step + TILE_CLOCKS for count in counts), machine.sms)
        return min(cell.work(row.direction) * machine.gigahertz * 1e9 / clocks / 1e12, matmul_tflops)

    return Prediction(
        step=step,
        tile=f"{config.tile_m}x{config.tile_n}",
        overlapped=speed(step.overlapped),
        serial=speed(step.serial),
    )


@functools.cache
def _resources(config: KernelConfig | BackwardConfig) -> Resources:
    return resources_of(get(config))


def compare(rows: Sequence[Row], machine: Machine, matmul_tflops: float) -> list[dict[str, object]]:
    """A record for each row that has a kernel, with the measured speed where there is one."""
    records = []
    for row in rows:
        found = predict(row, machine, matmul_tflops)
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
                "overlapped": round(found.overlapped, 1),
                "serial": round(found.serial, 1),
                "measured": None if measured is None else round(measured, 1),
            }
        )
    return records


def table(records: Sequence[dict]) -> str:
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
    parser.add_argument("results", type=pathlib.Path, help="what `python -m jax_fa4 bench --out` wrote")
    parser.add_argument("--matmul", type=float, default=MATMUL_TFLOPS, help=f"TFLOP/s (default: {MATMUL_TFLOPS:.0f})")
    parser.add_argument("--gigahertz", type=float, default=H200.gigahertz, help=f"default: {H200.gigahertz}")
    parser.add_argument("--out", type=pathlib.Path, help="also write the predictions to this JSON file")
    args = parser.parse_args()
    rows = [row for row in from_json(args.results.read_text()).rows if row.cell.kind == "prefill"]
    records = compare(rows, dataclasses.replace(H200, gigahertz=args.gigahertz), args.matmul)
    if not records:
        parser.error(f"{args.results} has no prefill cell that a kernel serves")
    if args.out:
        args.out.write_text(json.dumps(records, indent=1) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
