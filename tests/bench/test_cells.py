"""The grid, and the work that its cells are."""

import dataclasses
import itertools

import pytest

from jax_fa4.bench import cells
from jax_fa4.bench.operands import random_operands


def visible_pairs(q_len, kv_len, causal, window):
    """Counted one by one."""
    left, right = window
    right = 0 if causal else right
    pairs = ((i + kv_len - q_len, j) for i, j in itertools.product(range(q_len), range(kv_len)))
    return sum((left is None or j >= i - left) and (right is None or j <= i + right) for i, j in pairs)


@pytest.mark.parametrize("window", [(None, None), (3, 0), (0, 2), (None, 1), (2, None)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 8), (3, 9), (9, 3)])
def test_work_is_that_of_the_visible_pairs(cell, q_len, kv_len, causal, window):
    cell = dataclasses.replace(cell, q_len=q_len, kv_len=kv_len, batch=3, causal=causal, window=window, head_dim_v=32)
    pairs = 3 * visible_pairs(q_len, kv_len, causal, window)
    assert cell.work("forward") == 2 * 2 * pairs * (16 + 32)
    assert cell.work("backward") == 2.5 * cell.work("forward")


def test_work_of_packed_documents_is_that_of_each(cell):
    packed = dataclasses.replace(cell, kind="varlen", lengths=(5, 1, 2))
    alone = [dataclasses.replace(cell, q_len=n, kv_len=n).work("forward") for n in packed.lengths]
    assert packed.work("forward") == sum(alone)


def test_work_of_decoding_is_reading_keys_and_values(cell):
    decode = dataclasses.replace(cell, kind="decode", batch=3, q_len=1, kv_len=100)
    assert decode.work("forward") == 3 * 100 * (16 + 16) * 2
    assert (decode.unit, decode.directions) == ("TB/s", ("forward",))


def test_the_grid_has_no_cell_twice():
    assert len({(str(cell), cell.lengths) for cell in cells.GRID}) == len(cells.GRID)


def test_packed_documents_fill_their_batch():
    packed = [cell for cell in cells.GRID if cell.kind == "varlen"]
    assert {sum(cell.lengths) for cell in packed} == {16384} == {cell.q_len for cell in packed}
    mix, by_length = (next(cell.lengths for cell in packed if cell.name == name) for name in ("mix", "mix_sorted"))
    assert mix[-1] == by_length[0] == max(mix)
    assert sorted(mix) == sorted(by_length)


def test_cells_are_chosen_by_kind_and_name():
    chosen = cells.select(["decode", "gqa", "smoke"])
    assert {cell.name for cell in chosen} == {"decode", "gqa", "smoke"}
    assert cells.select([]) == cells.GRID
    assert cells.SMOKE not in cells.select(["prefill"])


def test_what_is_printed_of_a_cell_chooses_it():
    assert all(cell in cells.select([str(cell)]) for cell in (*cells.GRID, cells.SMOKE))


def test_a_name_that_no_cell_has_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no cell is called 'd65' \(there are d128, d192, d256, d64, .*window\)"):
        cells.select(["d64", "d65"])


def test_operands_have_the_shapes_of_their_call(cell):
    cell = dataclasses.replace(cell, batch=3, kv_len=32, head_dim_v=8)
    x = random_operands(cell)
    assert [a.shape for a in x[:4]] == [(3, 8, 2, 16), (3, 32, 1, 16), (3, 32, 1, 8), (3, 8, 2, 8)]
    paged = random_operands(dataclasses.replace(cell, kind="paged", page_size=4))
    assert paged.k.shape == (24, 4, 1, 16)
    assert sorted(paged.page_table.reshape(-1).tolist()) == list(range(24))
    packed = random_operands(dataclasses.replace(cell, kind="varlen", q_len=8, lengths=(5, 1, 2)))
    assert packed.q.shape == (8, 2, 16)
    assert packed.cu_seqlens.tolist() == [0, 5, 6, 8]


def test_operands_differ_from_each_other_and_within(cell):
    x = random_operands(cell)
    assert len({float(a.ravel()[n]) for a in x[:4] for n in range(16)}) > 60
