"""`python -m jax_fa4 emulate`."""

import pytest

from jax_fa4 import __main__ as command


def test_a_problem_is_run_compared_and_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cutlass", reason="kernels are compiled with CuTe DSL, which is not installed")
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path))
    picture = tmp_path / "timeline.png"
    sizes = [
        "--head-dim",
        "64",
        "--q-len",
        "70",
        "--kv-len",
        "130",
        "--causal",
        "--gradients",
        "--timeline",
        str(picture),
    ]
    assert command.main(["emulate", "--arch", "sm_90a", *sizes]) == 0
    text = capsys.readouterr().out
    assert [line.partition(":")[0] for line in text.splitlines()[:5]] == ["out", "dq", "dk", "dv", "lse"]
    kernels = [line.split("_")[2] for line in text.splitlines() if line.startswith("jax_fa4")]
    assert kernels == ["forward", "preprocess", "backward", "postprocess"]
    producer, *consumers = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()][:4]
    assert int(producer[4].replace(",", "")) >= 2 * (70 + 2 * 130) * 64  # it loads q, k and v
    assert sum(int(row[6].replace(",", "")) for row in consumers) >= 2 * 2 * 70 * 130 * 64
    assert "instruction mix: " in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "264"], "q's head_dim must be a multiple of 8 from 8 to 256, got 264"),
        (["--kv-lengths", "3,4"], "--kv-lengths must name 1 lengths, got 2"),
        (["--heads", "3", "--kv-heads", "2"], "--heads must be a multiple of --kv-heads, got 3 and 2"),
        (["--q-len", "0"], "--batch, --q-len and --heads must be at least 1"),
    ],
)
def test_what_cannot_be_emulated_is_refused(arguments, message, capsys):
    assert command.main(["emulate", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--timeline", "/absent/timeline.png"], "must be a file in a folder that exists, got /absent/timeline.png"),
        (["--timeline", "timeline.txt"], "must end in .png or .svg, got timeline.txt"),
        (["--seed", "-1"], "must be at least 0, got -1"),
        (["--q-lengths", "1,a"], "must be integers with commas between, got 1,a"),
    ],
)
def test_what_could_not_be_kept_is_refused_before_a_kernel_runs(option, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["emulate", *option])
    assert f"argument {option[0]}: {message}" in capsys.readouterr().err
