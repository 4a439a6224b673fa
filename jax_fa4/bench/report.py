"""What a benchmark found, as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

import jax_fa4
from jax_fa4.bench.cells import Cell, Direction, Kind
from jax_fa4.bench.peers import DETERMINISTIC, OURS, Peer
from jax_fa4.bench.run import Figure, Row
from jax_fa4.cubins.key import sources_digest

__all__ = ["Report", "begin", "environment", "from_json", "plot", "summary", "table", "to_json"]

DIGITS = 5  # of a number in JSON
DIGEST = 16  # hex digits that are shown of a digest
COLUMN = 15  # characters
PACKAGES = ("jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl", "torch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Rows in the order of the cells. `peers` gives each one's version, `missing` the reasons of those that are not."""

    environment: dict[str, str]
    clock: str
    rounds: int
    peers: dict[str, str]
    missing: dict[str, str]
    rows: tuple[Row, ...] = ()


def environment() -> dict[str, str]:
    """Date, card, driver and versions. `kernels` tells which are timed: equal where cubins come of the same sources."""
    found = {"date": time.strftime("%Y-%m-%d"), "device": jax.devices()[0].device_kind, "jax_fa4": jax_fa4.__version__}
    found["kernels"] = sources_digest()[:DIGEST]
    if jax.default_backend() == "gpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        found["card"] = done.stdout.split("\n")[0] if done.returncode == 0 else "unknown"
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def begin(peers: Sequence[Peer], clock: str, rounds: int) -> Report:
    """A report without rows: who takes part, where."""
    missing = {peer.name: reason for peer in peers if (reason := peer.why_missing())}
    versions = {peer.name: peer.version() for peer in peers if peer.name not in missing}
    return Report(environment=environment(), clock=clock, rounds=rounds, peers=versions, missing=missing)


def table(report: Report) -> str:
    """A block for each direction and unit: a row a cell, a column a peer, and the ratio to the best peer."""
    lines = [", ".join(f"{name} {value}" for name, value in report.environment.items())]
    lines += [f"{name}: left out, {reason}" for name, reason in report.missing.items()]
    for (kind, direction), rows in _blocks(report.rows):
        lines += ["", *_block(f"{kind} {direction}, {rows[0].cell.unit}", rows, list(report.peers))]
    if compared := list(_compared(report.rows)):
        lines += ["", "jax_fa4 over itself:", *compared]
    if reasons := _reasons(report.rows):
        lines += ["", "Not timed:", *reasons]
    return "\n".join(lines)


def _compared(rows: Sequence[Row]) -> Iterator[str]:
    """What options and orders cost: ratios of our own speeds."""
    ours = {(row.cell, row.direction): row.figures[OURS].speed for row in rows if OURS in row.figures}
    for row in rows:
        speed = ours.get((row.cell, row.direction))
        if speed is None:
            continue
        if DETERMINISTIC in row.figures and row.direction == "backward":
            yield f"{row.cell}, backward, deterministic over not: {row.figures[DETERMINISTIC].speed / speed:.3f}"
        for what, other in _twins(row.cell):
            if (other, row.direction) in ours:
                yield f"{row.cell}, {row.direction}, over {what}: {speed / ours[other, row.direction]:.3f}"


def _twins(cell: Cell) -> Iterator[tuple[str, Cell]]:
    """Cells of the same work that should take the same time."""
    if cell.page_size is not None:
        yield "contiguous keys", dataclasses.replace(cell, name="decode", kind="decode", page_size=None)
    if cell.lengths and list(cell.lengths) == sorted(cell.lengths):
        descending = tuple(reversed(cell.lengths))
        yield "the longest first", dataclasses.replace(cell, name=f"{cell.name}_sorted", lengths=descending)


