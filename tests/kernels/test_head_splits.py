"""How many CTAs share the query heads of a kv head in a backward."""

import pytest

from jax_fa4.configs import backward_config
from jax_fa4.configs.head_splits import head_splits
from jax_fa4.spec import AttentionSpec, MaskSpec


def splits(batch, q_len, kv_len, q_heads, kv_heads, *, causal):
    spec = AttentionSpec(
        dtype="bfloat16", head_dim=128, head_dim_v=128, group=q_heads // kv_heads, mask=MaskSpec(has_right=causal)
    )
    config = backward_config(spec, "sm_90a")
    return head_splits(config, q_len=q_len, kv_len=kv_len, group=spec.group, kv_heads=batch * kv_heads)


def test_few_causal_tiles_of_one_kv_head_are_shared():
    assert splits(2, 8192, 8192, 32, 1, causal=True) == 8


def test_a_tile_for_each_multiprocessor_is_not_shared_where_all_are_as_long():
    assert splits(2, 8192, 8192, 32, 1, causal=False) == 1


@pytest.mark.parametrize("cell", [(4, 8192, 8192, 32, 8), (1, 16384, 16384, 32, 8), (16, 1024, 1024, 16, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_many_tiles_are_not_shared(cell, causal):
    assert splits(*cell, causal=causal) == 1


@pytest.mark.parametrize("cell", [(1, 1, 128, 32, 1), (1, 64, 1024, 8, 4), (2, 256, 1024, 8, 4)])
def test_little_work_is_not_shared(cell):
    assert splits(*cell, causal=True) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_heads", [1, 2, 5, 7, 12, 32, 71])
@pytest.mark.parametrize("lengths", [(64, 16384), (4096, 4096), (16384, 64)])
def test_every_share_has_a_head_and_all_parts_take_at_most_half_of_dq(lengths, q_heads, causal):
    count = splits(1, *lengths, q_heads, 1, causal=causal)
    heads = -(-q_heads // count)
    assert 1 <= count <= 8
    assert heads * (count - 1) < q_heads <= heads * count
    assert count == 1 or 2 * count * lengths[1] * 2 <= q_heads * lengths[0]


def test_a_larger_batch_is_shared_by_fewer():
    counts = [splits(batch, 8192, 8192, 32, 1, causal=True) for batch in (2, 64, 4096)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2] == 1
