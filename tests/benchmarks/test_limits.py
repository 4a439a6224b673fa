"""What the profiler writes, read as figures of calls."""

import json
import pathlib
import re
import sys
import types

import pytest

from jax_fa4.bench import peers
from jax_fa4.bench.cells import SMOKE, select

FLUSH = "wrapped_cbrt"


@pytest.fixture(scope="module")
def limits(program):
    return program("limits")


@pytest.fixture
def written(limits):
    """A function that writes launches, (kernel, nanoseconds, tensor percent) each, as ncu does."""

    def write(*launches):
        others = len(limits.METRICS) - 2
        lines = ["==PROF== Connected to process 1", _row("ID", "Kernel Name", *limits.METRICS)]
        lines.append(_row("", "", "ns", "%", *["%"] * others))
        for number, (kernel, nanoseconds, tensor) in enumerate(launches):
            lines.append(_row(number, kernel, nanoseconds, tensor, *["10,000,000"] * others))
        return "\n".join([*lines, "==PROF== Disconnected from process 1"])

    return write


def _row(*values):
    return ",".join(f'"{value}"' for value in values)


def peer(name, fails=None, missing=None, **refused):
    """One that runs nothing, and refuses what it is told to."""

    def calls(cell, x, directions):
        if fails:
            raise ValueError(fails)
        run = {direction: name for direction in directions if direction not in refused}
        return peers.Calls(run, refused, None, "flush", None, {})

    return types.SimpleNamespace(name=name, calls=calls, why_missing=lambda: missing)


def test_a_call_is_what_stands_between_its_two_flushes(limits, written):
    text = written(
        ("warm", "1", 1), (FLUSH, "1", 0), (FLUSH, "1", 0), ("forward", "1,500", 50), (FLUSH, "1", 0),
        ("warm", "1", 1), (FLUSH, "1", 0), ("before", "250", 0), ("backward", "750", 60), (FLUSH, "1", 0),
    )  # fmt: skip
    found = list(limits.between_flushes(limits.launches(text)))
    assert [[launch.kernel for launch in call] for call in found] == [["forward"], ["before", "backward"]]


def test_a_call_is_told_by_its_longest_kernel(limits, written):
    launches = limits.launches(written(("before", "250", 1), ("backward", "1,750", 61.26), ("after", "500", 2)))
    found = limits.summary(launches)
    assert found["kernel"] == "backward"
    assert found["part"] == 0.7
    assert (found["tensor"], found["Mclk"], found["L2 GB"]) == (61.3, 10, 0.01)


def test_flushes_of_every_peer_are_told(limits, written):
    text = written(("void sinh_kernel<float>", "1", 0), ("forward", "1", 50), ("void sinh_kernel<float>", "1", 0))
    assert [[launch.kernel for launch in call] for call in limits.between_flushes(limits.launches(text))] == [
        ["forward"]
    ]


def test_both_parts_name_the_calls_that_the_grid_has(limits):
    problems = limits.problems(select(["d96", "decode"]), ["forward", "backward"], [peer("jax_fa4")])
    found = [limits.names(problem) for problem in problems]
    assert [record["direction"] for record in found] == ["forward", "backward"] * 2 + ["forward"] * 5
    assert len({record["cell"] for record in found}) == 7


def test_peers_take_turns_at_one_direction_of_one_cell(limits):
    problems = limits.problems(select(["d96 4x4096 h16 d96", "gqa"]), ["forward"], peers.select(["fa3"]))
    found = [limits.names(problem) for problem in problems]
    assert [record["peer"] for record in found] == ["jax_fa4", "fa3"] * 2
    assert [record["cell"].split()[0] for record in found] == ["d96", "d96", "gqa", "gqa"]
    assert {record["direction"] for record in found} == {"forward"}


class UnhelpfulLibrary:
    """A management library all of whose functions fail."""

    def __getattr__(self, name):
        return lambda *args: 3


def test_a_card_that_does_not_answer_is_told_and_not_waited_for(limits, monkeypatch):
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda name: UnhelpfulLibrary())
    with pytest.raises(RuntimeError, match="nvmlInit_v2 failed with status 3"):
        limits.Card()


