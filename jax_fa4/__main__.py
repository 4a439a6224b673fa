"""The commands of `python -m jax_fa4`. Parses, then calls one function."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_fa4 import arguments, configs, emulate_command
from jax_fa4.bench import command as bench_command
from jax_fa4.configs import Config
from jax_fa4.cubins import Cubin, lookup
from jax_fa4.cubins.cache import user_store
from jax_fa4.cubins.info import describe
from jax_fa4.cubins.report import anatomy, full_table, resources_of
from jax_fa4.progress import with_progress


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 1 after an error. Arguments that make no sense exit with 2."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa4", description="FlashAttention-4 for JAX: its kernels.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_build(commands.add_parser("build", help="compile the kernels of common calls into the cache"))
    _add_report(commands.add_parser("report", help="what kernels are made of: registers, spills, instructions"))
    commands.add_parser("info", help="versions, devices and cached kernels").set_defaults(run=_info)
    commands.add_parser("clear-cache", help="remove every cached kernel").set_defaults(run=_clear_cache)
    _add_emulate(commands.add_parser("emulate", help="run a kernel without a GPU on a random problem"))
    _add_bench(commands.add_parser("bench", help="time attention beside other implementations"))
    options = parser.parse_args(words)
    try:
        return options.run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as e:
        print(f"jax_fa4: {e}", file=sys.stderr)
        return 1


def _add_build(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    parser.set_defaults(run=_build, error=parser.error)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Options that say which kernels are meant."""
    archs = sorted(configs.ALL)
    parser.add_argument(
        "--arch", action="append", required=True, choices=archs, help="GPU architecture; may be repeated"
    )
    parser.add_argument("--dtype", action="append", help="only kernels of this dtype, like bfloat16; may be repeated")
    parser.add_argument("--head-dim", action="append", type=int, help="only kernels of this head dim; may be repeated")
    parser.add_argument("--jobs", type=arguments.at_least(1), default=1, help="kernels to compile at once (default: 1)")


def _build(options: argparse.Namespace) -> int:
    wanted, cubins = _compiled(options)
    unsaved = [cubin for config, cubin in zip(wanted, cubins, strict=True) if lookup.stored(config) is None]
    if unsaved:
        raise RuntimeError(f"{len(unsaved)} kernels were compiled and not saved: {user_store().folder} can't be used")
    print(f"{len(cubins)} kernels, {sum(len(c.image) for c in cubins) / 1e6:.1f} MB, in {user_store().folder}")
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    parser.add_argument(
        "--out", type=arguments.file_to_write, metavar="FILE", help="write the table there instead of printing it"
    )
    parser.set_defaults(run=_report, error=parser.error)


def _report(options: argparse.Namespace) -> int:
    wanted, cubins = _compiled(options)
    with _mapper(options.jobs) as each:
        resources = list(each(resources_of, cubins))
    text = full_table(cubins, resources) + anatomy(wanted, resources)
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    spilling = [cubin.config for cubin, found in zip(cubins, resources, strict=True) if found.spills]
    for config in spilling:
        print(f"jax_fa4: {config} spills registers", file=sys.stderr)
    return int(bool(spilling))


def _compiled(options: argparse.Namespace) -> tuple[list[Config], list[Cubin]]:
    """The kernels asked for, from the cache or compiled."""
    wanted = _selected(options)
    with _mapper(options.jobs) as each:
        return wanted, list(with_progress(each(lookup.get, wanted), total=len(wanted), unit="kernel"))


def _selected(options: argparse.Namespace) -> list[Config]:
    """The kernels that the command line asks for; asking for what no kernel has ends the program."""
    wanted = [config for arch in dict.fromkeys(options.arch) for config in configs.all_configs(arch)]
    for option, field in (("--dtype", "dtype"), ("--head-dim", "head_dim")):
        asked = getattr(options, field)
        offered = sorted({_value(config, field) for config in wanted} - {None})
        for value in asked or ():
            if value not in offered:
                options.error(f"argument {option}: no kernel has {value} (choose from {', '.join(map(str, offered))})")
        wanted = [config for config in wanted if asked is None or _value(config, field) in (None, *asked)]
    return wanted


def _value(config: Config, field: str) -> Any:
    """Of a kernel's config, None where it has none. One that sees values only has their head dim."""
    others = {"head_dim": getattr(config, "head_dim_v", None)}
    return getattr(config, field, others.get(field))


@contextlib.contextmanager
def _mapper(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that runs in this process, or in `jobs` others."""
    if jobs == 1:
        yield map
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _add_emulate(parser: argparse.ArgumentParser) -> None:
    emulate_command.add_arguments(parser)
    parser.set_defaults(run=_emulate)


def _emulate(options: argparse.Namespace) -> int:
    text, is_right = emulate_command.report(options)
    print(text)
    return int(not is_right)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    bench_command.add_arguments(parser)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    print(bench_command.report(options))
    return 0


def _info(options: argparse.Namespace) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # looking must not take a GPU's memory from others
    print(describe())
    return 0


def _clear_cache(options: argparse.Namespace) -> int:
    store = user_store()
    files, size = store.clear()
    print(f"removed {files} files, {size / 1e6:.1f} MB, from {store.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
