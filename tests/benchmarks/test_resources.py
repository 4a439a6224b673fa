"""The committed reports of what kernels are made of: all that are shipped, and none spills."""

import pathlib
import re

import pytest

from jax_fa4 import configs
from jax_fa4.configs import backward_wide, blackwell

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
KINDS = {**vars(configs), **vars(backward_wide), **vars(blackwell)}
REPORTS = {"resources-sm_90a.txt": ("sm_90a",), "resources-blackwell.txt": ("sm_100a", "sm_103a")}
COUNTED = ("stack", "local", "LDL", "STL")  # all 0: registers suffice


def rows(report):
    """Of each kernel what spills, and its config."""
    text = (RESULTS / report).read_text()
    header, *lines = text[text.index("  arch  regs") :].splitlines()
    places = [header.split().index(name) for name in COUNTED]
    for line in lines:
        if line.startswith("sm_"):
            config = eval(re.search(r"\w+Config\(.*\)$", line)[0], KINDS)
            yield [line.split()[place] for place in places], config


@pytest.mark.parametrize(("report", "archs"), REPORTS.items(), ids=REPORTS)
def test_every_shipped_kernel_is_reported_and_none_spills(report, archs):
    spills, reported = zip(*rows(report), strict=True)
    assert {tuple(each) for each in spills} == {("0",) * len(COUNTED)}
    shipped = {config for arch in archs for config in configs.all_configs(arch)}
    if report == "resources-blackwell.txt":  # of one dtype: the other's are made of the same
        shipped = {config for config in shipped if getattr(config, "dtype", "bfloat16") != "float16"}
    assert set(reported) == shipped