@pytest.fixture
def command(limits, monkeypatch):
    """A function that runs the command; `found` is what its parts say where ncu is there."""

    def run(*arguments, **found):
        monkeypatch.setattr(sys, "argv", ["limits.py", *arguments])
        monkeypatch.setattr(limits.shutil, "which", lambda name: name)
        monkeypatch.setattr(limits, "in_process", lambda command, part, environ=None: iter(found[part]))
        limits.main()

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "nope"], r"argument --cells: no cell is called 'nope' \(there are d128, .*window\)"),
        (["--cells", ""], r"argument --cells: no cell is called '' \(there are "),
        (["--cells", ","], r"argument --cells: no cell is called ',' \(there are "),
        (["--peers", "nope"], r"argument --peers: no peer is called 'nope' \(there are jax_fa4, .*xla\)"),
        (["--directions", "foward"], "argument --directions: must be forward or backward, .*, got 'foward'"),
        (["--directions", ""], "argument --directions: must be forward or backward, .*, got ''"),
        (["--cells", "decode", "--directions", "backward"], "argument --directions: no chosen cell has a backward"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_with_what_can(command, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        command(*arguments)
    assert re.search(message, capsys.readouterr().err)


def test_a_machine_without_a_gpu_is_told(limits, command, capsys, monkeypatch):
    def no_devices(platform):
        raise RuntimeError(f"Unknown backend {platform}\nmore")

    monkeypatch.setattr(limits.jax, "devices", no_devices)
    with pytest.raises(SystemExit, match="2"):
        command(missing=limits.missing([]))
    assert "error: needs an NVIDIA GPU, and JAX finds none: Unknown backend gpu\n" in capsys.readouterr().err


def test_missing_peers_are_told(limits, command, capsys, monkeypatch):
    monkeypatch.setattr(limits.jax, "devices", lambda platform: ["a GPU"])
    shown = [peer("jax_fa4"), peer("fa3", missing="not installed")]
    with pytest.raises(SystemExit, match="2"):
        command(missing=limits.missing(limits.problems([SMOKE], ["forward", "backward"], shown)))
    assert "error: argument --peers: fa3 cannot run here: not installed\n" in capsys.readouterr().err


def test_what_a_peer_refuses_is_left_out_and_named(limits, command, capsys, tmp_path, monkeypatch):
    figures = {"GHz": 1.5, "W": 700, "us": 20.0, "mJ": 14.0}
    counters = {"kernel": "k", "part": 1, **dict.fromkeys([*limits.BUSY, *limits.TAKEN], 50.0)}
    monkeypatch.setattr(limits, "profiled", lambda command: iter([counters, {"refused": "no room"}]))
    out = tmp_path / "found.json"
    chosen = ["--cells", "smoke", "--peers", "xla", "--directions", "forward", "--out", str(out)]
    command(*chosen, missing=[], sustained=[figures, figures])
    printed = capsys.readouterr()
    assert f"{SMOKE}, forward, jax_fa4: 1.5 GHz, 700 W, 20.0 us, 14.0 mJ" in printed.err
    assert printed.out.splitlines()[-1] == f"{SMOKE}, forward, xla refused: no room"
    written = json.loads(out.read_text())
    assert [record["peer"] for record in written["kernels"]] == ["jax_fa4"]
    assert [(record["peer"], record["refused"]) for record in written["refused"]] == [("xla", "no room")]


def test_a_part_goes_on_behind_what_a_peer_refuses(limits):
    shown = [peer("bad", fails="no head dim 64\nmore"), peer("half", backward="no gradient"), peer("good")]
    wanted = limits.problems([SMOKE], ["backward"], shown)
    assert list(limits.outcomes(wanted, lambda found, direction: {"ran": found.run[direction]})) == [
        {"refused": "ValueError: no head dim 64"},
        {"refused": "no gradient"},
        {"ran": "good"},
    ]


def test_counters_are_those_of_the_calls_that_ran(limits, written, monkeypatch):
    def in_process(command, part, environ):
        log = command[command.index("--log-file") + 1]
        pathlib.Path(log).write_text(written((FLUSH, "1", 0), ("forward", "1", 50), (FLUSH, "1", 0)))
        return iter([{"refused": "no room"}, {}])

    monkeypatch.setattr(limits, "in_process", in_process)
    refused, ran = limits.profiled(["limits.py"])
    assert refused == {"refused": "no room"}
    assert (ran["kernel"], ran["tensor"]) == ("forward", 50)


def test_what_others_print_beside_a_part_is_no_finding(limits):
    program = f"print('{{}}'); print({limits.FOUND + '[1]'!r}); raise SystemExit(3)"
    found = limits.in_process([sys.executable, "-c", program], "counted")
    assert next(found) == [1]
    with pytest.raises(limits.subprocess.CalledProcessError):
        next(found)


def test_the_profiler_stops_behind_a_call_that_fails(limits, monkeypatch):
    called = []
    library = types.SimpleNamespace(
        cuProfilerStart=lambda: called.append("start"), cuProfilerStop=lambda: called.append("stop")
    )
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda name: library)
    with pytest.raises(ZeroDivisionError), limits.profiler():
        _ = 1 / 0
    assert called == ["start", "stop"]
