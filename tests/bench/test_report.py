"""Tables of rows made by hand."""

import dataclasses
import importlib.metadata

import jax
import pytest

import jax_fa4
from jax_fa4.bench import peers
from jax_fa4.bench.report import Report, environment, table
from jax_fa4.bench.run import Figure, Row
from jax_fa4.cubins import key


def row(cell, direction="forward", **speeds):
    figures = {name: Figure(seconds=1e-3, speed=speed, spread=0.0) for name, speed in speeds.items()}
    return Row(cell=cell, direction=direction, figures=figures, refused={})


def lines(*rows):
    names = dict.fromkeys(name for row in rows for name in row.figures)
    report = Report(environment={}, clock="known", rounds=1, peers=dict.fromkeys(names, "1.0"), missing={}, rows=rows)
    return table(report).splitlines()


def test_the_cost_of_a_deterministic_gradient_is_shown(cell):
    shown = lines(row(cell, "backward", jax_fa4=400.0, deterministic=300.0), row(cell, jax_fa4=1.0, deterministic=1.0))
    assert [line for line in shown if "deterministic over" in line] == [
        f"{cell}, backward, deterministic over not: 0.750"
    ]


def test_pages_are_compared_with_contiguous_keys(cell):
    decode = dataclasses.replace(cell, name="decode", kind="decode", q_len=1)
    paged = dataclasses.replace(decode, name="page4", kind="paged", page_size=4)
    longer = dataclasses.replace(paged, kv_len=16)
    shown = lines(row(paged, jax_fa4=3.8), row(longer, jax_fa4=3.0), row(decode, jax_fa4=4.0))
    assert [line for line in shown if "contiguous" in line] == [f"{paged}, forward, over contiguous keys: 0.950"]


def test_documents_with_the_longest_last_are_compared_with_the_longest_first(cell):
    last = dataclasses.replace(cell, name="mix", kind="varlen", lengths=(1, 2, 5))
    first = dataclasses.replace(last, name="mix_sorted", lengths=(5, 2, 1))
    shown = lines(row(last, jax_fa4=97.0), row(first, jax_fa4=100.0))
    assert [line for line in shown if "longest" in line] == [f"{last}, forward, over the longest first: 0.970"]


def test_nothing_is_compared_that_has_no_twin(cell):
    assert not any("over itself" in line for line in lines(row(cell, jax_fa4=1.0, cudnn=2.0)))


def test_the_environment_tells_kernels_of_other_sources_apart(monkeypatch, tmp_path):
    digests = {environment()["kernels"]}
    assert digests == {key.sources_digest()[:16]}
    for source in ("one kernel", "another"):
        (tmp_path / "kernel.py").write_text(source)
        monkeypatch.setattr(key, "source_folders", lambda: [tmp_path])
        key.sources_digest.cache_clear()
        digests.add(environment()["kernels"])
    key.sources_digest.cache_clear()
    assert len(digests) == 3
    assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize("name", ["jax_fa4", "xla"])
def test_a_package_that_is_only_on_the_path_says_its_version_itself(name, monkeypatch):
    def not_installed(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert peers.PEERS[name].version() == {"jax_fa4": jax_fa4.__version__, "xla": jax.__version__}[name]
