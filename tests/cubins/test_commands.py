"""`python -m jax_fa4`."""

import dataclasses
import subprocess
import sys
from collections import Counter

import pytest

from jax_fa4 import __main__ as command
from jax_fa4 import configs
from jax_fa4.cubins import get, info, key, lookup, report


@pytest.fixture
def table(monkeypatch, config, other_config, stand_in):
    """Two kernels in the table, and a compiler for them."""
    monkeypatch.setattr(configs, "all_configs", lambda arch: (config, other_config))
    monkeypatch.setattr(lookup, "installed_compiler", stand_in.compiler)
    return config, other_config


def test_build_fills_the_cache(table, folder, capsys, stand_in):
    assert command.main(["build", "--arch", "sm_90a"]) == 0
    assert len(list(folder.glob("*.cubin"))) == 2
    assert capsys.readouterr().out == f"2 kernels, 0.0 MB, in {folder}\n"


def test_building_again_compiles_nothing(table, stand_in, forget):
    for _ in range(2):
        assert command.main(["build", "--arch", "sm_90a", "--arch", "sm_90a"]) == 0
        forget()
    assert stand_in.count == 2


@pytest.mark.parametrize("option", [["--dtype", "float16"], ["--head-dim", "64"]], ids=" ".join)
def test_build_can_be_narrowed(table, folder, option, other_config):
    assert command.main(["build", "--arch", "sm_90a", *option]) == 0
    assert len(list(folder.glob("*.cubin"))) == 1
    assert lookup.stored(other_config) is not None


def test_head_dims_are_those_of_kernels_that_see_values_only_too(capsys):
    with pytest.raises(SystemExit):
        command.main(["build", "--arch", "sm_100a", "--head-dim", "72"])
    assert "no kernel has 72 (choose from 64, 128, 192, 256)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_80"], "invalid choice: 'sm_80' (choose from "),
        ([], "the following arguments are required: --arch"),
        (["--arch", "sm_90a", "--dtype", "float64"], "--dtype: no kernel has float64 (choose from bfloat16, float16)"),
        (["--arch", "sm_90a", "--head-dim", "72"], "--head-dim: no kernel has 72 (choose from 64, 128)"),
        (["--arch", "sm_90a", "--jobs", "0"], "--jobs: must be at least 1, got 0"),
        (["--arch", "sm_90a", "--jobs", "all"], "--jobs: must be at least 1, got all"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_built_is_refused_with_the_choices(table, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        command.main(["build", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_build_fails_if_nothing_can_be_saved(table, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="Not a directory"):
        assert command.main(["build", "--arch", "sm_90a"]) == 1
    assert "2 kernels were compiled and not saved" in capsys.readouterr().err


@pytest.fixture
def disassembled(monkeypatch):
    """Resources for every cubin, without spills, that a test may change."""
    numbers = {
        field.name: 0
        for field in dataclasses.fields(report.Resources)
        if field.name not in ("registers", "opcodes", "role_registers", "loops")
    }
    found = [report.Resources(registers=168, opcodes=Counter(HGMMA=7), **numbers)]
    monkeypatch.setattr(command, "resources_of", lambda cubin: found[0])
    return found


def test_report_prints_a_row_for_each_kernel(table, disassembled, capsys, config):
    assert command.main(["report", "--arch", "sm_90a"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["arch", "regs"]
    assert [row.split()[:2] for row in rows] == [["sm_90a", "168"]] * 2
    assert rows[0].endswith(repr(config))


def test_report_can_be_narrowed_and_written(table, disassembled, tmp_path, capsys):
    file = tmp_path / "report.txt"
    assert command.main(["report", "--arch", "sm_90a", "--head-dim", "64", "--out", str(file)]) == 0
    assert len(file.read_text().splitlines()) == 2
    assert capsys.readouterr().out == ""


def test_report_is_refused_a_file_that_it_cannot_write_before_it_compiles(table, stand_in, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["report", "--arch", "sm_90a", "--out", str(tmp_path / "absent" / "report.txt")])
    assert "--out: must be a file in a folder that exists, got " in capsys.readouterr().err
    assert stand_in.count == 0


def test_a_missing_package_is_an_error_of_one_line(monkeypatch, capsys, table):
    def absent(config):
        raise ModuleNotFoundError("No module named 'cutlass'")

    monkeypatch.setattr(command.lookup, "get", absent)
    assert command.main(["build", "--arch", "sm_90a"]) == 1
    assert capsys.readouterr().err.endswith("jax_fa4: No module named 'cutlass'\n")


def test_no_progress_bar_is_needed(monkeypatch, capsys, table, stand_in):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert command.main(["build", "--arch", "sm_90a"]) == 0
    assert capsys.readouterr().out.startswith("2 kernels")


@pytest.mark.parametrize("field", ["stack_bytes", "local_bytes", "spill_loads", "spill_stores"])
def test_report_fails_and_names_kernels_that_spill(table, disassembled, capsys, field):
    disassembled[0] = dataclasses.replace(disassembled[0], **{field: 1})
    assert command.main(["report", "--arch", "sm_90a"]) == 1
    assert capsys.readouterr().err.count(" spills registers\n") == 2


def test_info_lists_what_is_cached(config, stand_in, capsys, folder):
    cubin = get(config, compiler=stand_in.compiler())
    (folder / f"{'b' * 64}.cubin").touch()
    assert command.main(["info"]) == 0
    out = capsys.readouterr().out
    size = sum(path.stat().st_size for path in folder.glob("*.cubin")) / 1e6
    assert f"{folder}: 2 kernels, {size:.1f} MB" in out
    assert f"{cubin.key[:12]}  sm_90a  {config!r}  nvidia-cutlass-dsl 4.8.1" in out
    assert f"{'b' * 64}.cubin: unreadable" in out


def test_info_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(info, "installed_dsl", lambda: None)
    monkeypatch.setattr(info.launcher, "library", lambda: None)

    def no_driver():
        raise RuntimeError("there is no CUDA driver: libcuda\nmore")

    monkeypatch.setattr(info, "open_driver", no_driver)
    lines = dict(line.split("  ", 1) for line in info.describe().splitlines())
    assert lines[key.DSL_PACKAGE].strip() == "not installed"
    assert "missing" in info.describe()
    assert "unusable: there is no CUDA driver: libcuda\n" in info.describe()


def test_info_says_why_a_compiler_is_not_used(monkeypatch):
    monkeypatch.setattr(info, "installed_dsl", lambda: "5.0.0")
    assert "5.0.0 (unused: " in info.describe()


def test_clear_cache_says_what_it_freed(config, stand_in, capsys, folder):
    get(config, compiler=stand_in.compiler())
    assert command.main(["clear-cache"]) == 0
    assert capsys.readouterr().out == f"removed 2 files, 0.0 MB, from {folder}\n"
    assert list(folder.iterdir()) == []


def test_the_commands_run_as_a_program():
    done = subprocess.run([sys.executable, "-m", "jax_fa4", "clear-cache"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("removed 0 files")
