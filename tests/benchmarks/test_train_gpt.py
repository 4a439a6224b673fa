"""Training the same model with two implementations of attention, at sizes that suit a test."""

import itertools
import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.nnx", reason="needs the benchmark's packages (pip install 'jax-fa4[demo]')")


@pytest.fixture(scope="module")
def train_gpt(program):
    return program("train_gpt")


@pytest.fixture(scope="module")
def shape(train_gpt):
    return train_gpt.Shape(vocabulary=64, layers=1, heads=2, head_dim=16, length=32, batch=8)


def test_both_trainings_lower_the_loss_alike_and_are_reported(
    train_gpt, quick_compilation, monkeypatch, tmp_path, capsys
):
    file = tmp_path / "found.json"
    sizes = ["--layers", "1", "--heads", "1", "--length", "16", "--batch", "8", "--steps", "30"]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *sizes, "--out", str(file)])
    train_gpt.main()
    found = json.loads(file.read_text())
    curves = found["losses"]
    assert set(curves) == {"jax_fa4", "xla", "xla, last bit"}
    assert all(len(losses) == 30 and losses[-1] < losses[0] - 0.2 for losses in curves.values())
    np.testing.assert_allclose(curves["jax_fa4"], curves["xla"], atol=1e-4)
    assert curves["xla, last bit"] != curves["xla"]
    assert found["distance"]["largest"] < found["distance_of_last_bit"]["largest"]
    speeds = found["tokens_per_second"]
    assert found["ratio"] == pytest.approx(speeds["jax_fa4"] / speeds["xla"], rel=0.01)
    assert f"tokens per second of jax_fa4 over those of xla: {found['ratio']:.3f}" in capsys.readouterr().out


def test_a_token_decides_which_few_may_come_two_places_behind_it(train_gpt, shape):
    successors = {}
    for windows in itertools.islice(train_gpt.batches(shape, 3), 3):
        assert windows.shape == (8, 33)
        for row in windows:
            for token, later in zip(row, row[2:], strict=False):
                successors.setdefault(int(token), set()).add(int(later))
    assert max(map(len, successors.values())) <= train_gpt.CHOICES


def test_tokens_are_the_same_in_every_training(train_gpt, shape):
    first, second = (list(train_gpt.batches(shape, 2)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).any()


def test_the_distance_of_curves_is_that_of_their_means_over_a_turn(train_gpt):
    noise = np.resize((0.5, -0.5), 30)
    a, b = (types.SimpleNamespace(losses=[jnp.float32(x) for x in losses]) for losses in (np.ones(30), 1.25 + noise))
    assert train_gpt.distance(a, b) == {name: pytest.approx(0.25) for name in ("largest", "mean", "at_the_end")}
