"""Kernel configs: the table, the arithmetic behind it, and what a bad choice is told."""

import dataclasses
import itertools

import pytest

from jax_fa4 import configs
from jax_fa4.configs import KernelConfig, all_configs, backward_config, decode_config, forward_config, sm90
from jax_fa4.configs.decode import MERGES, merge_of, prefers_decode
from jax_fa4.configs.params import MapParam, PointerParam, ScalarParam
from jax_fa4.spec import AttentionSpec, MaskSpec

GOOD = {
    "arch": "sm_90a",
    "kernel": "forward",
    "dtype": "bfloat16",
    "head_dim": 128,
    "head_dim_v": 128,
    "tile_m": 128,
    "tile_n": 128,
    "kv_stages": 2,
    "q_stages": 2,
    "persistent": True,
}


def spec(head_dim=128, head_dim_v=None, **fields):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
    return AttentionSpec(**{"dtype": "bfloat16", "group": 4, **dims, **fields})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_80"}, "arch must be sm_90a, got sm_80"),
        ({"dtype": "float32"}, "dtype must be bfloat16 or float16, got float32"),
        ({"head_dim": 100}, "head_dim must be a multiple of 8 up to 256, got 100"),
        ({"head_dim_v": 264}, "head_dim_v must be a multiple of 8 up to 256, got 264"),
        ({"bias": "float64"}, "bias must be None, float32, bfloat16 or float16, got float64"),
        ({"tile_m": 96}, "tile_m must be 64, 128 or 192, got 96"),
        ({"tile_m": 256}, "tile_m must be 64, 128 or 192, got 256"),
        ({"tile_n": 136}, "tile_n must be a multiple of 16 up to 256, got 136"),
        ({"exp2_period": 1}, "exp2_period must be 0 or from 2 to 32, got 1"),
        ({"kv_stages": 0}, "kv_stages must be at least 1, got 0"),
        ({"head_dim": 72, "q_register_steps": 6}, "q_register_steps must be at most 5, got 6"),
        ({"q_stages": 3}, "q_stages must be 1 or 2, got 3"),
        ({"persistent": False}, "q_stages=2 needs persistent=True: the second stage is for the next tile"),
        ({"kv_stages": 4}, "kv_stages=4 and q_stages=2 need 328000 bytes of smem, 232448 exist"),
        ({"tile_m": 192}, "tile_m=192, tile_n=128, head_dim_v=128 need 192 registers a thread, 160 exist"),
    ],
    ids=lambda value: "-".join(f"{k}.{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_bad_choice_is_refused_with_its_numbers(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        KernelConfig(**{**GOOD, **change})


@pytest.mark.parametrize("head_dims", sm90.FORWARD, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", [MaskSpec(has_left=a, has_right=b) for a in (False, True) for b in (False, True)])
def test_every_row_of_the_table_makes_a_config(head_dims, dtype, mask):
    config = forward_config(spec(*head_dims, dtype=dtype, mask=mask), "sm_90a")
    assert (config.dtype, config.head_dim, config.head_dim_v) == (dtype, *head_dims)
    assert (config.has_left, config.has_right) == (mask.has_left, mask.has_right)


@pytest.mark.parametrize(
    "feature",
    [
        {"head_dim": 264},
        {"dtype": "float32"},
        {"bias_dtype": "float64"},
        {"has_batched_scalars": True},
        {"page_size": 16},
        {"mask": MaskSpec(has_cu_seqlens=True, has_segments=True)},
        {"mask": MaskSpec(has_cu_seqlens=True), "page_size": 16},
    ],
    ids=str,
)
def test_a_spec_beyond_the_kernels_has_no_config(feature):
    assert forward_config(spec(**feature), "sm_90a") is None


@pytest.mark.parametrize("extra", [{}, {"bias_dtype": "float32"}], ids=["plain", "bias"])
def test_every_pair_of_head_dims_fits_shared_memory_and_registers(extra):
    dims = range(8, 257, 8)
    assert all(forward_config(spec(d, e, **extra), "sm_90a") for d, e in itertools.product(dims, dims))


@pytest.mark.parametrize(("head_dim", "width"), [(8, 16), (40, 16), (32, 32), (96, 32), (64, 64), (192, 64), (200, 16)])
def test_the_widest_swizzle_that_divides_a_padded_row_is_taken(head_dim, width):
    maps = [param for param in forward_config(spec(head_dim), "sm_90a").params if isinstance(param, MapParam)]
    assert {(param.box[0], param.swizzle) for param in maps} == {(width, 2 * width)}


def test_an_offset_without_an_edge_to_move_selects_nothing():
    assert forward_config(spec(mask=MaskSpec(has_q_offset=True)), "sm_90a") == forward_config(spec(), "sm_90a")


@pytest.mark.parametrize("extra", [{}, {"bias_dtype": "float32", "has_softcap": True}], ids=["plain", "scores"])
def test_every_pair_of_head_dims_has_backward_kernels(extra):
    dims = range(8, 257, 8)
    for d, e in itertools.product(dims, dims):
        config = backward_config(spec(d, e, **extra), "sm_90a")
        assert config.columns >= d
        assert config.v_columns >= e
        assert config.smem_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_m": 96}, "tile_m must be 64 or 128, got 96"),
        ({"tile_m": 128}, "tile_m=128 has room for head_dim 64, got 128"),
        ({"head_dim": 100}, "head_dim must be a multiple of 8 up to 256, got 100"),
        ({"q_stages": 4, "dout_stages": 5}, "q_stages=4, dout_stages=5 need 281008 bytes of smem, 232448 exist"),
        ({"k_register_steps": 9}, "k_register_steps must be at most 8, got 9"),
        ({"head_dim_v": 40, "v_register_steps": 4}, "v_register_steps must be at most 3, got 4"),
    ],
    ids=["tile", "room", "dim", "smem", "k", "v"],
)
def test_a_bad_backward_is_refused_with_its_numbers(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(backward_config(spec(), "sm_90a"), **change)


def test_a_deterministic_backward_counts_turns_and_visits_every_tile():
    mask = MaskSpec(has_segments=True)
    config = backward_config(spec(mask=mask, deterministic=True), "sm_90a")
    names = [[param.name for param in kernel.params] for kernel in config.kernels]
    assert ["dq_turn" in each for each in names] == [True, True, True]
    assert "query_blocks" not in names[1]
    assert not backward_config(spec(mask=mask), "sm_90a").turns  # there nobody knows who comes first


@pytest.mark.parametrize(("head_dims", "ctas"), [((128, 128), 1), ((192, 128), 2), ((64, 136), 2)], ids=str)
def test_two_ctas_share_the_keys_of_wide_heads(head_dims, ctas):
    config = backward_config(spec(*head_dims), "sm_90a")
    assert config.cluster_ctas == ctas


def test_a_role_that_gives_registers_away_keeps_no_more_than_it_starts_with(monkeypatch):
    wide = backward_config(spec(256), "sm_90a")
    producer = "producer_registers must be a multiple of 8 from 24 to {}, with which {} threads start, got {}"
    monkeypatch.setattr(type(wide), "slabs_at_once", 3)  # 40 + 3 * 32 = 136
    with pytest.raises(ValueError, match=f"^{producer.replace('producer', 'queries').format(128, 512, 136)}$"):
        dataclasses.replace(wide)
    monkeypatch.setitem(configs.config.PRODUCER_REGISTERS, 2, 176)
    for make in (lambda: KernelConfig(**GOOD), lambda: backward_config(spec(), "sm_90a")):
        with pytest.raises(ValueError, match=f"^{producer.format(168, 384, 176)}$"):
            make()


@pytest.mark.parametrize("head_dims", [(192, 192), (256, 256)], ids=str)
def test_the_registers_of_a_wide_backward_fit_the_register_file(head_dims):
    config = backward_config(spec(*head_dims), "sm_90a")
    threads = config.producer_registers + config.queries_registers + 2 * config.consumer_registers
    assert 128 * threads <= 64 * 1024


def test_a_backward_asks_for_what_its_call_has_but_not_for_sinks():
    mask = MaskSpec(has_left=True, has_q_lengths=True, has_segments=True)
    config = backward_config(spec(mask=mask, has_sinks=True, has_softcap=True), "sm_90a")
    names = [param.name for param in config.params][10:-5]
    segments = ["q_segment_ids", "kv_segment_ids", "query_blocks"]
    assert names == ["softmax_scale", "window_left", "softcap", "q_lengths", *segments]


def test_another_architecture_has_no_config():
    assert forward_config(spec(), "sm_80") is None


def test_one_config_serves_every_group_layout_and_backward():
    same = [spec(), spec(group=1), spec(layout="BNTH"), spec(deterministic=True), spec(implementation="kernel")]
    assert len({forward_config(s, "sm_90a") for s in same}) == 1


@pytest.mark.parametrize("head_dims", sm90.FORWARD, ids=str)
def test_the_registers_of_all_warpgroups_fit_the_register_file(head_dims):
    config = forward_config(spec(*head_dims), "sm_90a")
    assert 128 * (config.producer_registers + config.warpgroups * config.consumer_registers) <= 64 * 1024


def test_parameters_follow_the_masks_edges():
    both = forward_config(spec(mask=MaskSpec(has_left=True, has_right=True)), "sm_90a")
    names = [param.name for param in both.params]
    scalars = ["q_len", "kv_len", "q_heads", "kv_heads", "batch"]
    pointers = ["lse", "softmax_scale", "window_left", "window_right"]
    assert names == ["q", "k", "v", "out", *pointers, *scalars]
    causal = dataclasses.replace(both, has_left=False)
    assert [param.name for param in causal.params] == [name for name in names if name != "window_left"]


def test_parameters_follow_the_features():
    mask = MaskSpec(has_right=True, has_q_offset=True, has_kv_lengths=True, has_segments=True, has_dense=True)
    config = forward_config(spec(mask=mask, has_softcap=True, has_sinks=True, bias_dtype="float16"), "sm_90a")
    names = [param.name for param in config.params][5:-5]
    segments = ["q_segment_ids", "kv_segment_ids", "key_blocks"]
    strides = [f"{array}_{axis}_stride" for array in ("mask", "bias") for axis in ("batch", "head", "row")]
    scalars = ["softmax_scale", "window_right", "softcap"]
    assert names == [*scalars, "q_offset", "kv_lengths", "sinks", *segments, "mask", "bias", *strides]


def test_parameter_sizes_are_those_of_their_kinds():
    sizes = {MapParam: (128, 64), PointerParam: (8, 8), ScalarParam: (4, 4)}
    for param in forward_config(spec(), "sm_90a").params:
        assert (param.size, param.align) == sizes[type(param)]


def test_boxes_are_rows_of_a_swizzle_atom():
    q, k, v, out = (param for param in forward_config(spec(64), "sm_90a").params if isinstance(param, MapParam))
    assert q.box == out.box == (64, 64, 1, 1)
    assert k.box == v.box == (64, 128, 1, 1)
    assert {param.swizzle for param in (q, k, v, out)} == {128}


def test_a_right_edge_makes_later_tiles_longer():
    for has_left, has_right in itertools.product((False, True), repeat=2):
        mask = MaskSpec(has_left=has_left, has_right=has_right)
        assert forward_config(spec(mask=mask), "sm_90a").longest_first == has_right


def test_the_tile_that_is_not_full_comes_first_unless_segments_need_aligned_tiles():
    causal, segments = (MaskSpec(has_right=True, has_segments=x) for x in (False, True))
    assert forward_config(spec(mask=causal), "sm_90a").partial_first
    assert not forward_config(spec(mask=segments), "sm_90a").partial_first
    assert not forward_config(spec(), "sm_90a").partial_first


def test_what_is_built_ahead_has_every_kernel_of_a_call_without_options():
    built = set(all_configs("sm_90a"))
    for mask in (MaskSpec(), MaskSpec(has_right=True)):
        spec = AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, group=4, mask=mask)
        few = decode_config(spec, "sm_90a")
        assert few is not None
        decodes = {kernel for merge in MERGES for kernel in dataclasses.replace(few, merge=merge).kernels}
        assert {forward_config(spec, "sm_90a"), *decodes} <= built