def _reasons(rows: Iterable[Row]) -> list[str]:
    """A line for each peer and reason, with the first cell that it left out."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.refused.items():
            cells.setdefault((name, reason), []).append(f"{row.cell}, {row.direction}")
    return [
        f"{name}, {first}" + (f" and {len(more)} more" if more else "") + f": {reason}"
        for (name, reason), (first, *more) in cells.items()
    ]


def _blocks(rows: Iterable[Row]) -> Iterator[tuple[tuple[Kind, Direction], list[Row]]]:
    blocks: dict[tuple[Kind, Direction], list[Row]] = {}
    for row in rows:
        blocks.setdefault((row.cell.kind, row.direction), []).append(row)
    yield from blocks.items()


def _block(title: str, rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    columns = [*_shown(rows, [name for name in names if name != OURS]), OURS]
    largest = max((figure.speed for row in rows for figure in row.figures.values()), default=0.0)
    digits = 0 if largest >= 100 else 2 if largest >= 1 else 4
    label = max(len(title), *(len(str(row.cell)) for row in rows))
    lines = [title.ljust(label) + "".join(name.rjust(COLUMN) for name in columns) + "ratio".rjust(8)]
    for row in rows:
        speeds = [f"{row.figures[name].speed:.{digits}f}" if name in row.figures else "-" for name in columns]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(str(row.cell).ljust(label) + "".join(speed.rjust(COLUMN) for speed in speeds) + ratio.rjust(8))
    found = summary(rows)
    if found is not None:
        lines.append(f"geometric mean of ratios {found[0]:.3f}, lowest {found[1]:.3f}")
    return lines


def _shown(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Those that ran one of the rows."""
    return [name for name in names if any(name in row.figures for row in rows)]


def summary(rows: Iterable[Row]) -> tuple[float, float] | None:
    """Geometric mean and minimum of the rows' ratios, None if no row has one."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return (math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios)) if ratios else None


def to_json(report: Report) -> str:
    """Everything, the summaries included; `speed` is in the cell's unit."""
    fields: dict[str, Any] = {
        field.name: getattr(report, field.name) for field in dataclasses.fields(report) if field.name != "rows"
    }
    fields["summary"] = {
        f"{kind} {direction}": {"geometric_mean": _rounded(found[0]), "lowest": _rounded(found[1])}
        for (kind, direction), rows in _blocks(report.rows)
        if (found := summary(rows))
    }
    fields["rows"] = [
        {
            "id": str(row.cell),
            "cell": dataclasses.asdict(row.cell),
            "direction": row.direction,
            "unit": row.cell.unit,
            "figures": {
                name: {
                    "microseconds": _rounded(figure.seconds * 1e6),
                    "speed": _rounded(figure.speed),
                    "spread": _rounded(figure.spread),
                }
                for name, figure in row.figures.items()
            },
            "ratio": None if row.ratio is None else _rounded(row.ratio),
            "refused": row.refused,
        }
        for row in report.rows
    ]
    return json.dumps(fields, indent=1) + "\n"


def _rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


def from_json(text: str) -> Report:
    """What `to_json` wrote, up to the digits that it kept. Anything else is a ValueError."""
    try:
        return _report(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError("this is not what `bench --out` writes") from error


def _report(fields: dict[str, Any]) -> Report:
    del fields["summary"]
    rows = tuple(
        Row(
            cell=_cell(row["cell"]),
            direction=row["direction"],
            figures={
                name: Figure(seconds=found["microseconds"] * 1e-6, speed=found["speed"], spread=found["spread"])
                for name, found in row["figures"].items()
            },
            refused=row["refused"],
        )
        for row in fields.pop("rows")
    )
    return Report(**fields, rows=rows)


def _cell(fields: dict[str, Any]) -> Cell:
    return Cell(**{**fields, "window": tuple(fields["window"]), "lengths": tuple(fields["lengths"])})


def plot(report: Report, path: pathlib.Path) -> None:
    """Bars of each block, jax_fa4's in front; the format is that of the path's suffix."""
    from matplotlib import figure

    blocks = [(key, rows) for key, rows in _blocks(report.rows) if any(row.figures for row in rows)]
    if not blocks:
        raise ValueError("there is nothing to plot: no peer ran any cell")
    drawing = figure.Figure(figsize=(15, 4 * len(blocks)), layout="constrained")
    all_axes = drawing.subplots(len(blocks), squeeze=False)[:, 0]
    for axes, ((kind, direction), rows) in zip(all_axes, blocks, strict=True):
        names = _shown(rows, list(report.peers))
        width = 0.8 / len(names)
        for n, name in enumerate(names):
            places = [place + n * width for place, row in enumerate(rows) if name in row.figures]
            speeds = [row.figures[name].speed for row in rows if name in row.figures]
            color = f"C{list(report.peers).index(name)}"
            axes.bar(places, speeds, width, align="edge", label=name, color=color)
        labels = [str(row.cell) for row in rows]
        axes.set_xticks([place + 0.4 for place in range(len(rows))], labels, rotation=35, ha="right")
        axes.margins(x=0.01)
        axes.set_title(f"{kind}, {direction}")
        axes.set_ylabel(rows[0].cell.unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    drawing.suptitle(f"{report.environment.get('card', report.environment['device'])}, {report.environment['date']}")
    drawing.savefig(path)
