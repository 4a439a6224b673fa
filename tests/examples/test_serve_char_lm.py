"""The serving example, on a model small enough for a test."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4

nnx = pytest.importorskip("flax.nnx", reason="needs the example's packages (pip install 'jax-fa4[demo]')")
SCRIPT = Path(__file__).parents[2] / "examples" / "serve_char_lm.py"
LENGTH = 20


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_char_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.PAGE_SIZE, module.CHUNK = 4, 3
    return module


@pytest.fixture(scope="module")
def shape(example):
    vocabulary, _ = example.training.characters()
    return example.training.Shape(vocabulary=len(vocabulary), layers=1, heads=1, length=LENGTH, batch=1)


@pytest.fixture(scope="module")
def model(example, shape):
    make = nnx.jit(lambda: example.training.CharacterModel(shape, jnp.dtype("float32"), nnx.Rngs(0)))  # in one program
    return make()


@pytest.fixture(scope="module")
def requests(example):
    """More than there are slots, of different lengths."""
    rng = np.random.default_rng(0)
    return example.random_requests(rng.integers(0, 30, 200), 9, LENGTH, rng)


@pytest.fixture
def serve(example, model):
    def run(requests, cache):
        with example.tqdm(disable=True) as bar:
            return example.serve(model, requests, cache, bar)

    return run


def paged(example, shape, slots=3, num_pages=11):
    return example.PagedCache(shape, jnp.dtype("float32"), slots, num_pages)


@pytest.mark.parametrize("dense", ["DenseCache", "JaxNnCache"])
def test_a_paged_and_a_dense_cache_give_the_same_answers(example, shape, requests, serve, quick_compilation, dense):
    cache = paged(example, shape)
    answers = serve(requests, cache)
    assert answers == serve(requests, getattr(example, dense)(shape, jnp.dtype("float32"), 3, 11))
    assert {number: len(answer) for number, answer in answers.items()} == {r.number: r.new for r in requests}
    assert sorted(cache.free) == list(range(11))


def test_an_answer_is_what_the_model_writes_without_any_cache(
    example, model, shape, requests, serve, quick_compilation
):
    request = max(requests, key=lambda request: request.new)
    (answer,) = serve([request], paged(example, shape)).values()
    tokens = np.array([*request.prompt.tolist(), *answer])
    places = np.arange(len(request.prompt), len(tokens))
    logits = nnx.jit(example.training.CharacterModel.__call__)(model, tokens[None], jnp.arange(len(tokens)))[0]
    batch = example.Batch(
        tokens=np.zeros((len(places), 1), np.int32),
        counts=np.ones(len(places), np.int32),
        lengths=places - 1,
        requests=np.full(len(places), request.number),
        page_table=np.zeros((len(places), 1), np.int32),
    )
    noise = example._noise(batch, shape.vocabulary)
    written = jnp.argmax(logits[places - 1] / example.TEMPERATURE + noise, axis=-1)
    np.testing.assert_array_equal(tokens[places], written)


def test_requests_wait_for_pages_and_share_no_page(example, shape, requests, serve, monkeypatch, quick_compilation):
    cache = paged(example, shape)
    del cache.free[6:]
    batches = []
    make = example._batch
    monkeypatch.setattr(example, "_batch", lambda *args: batches.append(dict(cache.held)) or make(*args))
    assert len(serve(requests, cache)) == len(requests)
    assert max(len(held) for held in batches) > 1
    assert min(len(held) for held in batches) < 3
    for held in batches:
        pages = [page for of_slot in held.values() for page in of_slot]
        assert len(set(pages)) == len(pages)


def test_a_request_that_fits_nowhere_is_an_error(example, shape, requests, serve):
    with pytest.raises(ValueError, match="request 0 needs more room than the cache has"):
        serve(requests, paged(example, shape, num_pages=1))


@pytest.fixture
def run_main(example, model, monkeypatch):
    """Of a model that needs no training."""

    def run(*options):
        monkeypatch.setattr(example.training, "train", lambda asked, *args, **options: model)
        sizes = ["--layers", "1", "--heads", "1", "--length", str(LENGTH), "--requests", "5", "--slots", "3"]
        monkeypatch.setattr(sys, "argv", ["serve_char_lm.py", *sizes, *options])
        example.main()

    return run


def test_it_serves_the_trained_model_and_reports(run_main, tmp_path, capsys, quick_compilation):
    run_main("--out", str(tmp_path / "found.json"))
    out, err = capsys.readouterr()
    assert all(f"{name}: " in out for name in ("paged", "dense", "jax.nn"))
    assert out.count("tokens per second") == 3
    assert out.count("the same answer to 5 of 5") == 2
    found = json.loads((tmp_path / "found.json").read_text())
    tokens = found["served"]["tokens"]
    assert err.count(f"{tokens}/{tokens}") == 3  # the progress bars
    for name, speed in found["tokens_per_second"].items():
        assert f"{name}: {speed:,.0f} tokens per second" in out
    assert found["same_answers_as_paged"] == {"dense": 5, "jax.nn": 5}
    assert (found["sizes"]["slots"], found["dtype"]) == (3, "float32")
    assert found["environment"]["jax_fa4"] == jax_fa4.__version__


def test_other_answers_from_a_dense_cache_are_an_error(example, run_main, monkeypatch, capsys):
    def serve(name, model, requests, make_cache):
        answers = {request.number: [1, 2] for request in requests}
        return answers | ({requests[0].number: [1, 3]} if name == "dense" else {}), 10.0

    monkeypatch.setattr(example, "timed", serve)
    with pytest.raises(SystemExit, match="paged and dense answers differ for 1 of 5 requests"):
        run_main()
    assert "the same answer to 4 of 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "lowest"),
    [("--steps", 2), ("--layers", 1), ("--heads", 1), ("--length", 3), ("--requests", 1), ("--slots", 1)],
)
def test_sizes_too_small_are_refused_before_it_trains(example, option, lowest, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_char_lm.py", option, str(lowest - 1)])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert f"argument {option}: must be at least {lowest}, got {lowest - 1}" in capsys.readouterr().err


@pytest.mark.parametrize("length", [3, 4, 5, 20, 40])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_pool_has_room_for_any_request(example, shape, slots, length):
    cache = paged(example, dataclasses.replace(shape, length=length), slots, example.pool_size(slots, length))
    requests = example.random_requests(np.arange(200), 20, length, np.random.default_rng(0))
    assert max(request.length for request in requests) <= length
    assert cache.take(0, length)