@pytest.mark.parametrize(
    ("num_splits", "tiles", "merge"),
    [
        (1, 10**6, "cluster"),  # of one CTA
        (1, None, "cluster"),
        (8, 8, "cluster"),
        (8, 9, "few"),  # clusters would wait for each other
        (2, None, "few"),
        (9, 1, "many"),
    ],
)
def test_clusters_merge_splits_while_there_is_room_for_all(num_splits, tiles, merge):
    assert merge_of(num_splits, tiles) == merge


def test_results_that_a_cluster_merges_fit_where_values_were():
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        one = AttentionSpec(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim_v, group=4)
        dataclasses.replace(decode_config(one, "sm_90a"), merge="cluster")
    with pytest.raises(ValueError, match="34816 bytes of results don't fit where 2 stages of V were"):
        dataclasses.replace(decode_config(spec(), "sm_90a"), merge="cluster", kv_stages=2)


@pytest.mark.parametrize(
    ("q_len", "group", "kv_len", "is_for_few"),
    [
        (1, 8, 256, True),
        (8, 8, 255, False),  # few keys
        (64, 1, 256, True),  # a full tile
        (65, 1, 8192, False),  # the forward kernel's tile has no more rows than two of 64
        (17, 8, 8192, True),  # 3 tiles of 64 rows, not 8 of 128
        (32, 8, 8192, True),
        (33, 8, 8192, False),  # 5 tiles
        (17, 8, 2048, False),
        (24, 4, 4096, True),
        (28, 7, 8192, False),  # 9 queries a tile: 4 tiles, not 7 of 128
    ],
)
def test_grouped_heads_share_tiles_where_their_own_would_be_mostly_empty(q_len, group, kv_len, is_for_few):
    one = AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, group=group)
    few, whole = decode_config(one, "sm_90a"), forward_config(one, "sm_90a", q_len)
    assert prefers_decode(few, whole, q_len, group, kv_len) == is_for_few


