"""The training example, on a model small enough for a test."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx", reason="needs the example's packages (pip install 'jax-fa4[demo]')")
SCRIPT = Path(__file__).parents[2] / "examples" / "train_char_lm.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_char_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_training_lowers_the_loss_and_ends_with_writing(tmp_path):
    file = tmp_path / "found.json"
    options = ["--steps", "48", "--layers", "1", "--heads", "1", "--length", "16"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--out", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0] - 1
    assert re.search(r"^attention: (blockwise JAX|sm_\w+ cubin)", done.stdout, re.MULTILINE)
    assert done.stdout.count("it writes:") == 3
    assert "48/48" in done.stderr  # the progress bar
    found = json.loads(file.read_text())
    assert f"jax_fa4: {found['tokens_per_second']:,} tokens per second" in done.stdout
    assert len(found["losses"]) == 48
    assert found["losses"][0] == pytest.approx(losses[0], abs=1e-3)
    assert np.mean(found["losses"][-6:]) == pytest.approx(losses[-1], abs=1e-3)
    assert f"not seen: {found['unseen_loss']:.3f} nats" in done.stdout
    assert (found["attention"], found["steps"]) == ("jax_fa4", 48)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_one_character_at_a_time_gives_the_logits_of_all_at_once(example, dtype, error):
    shape = example.Shape(vocabulary=30, layers=1, heads=1, length=6, batch=1)
    model = example.CharacterModel(shape, jnp.dtype(dtype), nnx.Rngs(0))
    ids = np.random.default_rng(0).integers(0, 30, size=(1, 6))
    together = nnx.jit(example.CharacterModel.__call__)(model, jnp.asarray(ids), jnp.arange(6))[0]
    model.empty_caches(shape)
    steps = [example.next_logits(model, jnp.asarray(ids[0, i]), jnp.asarray(i)) for i in range(6)]
    np.testing.assert_allclose(jnp.stack(steps), together, atol=error)


def test_the_same_model_trains_and_writes_alike_with_the_attention_of_jax_nn(example):
    shape = example.Shape(vocabulary=30, layers=1, heads=1, length=6, batch=4)
    ids = np.random.default_rng(0).integers(0, 30, size=200)
    ours, theirs = (
        example.train_and_measure(
            shape, jnp.dtype("float32"), ids, 12, np.random.default_rng(0), reports=0, attention=attention
        )
        for attention in ("jax_fa4", "xla")
    )
    np.testing.assert_allclose(ours.losses, theirs.losses, atol=1e-4)
    assert ours.losses != theirs.losses
    vocabulary = "".join(map(chr, range(65, 95)))
    texts = {example.write(x.model, shape, vocabulary, "A", np.random.default_rng(0)) for x in (ours, theirs)}
    assert len(texts) == 1


def test_cudnn_is_refused_without_a_gpu(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_char_lm.py", "--attention", "cudnn"])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert "--attention cudnn needs a GPU" in capsys.readouterr().err


def test_the_text_is_english_sentences(example):
    lines = example.prose().splitlines()
    assert len(lines) > 500
    assert all(line[0].isupper() and line.endswith(".") for line in lines)


@pytest.mark.parametrize(
    ("option", "lowest"), [("--steps", 2), ("--layers", 1), ("--heads", 1), ("--length", 1), ("--batch", 1)]
)
def test_sizes_too_small_are_refused_before_it_trains(example, option, lowest, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_char_lm.py", option, str(lowest - 1)])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert f"argument {option}: must be at least {lowest}, got {lowest - 1}" in capsys.readouterr().err


def test_the_fewest_steps_train(example):
    shape = example.Shape(vocabulary=30, layers=1, heads=1, length=6, batch=1)
    ids = np.random.default_rng(0).integers(0, 30, size=50)
    example.train(shape, jnp.dtype("float32"), ids, example.FEWEST_STEPS, np.random.default_rng(0))
