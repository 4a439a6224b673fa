"""What limits each kernel: how busy it keeps every unit of the GPU, by NVIDIA's profiler.

    python benchmarks/limits.py [--cells d128,d256] [--directions forward] [--peers fa3] [--out limits.json]

Needs an NVIDIA GPU, `ncu` on the path with access to the hardware counters, and cubins in the cache. A row is the
longest kernel of a call of jax_fa4, or of a peer, on one of the cells of `python -m jax_fa4 bench`, run once with a
cold L2: its part of the call's time, and how busy units were, in percent of what they can do: the tensor cores
(bfloat16 products), the unit that takes exponentials, the slots in which instructions are issued, shared memory as
loads and stores see it, the L2 and the device memory; then what it took in all: clocks, instructions of warps, and
bytes that the L2 and the device memory moved. Beside them, from calls that follow each other for most of a second,
the clock of the SMs and the power drawn, which tell whether the card had to slow down, and a call's time and energy,
with what the host leaves the card waiting; these are also printed as they come. What a peer refuses is named in the
end.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
TAKEN = {  # in all: a unit of the figure, and the metric
    "Mclk": (1e6, "sm__cycles_elapsed.max"),
    "Minst": (1e6, "sm__inst_executed.sum"),
    "L2 GB": (1e9, "lts__t_bytes.sum"),
    "DRAM GB": (1e9, "dram__bytes.sum"),
}
DURATION = "gpu__time_duration.sum"
METRICS = [DURATION, *BUSY.values(), *(metric for _, metric in TAKEN.values())]
WARM_SECONDS, SUSTAINED_SECONDS = 0.3, 0.7
BATCH = 16  # calls in the queue while the card is read
SM_CLOCK = 1  # of NVML's clocks
FOUND = "limits.py found "  # begins what a part says, among what others print

DIRECTIONS: tuple[Direction, ...] = typing.get_args(Direction)
Record = dict[str, Any]


class Launch(NamedTuple):
    """A kernel that the profiler saw: its name, and its metrics by name."""

    kernel: str
    metrics: dict[str, float]


def main() -> None:
    """Prints a table, and writes the same figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells", type=cells_called, default="prefill,decode", help="kinds or names, with commas between"
    )
    parser.add_argument("--directions", type=directions_called, default="forward,backward", help="with commas between")
    parser.add_argument(
        "--peers",
        type=peers_called,
        default="",
        help="other implementations as `bench` names them, with commas between",
    )
    parser.add_argument("--out", type=arguments.file_to_write, help="also write the figures to this JSON file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    args = parser.parse_args()
    wanted = list(problems(args.cells, args.directions, args.peers))
    if not wanted:
        parser.error(f"argument --directions: no chosen cell has a {' or '.join(args.directions)}")
    if args.part:
        for found in PARTS[args.part](wanted):
            print(FOUND + json.dumps(found), flush=True)
        return
    again = [sys.executable, __file__, *sys.argv[1:]]
    if shutil.which("ncu") is None:
        parser.error("needs an NVIDIA GPU, and ncu on the path")
    if reasons := list(in_process(again, "missing")):
        parser.error("; ".join(reasons))
    records, refused = measure(wanted, again)
    if records:
        print(table(records))
    for record in refused:
        print(f"{label(record)} refused: {record['refused']}")
    if args.out:
        found = {"environment": environment(), "kernels": records, "refused": refused}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def cells_called(text: str) -> tuple[Cell, ...]:
    """Of these kinds and names, at least one."""
    try:
        return cells.select(_words(text) or [text])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def peers_called(text: str) -> tuple[peers.Peer, ...]:
    """jax_fa4, and those of these names."""
    try:
        return peers.select([peers.OURS, *_words(text)])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def directions_called(text: str) -> tuple[Direction, ...]:
    """One of them, or both."""
    words = _words(text)
    if not words or not set(words) <= set(DIRECTIONS):
        raise argparse.ArgumentTypeError(f"must be {' or '.join(DIRECTIONS)}, with a comma between, got {text!r}")
    return tuple(direction for direction in DIRECTIONS if direction in words)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def measure(wanted: Sequence[Problem], command: Sequence[str]) -> tuple[list[Record], list[Record]]:
    """Figures of what both parts ran, and who refused what. The first part's are shown as they come."""
    kept = []
    for problem, figures in zip(wanted, in_process(command, "sustained"), strict=True):
        kept.append(figures)
        shown = figures.get("refused") or ", ".join(f"{figure} {unit}" for unit, figure in figures.items())
        print(f"{label(names(problem))}: {shown}", file=sys.stderr, flush=True)
    records, refused = [], []
    for problem, figures, counters in zip(wanted, kept, profiled(command), strict=True):
        found = {**names(problem), **counters, **figures}
        if "refused" in found:
            refused.append({**names(problem), "refused": found["refused"]})
        else:
            records.append(found)
    return records, refused


class Problem(NamedTuple):
    """What somebody computes."""

    cell: Cell
    direction: Direction
    peer: peers.Peer


def problems(chosen: Iterable[Cell], directions: Sequence[Direction], shown: Sequence[peers.Peer]) -> Iterator[Problem]:
    """In the order in which both parts run them: peers take turns at a direction of a cell."""
    for cell in chosen:
        for direction in cell.directions:
            if direction in directions:
                yield from (Problem(cell, direction, peer) for peer in shown)


def names(problem: Problem) -> dict[str, str]:
    """What a record says of it."""
    return {"cell": str(problem.cell), "direction": problem.direction, "peer": problem.peer.name}


def label(record: Record) -> str:
    """The same on one line."""
    return f"{record['cell']}, {record['direction']}, {record['peer']}"


def missing(wanted: Iterable[Problem]) -> Iterator[str]:
    """Why nothing can be measured here, if so."""
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        yield f"needs an NVIDIA GPU, and JAX finds none: {str(error).splitlines()[0]}"
        return
    for name, peer in {problem.peer.name: problem.peer for problem in wanted}.items():
        if reason := peer.why_missing():
            yield f"argument --peers: {name} cannot run here: {reason}"


Measure = Callable[[peers.Calls, Direction], Record]


def outcomes(wanted: Iterable[Problem], measure: Measure) -> Iterator[Record]:
    """Of each call, compiled and run once before it is measured, or why its peer refuses it."""
    for cell, direction, peer in wanted:
        x = random_operands(cell)
        try:
            found = peer.calls(cell, x, [direction])
        except Exception as error:  # whatever a peer raises is its reason
            yield {"refused": peers.reason_of(error)}
            continue
        yield measure(found, direction) if direction in found.run else {"refused": found.refused[direction]}


def counted(found: peers.Calls, direction: Direction) -> Record:
    """Runs a call behind a flush of the L2, by which the profiler's rows are told apart."""
    with profiler():
        found.flush()
        found.wait(found.run[direction]())
        found.wait(found.flush())
    return {}


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    """What runs within is profiled."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    try:
        yield
    finally:
        driver.cuProfilerStop()


class Card:
    """The first GPU, as NVIDIA's management library sees it. Raises RuntimeError where that has no answer."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._handle))

    def megahertz(self) -> int:
        """The clock of the SMs."""
        clock = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._handle, SM_CLOCK, ctypes.byref(clock))
        return clock.value

    def millijoules(self) -> int:
        """Energy since the driver was loaded."""
        energy = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(energy))
        return energy.value

    def _ask(self, function: str, *args: Any) -> None:
        if status := getattr(self._library, function)(*args):
            raise RuntimeError(f"{function} failed with status {status}")


