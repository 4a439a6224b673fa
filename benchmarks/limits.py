"""What limits each kernel: how busy it keeps every unit of the GPU, by NVIDIA's profiler.

    python benchmarks/limits.py [--cells d128,d256] [--out limits.json]

Needs an NVIDIA GPU, `ncu` on the path with access to the hardware counters, and cubins in the cache. A row is the
longest kernel of a call of jax_fa4 on one of the cells of `python -m jax_fa4 bench`, run once with a cold L2: its
part of the call's time, and how busy units were, in percent of what they can do: the tensor cores (bfloat16
products), the unit that takes exponentials, the slots in which instructions are issued, shared memory as loads and
stores see it, the L2 and the device memory. Beside them, from calls that follow each other for half a second: the
clock of the SMs and the power drawn, which tell whether the card had to slow down.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jax_fa4 import arguments
from jax_fa4.bench import cells, peers
from jax_fa4.bench.cells import Cell, Direction
from jax_fa4.bench.operands import random_operands
from jax_fa4.bench.report import environment

BUSY = {  # percent of the peak over the time that the kernel took
    "tensor": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp2": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_executed.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.sum.pct_of_peak_sustained_elapsed",
    "DRAM": "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
}
DURATION = "gpu__time_duration.sum"
SUSTAINED_SECONDS = 0.5
SMI = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]


class Launch(NamedTuple):
    """A kernel that the profiler saw: its name, and its metrics by name."""

    kernel: str
    metrics: dict[str, float]


def main() -> None:
    """Prints a table, and writes the same figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="prefill,decode", help="kinds or names, with commas between")
    parser.add_argument("--out", type=arguments.file_to_write, help="also write the figures to this JSON file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    args = parser.parse_args()
    wanted = cells.select(args.cells.split(","))
    if args.part:
        print(json.dumps(PARTS[args.part](wanted)))
        return
    if missing := [tool for tool in ("nvidia-smi", "ncu") if shutil.which(tool) is None]:
        parser.error(f"needs an NVIDIA GPU, and {' and '.join(missing)} on the path")
    again = [sys.executable, __file__, "--cells", args.cells]
    records = []
    for name, launches, sustained in zip(names(wanted), profiled(again), in_process(again, "sustained"), strict=True):
        records.append({**name, **summary(launches), **sustained})
    print(table(records))
    if args.out:
        args.out.write_text(json.dumps({"environment": environment(), "kernels": records}, indent=1) + "\n")


def names(wanted: Iterable[Cell]) -> Iterator[dict[str, str]]:
    """Of every call, in the order in which both parts make them."""
    for cell in wanted:
        for direction in cell.directions:
            yield {"cell": str(cell), "direction": direction}


def calls(wanted: Iterable[Cell]) -> Iterator[tuple[Direction, peers.Calls]]:
    """Compiled, and run once."""
    for cell in wanted:
        found = peers.PEERS[peers.OURS].calls(cell, random_operands(cell))
        for direction in cell.directions:
            yield direction, found


def counted(wanted: Iterable[Cell]) -> None:
    """Runs each call behind a flush of the L2, by which the profiler's rows are told apart."""
    for direction, found in calls(wanted):
        found.flush()
        found.wait(found.run[direction]())
        found.wait(found.flush())


def sustained(wanted: Iterable[Cell]) -> list[dict[str, float]]:
    """Clock in GHz and power in W while calls follow each other."""
    records = []
    for direction, found in calls(wanted):
        deadline = time.perf_counter() + SUSTAINED_SECONDS
        while time.perf_counter() < deadline:
            for _ in range(8):
                result = found.run[direction]()
            found.wait(result)
        running = [found.run[direction]() for _ in range(64)]
        megahertz, watts = map(float, subprocess.check_output(SMI, text=True).splitlines()[0].split(","))
        jax.block_until_ready(running)
        records.append({"GHz": round(megahertz / 1e3, 2), "W": round(watts)})
    return records


PARTS = {"counted": counted, "sustained": sustained}


def in_process(command: Sequence[str], part: str) -> Any:
    """What a part prints last."""
    done = subprocess.run([*command, "--part", part], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def profiled(command: Sequence[str]) -> Iterator[list[Launch]]:
    """Launches of each call."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "kernels.csv")
        ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        ncu += ["--clock-control", "none", "--kernel-name", f"regex:{peers.OURS}|{peers.JAX_FLUSH}"]
        ncu += ["--metrics", ",".join([DURATION, *BUSY.values()])]
        # kernels one by one: the profiler would see a captured graph as a whole
        environ = {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="}
        subprocess.run([*ncu, *command, "--part", "counted"], env=environ, check=True, stdout=subprocess.DEVNULL)
        yield from between_flushes(launches(log.read_text()))


def launches(text: str) -> list[Launch]:
    """Rows of the profiler's table, which stands behind what it says of itself; a row of units follows its head."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    rows = list(csv.DictReader(lines))[1:]
    wanted = [DURATION, *BUSY.values()]
    return [Launch(row["Kernel Name"], {name: float(row[name].replace(",", "")) for name in wanted}) for row in rows]


def between_flushes(found: Iterable[Launch]) -> Iterator[list[Launch]]:
    """Every call stands between two flushes; what stands elsewhere only made it ready."""
    inside: list[Launch] | None = None
    for launch in found:
        if peers.JAX_FLUSH not in launch.kernel:
            if inside is not None:
                inside.append(launch)
        elif inside:
            yield inside
            inside = None
        else:
            inside = []


def summary(found: Sequence[Launch]) -> dict[str, Any]:
    """The longest kernel of a call, with its part of the time."""
    longest = max(found, key=lambda launch: launch.metrics[DURATION])
    total = sum(launch.metrics[DURATION] for launch in found)
    busy = {unit: round(longest.metrics[metric], 1) for unit, metric in BUSY.items()}
    return {"kernel": longest.kernel, "part": round(longest.metrics[DURATION] / total, 3), **busy}


def table(records: Sequence[dict[str, Any]]) -> str:
    """A row a call."""
    columns = ["part", *BUSY, "GHz", "W"]
    width = max(len(record["cell"]) for record in records)
    lines = [f"{'':{width}}  {'':8}" + "".join(f"{name:>8}" for name in columns)]
    for record in records:
        values = "".join(f"{record[name]:>8}" for name in columns)
        lines.append(f"{record['cell']:{width}}  {record['direction']:8}{values}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
