"""The arithmetic of the model; what it reads of kernels is tested with the report of their resources."""

import dataclasses
import itertools
import json
import pathlib
import types
from collections import Counter

import pytest

from jax_fa4 import configs
from jax_fa4.bench.cells import Cell
from jax_fa4.bench.run import Figure, Row
from jax_fa4.spec import AttentionSpec, MaskSpec

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def model(program):
    return program("model")


@pytest.fixture(scope="module")
def h200(model):
    return model.MACHINES["sm_90a"]


def spec(head_dim):
    return AttentionSpec(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, group=1, mask=MaskSpec())


def forward_config(head_dim, tile_m=128, tile_n=128):
    config = configs.forward_config(spec(head_dim), "sm_90a")
    return dataclasses.replace(config, tile_m=tile_m, tile_n=tile_n)


def resources(*loops):
    return types.SimpleNamespace(loops=[Counter(loop) for loop in loops])


def test_a_forward_step_at_head_dim_64_keeps_tensor_cores_and_exponentials_equally_busy(model, h200):
    step = model.forward_step(forward_config(64), resources({"MUFU": 64, "FFMA": 100}), h200)
    assert (step.tensor, step.exponentials) == (1024, 1024)
    assert step.issue == 164 * 8 / 4
    assert step.smem == 2 * (128 * 64 + 3 * 128 * 128) / 128
    assert step.overlapped == 1024
    assert step.serial == 2048


def test_twice_the_head_dim_doubles_products_and_no_exponentials(model, h200):
    step = model.forward_step(forward_config(128), resources({"MUFU": 64}), h200)
    assert (step.tensor, step.exponentials, step.bound) == (2048, 1024, "tensor")


def test_a_backward_step_has_five_products(model, h200):
    config = configs.backward_config(spec(128), "sm_90a")
    step = model.backward_step(config, resources({"MUFU": 32}), h200)
    assert step.tensor == 5 * 2 * config.tile_m * config.tile_n * 128 / 4096
    assert step.exponentials == config.tile_m * config.tile_n / 16


def test_two_ctas_that_share_a_tile_compute_no_product_twice(model, h200):
    config = configs.backward_config(spec(256), "sm_90a")
    step = model.backward_step(config, resources({"MUFU": 16}), h200)
    assert config.key_ctas == 2
    assert step.tensor == 5 * 2 * config.tile_m * config.tile_n * 256 / 2 / 4096


def test_the_loop_without_masks_counts_and_an_unrolled_one_by_half(model, h200):
    loads, masked, unrolled = {"MUFU": 3, "IMAD": 9}, {"MUFU": 66, "ISETP": 300}, {"MUFU": 130, "FFMA": 70}
    step = model.forward_step(forward_config(64), resources(loads, masked, unrolled), h200)
    assert step.issue == 200 / 2 * 8 / 4


def test_a_blackwell_step_has_the_clocks_of_its_paper_and_counts_the_loops_of_every_role(model):
    config = configs.forward_config(dataclasses.replace(spec(128), mask=MaskSpec(has_right=True)), "sm_100a")
    loops = {"MUFU": 112, "FFMA2": 10, "LDTM": 1}, {"LDTM": 4, "FMUL2": 30}, {"UTCHMMA": 32}
    step = model.forward_step_sm100(config, resources(*loops), model.MACHINES["sm_100a"])
    tiles = 2  # of 128 queries
    assert step.tensor == tiles * 4 * 128**3 / 8192
    assert step.smem == tiles * 3 * 128**3 / 8192 + 2 * 128 * (128 + 128) / 128
    assert step.exponentials == tiles * 128 * 128 / 16 * 112 / 128
    assert step.issue == (123 * 8 + 34 * 4 + 32) / 4
    assert step.float32 == (20 * 8 + 60 * 4) / 4