class Reading(NamedTuple):
    """Of the card and the clock on the wall, behind so many calls."""

    seconds: float
    millijoules: int
    megahertz: int
    calls: int


def sustained(found: peers.Calls, direction: Direction) -> Record:
    """Clock, power, time and energy of a call while calls follow each other."""
    readings = read_meanwhile(Card(), found, direction)
    first, last = readings[0], readings[-1]
    seconds, joules = last.seconds - first.seconds, (last.millijoules - first.millijoules) / 1e3
    count = last.calls - first.calls
    return {
        "GHz": round(statistics.mean(reading.megahertz for reading in readings) / 1e3, 3),
        "W": round(joules / seconds),
        "us": round(seconds / count * 1e6, 1),
        "mJ": round(joules / count * 1e3, 1),
    }


def read_meanwhile(card: Card, found: peers.Calls, direction: Direction) -> list[Reading]:
    """Readings once the card is warm, as often as it measures its energy."""
    start, count = time.perf_counter(), 0
    readings: list[Reading] = []
    previous = found.run[direction]()
    while (passed := time.perf_counter() - start) < WARM_SECONDS + SUSTAINED_SECONDS or len(readings) < 2:
        results = [found.run[direction]() for _ in range(BATCH)]
        found.wait(previous)  # some are always in the queue
        previous, count = results[-1], count + len(results)
        energy = card.millijoules()
        if passed > WARM_SECONDS and (not readings or energy != readings[-1].millijoules):
            readings.append(Reading(time.perf_counter(), energy, card.megahertz(), count))
    found.wait(previous)
    return readings[1:] if len(readings) > 2 else readings  # the first was not taken when the energy was


