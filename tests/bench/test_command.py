"""`python -m jax_fa4 bench`."""

import json
import re

import jax
import pytest

from jax_fa4 import __main__ as command
from jax_fa4.bench import cells, clock, peers, report

from .stand_ins import KnownClock, StandIn


@pytest.fixture
def known(monkeypatch, cell):
    """One small cell, and three peers of known speed, one of which is missing."""
    decode = cells.Cell(
        name="tiny_decode",
        kind="decode",
        q_len=1,
        kv_len=8,
        q_heads=2,
        kv_heads=1,
        head_dim=16,
        head_dim_v=16,
    )
    present = {
        "jax_fa4": StandIn("jax_fa4"),
        "cudnn": StandIn("cudnn", refused={"backward": "no gradient"}),
        "fa3": StandIn("fa3", missing="fa3 is not installed"),
    }
    monkeypatch.setattr(cells, "GRID", (cell, decode))
    monkeypatch.setattr(peers, "PEERS", present)
    monkeypatch.setattr(peers, "DEFAULT", ("cudnn", "fa3"))
    monkeypatch.setattr(clock, "HostClock", lambda: KnownClock(jax_fa4=5, cudnn=10))


def test_the_table_shows_speeds_ratios_and_who_was_left_out(known, capsys):
    assert command.main(["bench", "--clock", "host"]) == 0
    out = capsys.readouterr().out
    assert "fa3: left out, fa3 is not installed" in out
    assert re.search(r"^prefill forward, TFLOP/s +cudnn +jax_fa4 +ratio\ntiny 1x8 h2.1 d16 causal .* 2\.00$", out, re.M)
    assert re.search(r"^prefill backward, TFLOP/s +jax_fa4 +ratio\ntiny 1x8 h2.1 d16 causal +\S+ +-$", out, re.M)
    assert re.search(r"^decode forward, TB/s ", out, re.M)
    assert out.count("geometric mean of ratios 2.000, lowest 2.000") == 2
    assert "\nNot timed:\ncudnn, tiny 1x8 h2.1 d16 causal, backward: no gradient\n" in out


def test_json_and_plot_are_written(known, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'jax-fa4[bench]')")
    files = [tmp_path / "found.json", tmp_path / "found.png"]
    assert command.main(["bench", "--clock", "host", "--out", str(files[0]), "--plot", str(files[1])]) == 0
    found = json.loads(files[0].read_text())
    assert found["summary"]["decode forward"] == {"geometric_mean": 2.0, "lowest": 2.0}
    assert [row["direction"] for row in found["rows"]] == ["forward", "backward", "forward"]
    assert found["rows"][0]["figures"]["jax_fa4"]["microseconds"] == 5.0
    assert {"date", "device", "jax", "jax_fa4"} <= set(found["environment"])
    assert (found["missing"], found["peers"]["cudnn"]) == ({"fa3": "fa3 is not installed"}, "1.0")
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_what_was_written_can_be_shown_again(known, tmp_path, capsys):
    file = tmp_path / "found.json"
    command.main(["bench", "--clock", "host", "--out", str(file)])
    first = capsys.readouterr().out
    assert command.main(["bench", "--show", str(file)]) == 0
    assert capsys.readouterr().out == first
    again = report.from_json(file.read_text())
    assert report.from_json(report.to_json(again)) == again


def test_json_is_there_after_each_cell(known, tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    seen = []

    class Watching(KnownClock):
        def seconds(self, samples):
            seen.append(json.loads(file.read_text())["rows"] if file.exists() else None)
            return super().seconds(samples)

    monkeypatch.setattr(clock, "HostClock", lambda: Watching(jax_fa4=5, cudnn=10))
    command.main(["bench", "--clock", "host", "--out", str(file)])
    assert [rows and len(rows) for rows in seen] == [None, 2]


def test_an_unknown_cell_ends_with_a_message(capsys):
    assert command.main(["bench", "--cells", "d65"]) == 1
    assert "no cell is called 'd65'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\xff", '{"summary": 1, "rows": [{}]}'])
def test_a_file_of_something_else_cannot_be_shown(tmp_path, capsys, text):
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    assert command.main(["bench", "--show", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"jax_fa4: {file}: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "choose some, as --cells smoke"), (["--clock", "device", "--cells", "smoke"], "JAX has no GPU here")],
    ids=["all-cells", "device-clock"],
)
def test_what_needs_a_gpu_is_refused_without_one(monkeypatch, capsys, options, message):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main(["bench", *options]) == 1
    out, err = capsys.readouterr()
    assert message in err
    assert not out


def test_negative_rounds_are_refused(capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(["bench", "--rounds", "-1"])
    assert exit.value.code == 2
    assert "must be at least 0, got -1" in capsys.readouterr().err