@pytest.mark.parametrize(("tiles", "end"), [([5, 4, 3], 7), ([1] * 6, 3), ([], 0)])
def test_tiles_go_to_whoever_is_free_first(model, tiles, end):
    assert model.makespan(tiles, 2) == end


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("window", [(None, None), (5, 3), (None, 2), (4, None)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(16, 16), (7, 20), (20, 7)])
def test_steps_are_the_tiles_with_a_visible_pair(model, q_len, kv_len, causal, window, of_keys):
    sizes = {"q_heads": 1, "kv_heads": 1, "head_dim": 64, "head_dim_v": 64}
    cell = Cell(name="x", kind="prefill", q_len=q_len, kv_len=kv_len, causal=causal, window=window, **sizes)
    left, right = window
    right = 0 if causal else right

    def sees(i, j):
        place = i + kv_len - q_len
        return (left is None or j >= place - left) and (right is None or j <= place + right)

    pairs = {(i // 4, j // 3) for i, j in itertools.product(range(q_len), range(kv_len)) if sees(i, j)}
    tiles = range(-(-kv_len // 3) if of_keys else -(-q_len // 4))
    expected = [sum(pair[of_keys] == tile for pair in pairs) for tile in tiles]
    assert model.steps_of_tiles(cell, 4, 3, of_keys=of_keys) == expected


def test_predictions_stand_beside_what_was_measured(model, h200, monkeypatch):
    monkeypatch.setattr(model, "_resources", lambda config: resources({"MUFU": 64}))
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128}
    cell = Cell(name="x", kind="prefill", batch=4, q_len=4096, kv_len=4096, **sizes)
    figures = {"jax_fa4": Figure(seconds=1e-3, speed=500.0, spread=0.0)}
    rows = [Row(cell=cell, direction=direction, figures=figures, refused={}) for direction in ("forward", "backward")]
    records = model.compare(rows, "sm_90a", dataclasses.replace(h200, limit=5000))
    assert [record["direction"] for record in records] == ["forward", "backward"]
    for record in records:
        assert 200 < record["serial"] < record["overlapped"] < 1071  # of the tensor cores
        assert record["measured"] == 500
    assert f"{500 / records[0]['overlapped']:.2f}" in model.table(records).splitlines()[2]
    (capped, _) = model.compare(rows, "sm_90a", dataclasses.replace(h200, limit=250))
    assert capped["overlapped"] == capped["serial"] == 250


def test_a_clock_that_was_read_takes_the_place_of_the_limit(model, h200, monkeypatch):
    monkeypatch.setattr(model, "_resources", lambda config: resources({"MUFU": 64}))
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128}
    cell = Cell(name="x", kind="prefill", batch=4, q_len=4096, kv_len=4096, **sizes)
    row = Row(cell=cell, direction="forward", figures={}, refused={})
    clocks = model.clocks_of(json.dumps({"kernels": [{"cell": str(cell), "direction": "forward", "GHz": 1.5}]}))
    unlimited = dataclasses.replace(h200, limit=5000)
    (fast,), (slow,) = model.compare([row], "sm_90a", unlimited), model.compare([row], "sm_90a", h200, clocks)
    assert slow["overlapped"] == pytest.approx(fast["overlapped"] * 1.5 / h200.gigahertz, abs=0.1)
    assert (fast["gigahertz"], slow["gigahertz"]) == (None, 1.5)


def test_no_committed_call_is_faster_than_the_limit(h200):
    found = json.loads((RESULTS / "2026-12-01-model.json").read_text())
    fastest = max(row["measured"] for row in found["predictions"])
    assert 0.9 * h200.limit < fastest < h200.limit
    assert h200.limit == pytest.approx(h200.sms * h200.tensor_flop * 1.6 / 1e3, rel=0.01)


def test_no_committed_row_is_faster_than_its_prediction():
    """By more than the clock: it was read while calls followed each other without the pauses of the benchmark."""
    found = json.loads((RESULTS / "2026-12-01-model.json").read_text())
    measured = json.loads((RESULTS / found["results"]).read_text())["rows"]
    prefill = {(row["id"], row["direction"]) for row in measured if row["cell"]["kind"] == "prefill"}
    assert {(row["id"], row["direction"]) for row in found["predictions"]} == prefill
    assert max(row["measured"] / row["overlapped"] for row in found["predictions"]) < 1.1
    assert len({row["overlapped"] for row in found["predictions"]}) > 50  # no limit hides what units need


def test_what_was_not_measured_is_called_a_model(model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        model, "_resources", lambda config: resources({"MUFU": 64, "LDTM": 1}, {"LDTM": 1}, {"UTCHMMA": 1})
    )
    monkeypatch.setattr("sys.argv", ["model.py", "--arch", "sm_100a", "--out", str(tmp_path / "found.json")])
    model.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["note"] == "A model of sm_100a: nothing here was measured."
    assert capsys.readouterr().out.startswith(found["note"])
    assert {record["measured"] for record in found["predictions"]} == {None}
