"""`python -m jax_fa4 bench`: options, and the loop over cells."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING

from jax_fa4 import arguments
from jax_fa4.progress import with_progress

if TYPE_CHECKING:
    from jax_fa4.bench.report import Report

__all__ = ["add_arguments", "report"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cells, whom to compare with, how often, and where results go."""
    parser.add_argument(
        "--cells", type=_words, default=(), metavar="NAMES", help="kinds or names, like varlen,d64,gqa (default: all)"
    )
    parser.add_argument(
        "--peers",
        type=_words,
        default=(),
        metavar="NAMES",
        help="of cudnn,fa3,fa4,tokamax (default: these four), xla,deterministic",
    )
    parser.add_argument(
        "--rounds",
        type=arguments.at_least(0),
        default=3,
        help="how often peers take turns; 0 only compiles (default: 3)",
    )
    parser.add_argument(
        "--clock", choices=("device", "host"), help="time of kernels, or of the wall (default: device on a GPU)"
    )
    parser.add_argument("--out", type=arguments.file_to_write, metavar="FILE", help="write JSON, anew after each cell")
    parser.add_argument("--show", type=pathlib.Path, metavar="FILE", help="run nothing: print what --out wrote to it")
    parser.add_argument(
        "--plot", type=arguments.picture_to_write, metavar="FILE", help="draw bars (.png, .svg); needs matplotlib"
    )


def report(options: argparse.Namespace) -> str:
    """Runs the cells, or reads what an earlier run found, and returns the table. Files are written on the way."""
    from jax_fa4.bench import report

    found = _read(options.show) if options.show else _run(options)
    if options.plot:
        report.plot(found, options.plot)
    return report.table(found)


def _read(path: pathlib.Path) -> Report:
    from jax_fa4.bench import report

    try:
        return report.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _run(options: argparse.Namespace) -> Report:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers outside JAX need memory, too
    import jax

    from jax_fa4.bench import cells, clock, peers, report, run

    wanted = cells.select(options.cells)
    candidates = peers.select(options.peers)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and options.clock == "device":
        raise RuntimeError("--clock device is NVIDIA's profiler, and JAX has no GPU here")
    if not on_gpu and not options.cells and options.clock is None:
        raise RuntimeError("all cells take a CPU days: choose some, as --cells smoke, or say --clock host")
    timer: clock.Clock = clock.DeviceClock() if on_gpu and options.clock != "host" else clock.HostClock()
    found = report.begin(candidates, timer.name, options.rounds)
    present = [peer for peer in candidates if peer.name in found.peers]
    for cell in with_progress(wanted, total=len(wanted), unit="cell"):
        rows = run.time_cell(cell, present, timer, options.rounds)
        found = dataclasses.replace(found, rows=(*found.rows, *rows))
        _save(found, options.out)
    return found


def _save(found: Report, path: pathlib.Path | None) -> None:
    from jax_fa4.bench.report import to_json

    if path is not None:
        path.write_text(to_json(found))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