PARTS: dict[str, Callable[[Sequence[Problem]], Iterable[Any]]] = {
    "missing": missing,
    "counted": functools.partial(outcomes, measure=counted),
    "sustained": functools.partial(outcomes, measure=sustained),
}


def in_process(command: Sequence[str], part: str, environ: Mapping[str, str] = os.environ) -> Iterator[Any]:
    """What a part finds, as it finds it."""
    command = [*command, "--part", part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None  # asked for above
        for line in process.stdout:
            if line.startswith(FOUND):
                yield json.loads(line.removeprefix(FOUND))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def profiled(command: Sequence[str]) -> Iterator[Record]:
    """The summary of each call's launches, or why it was refused."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "kernels.csv")
        ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        ncu += ["--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
        # kernels one by one: the profiler would see a captured graph as a whole
        environ = {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="}
        found = list(in_process([*ncu, *command], "counted", environ))
        ran = [record for record in found if "refused" not in record]
        for record, its_launches in zip(ran, between_flushes(launches(log.read_text())), strict=True):
            record.update(summary(its_launches))
        yield from found


def launches(text: str) -> list[Launch]:
    """Rows of the profiler's table, which stands behind what it says of itself; a row of units follows its head."""
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]
    rows = list(csv.DictReader(lines))[1:]
    return [Launch(row["Kernel Name"], {name: float(row[name].replace(",", "")) for name in METRICS}) for row in rows]


def between_flushes(found: Iterable[Launch]) -> Iterator[list[Launch]]:
    """Every call stands between two flushes; what stands elsewhere only made it ready."""
    inside: list[Launch] | None = None
    for launch in found:
        if not any(flush in launch.kernel for flush in (peers.JAX_FLUSH, peers.TORCH_FLUSH)):
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
    taken = {name: round(longest.metrics[metric] / unit, 3) for name, (unit, metric) in TAKEN.items()}
    return {"kernel": longest.kernel, "part": round(longest.metrics[DURATION] / total, 3), **busy, **taken}


def table(records: Sequence[dict[str, Any]]) -> str:
    """A row a call."""
    columns = ["part", *BUSY, *TAKEN, "GHz", "W", "us", "mJ"]
    width = max(len(label(record)) for record in records)
    lines = [f"{'':{width}}" + "".join(f"{name:>9}" for name in columns)]
    for record in records:
        lines.append(f"{label(record):{width}}" + "".join(f"{record[name]:>9}" for name in columns))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
