"""Training the same model with two implementations of attention, at sizes that suit a test."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.nnx", reason="needs the benchmark's packages (pip install 'jax-fa4[demo]')")


@pytest.fixture(scope="module")
def train_gpt(program):
    return program("train_gpt")


@pytest.fixture(scope="module")
def shape(train_gpt):
    return train_gpt.Shape(vocabulary=64, layers=1, heads=2, head_dim=16, length=32, batch=8, keys=4, values=8)


def test_both_trainings_lower_the_loss_alike_and_are_reported(
    train_gpt, quick_compilation, monkeypatch, tmp_path, capsys
):
    file = tmp_path / "found.json"
    sizes = ["--layers", "1", "--heads", "1", "--head-dim", "64", "--length", "32", "--batch", "16", "--steps", "120"]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *sizes, "--out", str(file)])
    train_gpt.main()
    found = json.loads(file.read_text())
    curves = found["losses"]
    assert set(curves) == {"jax_fa4", "xla", "xla, last bit"}
    assert all(len(losses) == 120 for losses in curves.values())
    assert min(found["below_without_attention"].values()) > 0.1
    np.testing.assert_allclose(curves["jax_fa4"], curves["xla"], atol=1e-3)
    assert curves["xla, last bit"] != curves["xla"]
    assert found["distance"]["largest"] < found["distance_of_last_bit"]["largest"]
    speeds = found["tokens_per_second"]
    assert found["ratio"] == pytest.approx(speeds["jax_fa4"] / speeds["xla"], rel=0.01)
    assert f"tokens per second of jax_fa4 over those of xla: {found['ratio']:.3f}" in capsys.readouterr().out


def without_any(q, k, v):
    return jnp.zeros_like(q)


def without_gradients_of_queries_and_keys(q, k, v):
    q, k = jax.lax.stop_gradient((q, k))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("wrong", [without_any, without_gradients_of_queries_and_keys])
def test_wrong_attention_is_told_apart(train_gpt, shape, quick_compilation, monkeypatch, wrong):
    right = train_gpt.attention_of
    monkeypatch.setattr(train_gpt, "attention_of", lambda name: wrong if name == "jax_fa4" else right(name))
    train_gpt.step_of.cache_clear()
    small = dataclasses.replace(shape, heads=1, head_dim=64, batch=16)
    found = train_gpt.run(small, jnp.dtype("float32"), "xla", 120, 1e-3)
    train_gpt.step_of.cache_clear()
    assert found["below_without_attention"]["xla"] > 0.1
    assert found["below_without_attention"]["jax_fa4"] < 0
    assert found["distance"]["largest"] > 100 * found["distance_of_last_bit"]["largest"]


def test_keys_follow_each_other_and_keep_the_value_that_a_window_chose(train_gpt, shape):
    values = set()
    for windows in train_gpt.batches(shape, 3):
        assert windows.shape == (8, 33)
        keys = windows // shape.values
        np.testing.assert_array_equal(keys[:, 1:], (keys[:, :-1] + 1) % shape.keys)
        np.testing.assert_array_equal(windows[:, shape.keys :], windows[:, : -shape.keys])
        values |= set((windows % shape.values)[:, 0].tolist())
    assert values == set(range(shape.values))


@pytest.mark.parametrize("length", [2, 3, 4, 32])
def test_least_losses_are_the_entropies_of_the_tokens(train_gpt, shape, length):
    shape = dataclasses.replace(shape, length=length)
    least = train_gpt.bounds(shape)
    assert least["unigram"] == pytest.approx(np.log(32))
    assert least["without_attention"] == pytest.approx(np.log(8))
    (windows,) = train_gpt.batches(shape, 1)
    new = [token not in row[:place] for row in windows for place, token in enumerate(row)]
    first_times = np.reshape(new, windows.shape)[:, 1:].mean()
    assert least["optimum"] == pytest.approx(np.log(8) * first_times)


def test_more_tokens_than_the_vocabulary_are_refused(train_gpt, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--keys", "9", "--values", "8", "--vocabulary", "64"])
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main()
    assert "9 keys of 8 values are more tokens than 64" in capsys.readouterr().err


def test_tokens_are_the_same_in_every_training(train_gpt, shape):
    first, second = (list(train_gpt.batches(shape, 2)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).any()


def test_the_distance_of_curves_is_that_of_their_means_over_a_turn(train_gpt):
    noise = np.resize((0.5, -0.5), 30)
    a, b = (types.SimpleNamespace(losses=[jnp.float32(x) for x in losses]) for losses in (np.ones(30), 1.25 + noise))
    assert train_gpt.distance(a, b) == {name: pytest.approx(0.25) for name in ("largest", "mean", "at_the_end")}