@pytest.mark.parametrize(("head_dim", "steps"), [(8, 1), (104, 7), (128, 8)])
def test_registers_hold_no_more_columns_than_queries_have(head_dim, steps):
    config = forward_config(spec(head_dim, 128), "sm_90a")
    assert config is not None
    assert config.q_register_steps == steps


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "held"), [(96, 96, (6, 4)), (72, 96, (5, 4)), (96, 40, (6, 3)), (128, 128, (0, 0))]
)
def test_a_backward_holds_no_more_columns_of_keys_and_values_than_they_have(head_dim, head_dim_v, held):
    config = backward_config(spec(head_dim, head_dim_v), "sm_90a")
    assert (config.k_register_steps, config.v_register_steps) == held


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "kv_stages", "ctas_per_sm"),
    [(64, 64, 3, 2), (96, 96, 4, 2), (128, 128, 3, 2), (192, 128, 5, 1), (256, 256, 3, 1)],
)
def test_decode_fills_shared_memory_with_stages(head_dim, head_dim_v, kv_stages, ctas_per_sm):
    one = AttentionSpec(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim_v, group=1)
    config = decode_config(one, "sm_90a")
    assert config is not None
    assert (config.kv_stages, config.ctas_per_sm) == (kv_stages, ctas_per_sm)


@pytest.mark.parametrize(("page_size", "rows"), [(1, 1), (24, 8), (64, 64), (100, 4), (256, 64)])
def test_a_copy_of_keys_stays_in_one_page(page_size, rows):
    mask = MaskSpec(has_kv_lengths=True)
    spec = AttentionSpec(dtype="float16", head_dim=128, head_dim_v=128, group=1, mask=mask, page_size=page_size)
    config = decode_config(spec, "sm_90a")
    assert config is not None
    assert config.box_rows == rows
