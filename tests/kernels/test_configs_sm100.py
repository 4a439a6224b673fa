"""Blackwell's forward configs: the table, the arithmetic behind it, and what a bad choice is told."""

import collections
import dataclasses
import itertools

import pytest

from jax_fa4.configs import all_configs, decode_config, forward_config, query_schedule
from jax_fa4.configs.blackwell import ROLES, SMEM_LIMIT, ForwardSm100Config
from jax_fa4.configs.params import MapParam
from jax_fa4.plan import forward
from jax_fa4.plan.bind import Kernel
from jax_fa4.plan.expr import evaluate
from jax_fa4.spec import AttentionSpec, MaskSpec

ARCHS = ("sm_100a", "sm_103a")
FULL, CAUSAL, LENGTHS = MaskSpec(), MaskSpec(has_right=True), MaskSpec(has_kv_lengths=True)


def config_of(head_dim=128, head_dim_v=None, arch="sm_100a", **fields) -> ForwardSm100Config | None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
    return forward_config(AttentionSpec(**{"dtype": "bfloat16", "group": 4, **dims, **fields}), arch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_90a"}, "arch must be sm_100a or sm_103a, got sm_90a"),
        ({"head_dim_v": 136, "kv_stages": 2}, "head_dim_v=136 needs 544 columns, 512 exist"),
        ({"tile_m": 64}, "tiles must be 128 or 256 x 128, got 64 x 128"),
        ({"tile_m": 128, "cta_group": 2}, "tiles must be 256 or 512 x 128, got 128 x 128"),
        ({"cta_group": 4}, "cta_group must be 1 or 2, got 4"),
        (
            {"tile_m": 512, "cta_group": 2, "has_kv_lengths": True},
            "cta_group=2 takes no kv_lengths: half of what lies beyond them is in the other CTA",
        ),
        ({"kv_stages": 1}, "kv_stages must be at least 2, one for K and one for V, got 1"),
        ({"kv_stages": 6}, "kv_stages=6 needs 264432 bytes of smem, 232448 exist"),
        ({"softmax_registers": 190}, r"registers must be multiples of 8, got \[190, 80, 48\]"),
        ({"softmax_registers": 200}, r"registers \[200, 80, 48\] take 67584 of a CTA, 65536 exist"),
        ({"exp2_period": 7}, "exp2_period must be 0 or an even number from 4 to 32, got 7"),
        ({"schedule": "clc"}, "schedule must be single, static or dynamic, got clc"),
        (
            {"schedule": "dynamic", "kv_stages": 3, "has_kv_lengths": True},
            "schedule=dynamic takes no kv_lengths: which slot to clear is unknown",
        ),
        (
            {"schedule": "static", "kv_stages": 3},
            "schedule=static takes tiles that all visit the same keys: no window, lengths or segments",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_choice_is_refused_with_its_numbers(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        dataclasses.replace(config_of(mask=MaskSpec(has_right=True)), **change)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_pair_of_head_dims_that_tensor_memory_holds_has_a_kernel(arch):
    for d, e in itertools.product(range(8, 257, 8), range(8, 257, 8)):
        config = config_of(d, e, arch)
        assert config.smem_bytes <= SMEM_LIMIT
        assert config.tmem.end <= 512


@pytest.mark.parametrize(
    ("columns", "mask", "stages"),
    [
        ((64, 64), CAUSAL, 12),
        ((64, 64), FULL, 10),  # O has room of its own, as at 128
        ((128, 128), CAUSAL, 5),
        ((128, 128), FULL, 6),  # halves of blocks
        ((192, 128), CAUSAL, 3),
        ((192, 128), FULL, 5),
        ((256, 256), FULL, 5),
        ((256, 256), LENGTHS, 2),
    ],
    ids=str,
)
def test_slots_fill_what_shared_memory_is_left(columns, mask, stages):
    config = config_of(*columns, mask=mask)
    assert config.kv_stages == stages
    with pytest.raises(ValueError, match="of smem"):
        dataclasses.replace(config, kv_stages=stages + 1)


def test_o_needs_no_shared_memory_where_tma_does_not_store_it():
    config = dataclasses.replace(config_of(64), out_by_tma=False)
    assert config.smem.q_room == config.q_bytes
    assert "out.full" not in {barrier.name for barrier in config.barriers}
    assert config.fitted().kv_stages > config.kv_stages


@pytest.mark.parametrize(
    ("dims", "mask", "cta_group", "is_persistent"),
    [
        ((64, 64), FULL, 1, True),
        ((64, 64), CAUSAL, 1, False),
        ((128, 128), FULL, 2, True),
        ((128, 128), CAUSAL, 1, False),
        ((192, 128), FULL, 2, False),  # O has to leave through Q
        ((192, 128), LENGTHS, 1, False),
        ((256, 256), CAUSAL, 2, False),
        ((256, 256), LENGTHS, 1, False),
    ],
    ids=str,
)
def test_pairs_and_persistent_ctas_are_for_tiles_that_visit_the_same_keys(dims, mask, cta_group, is_persistent):
    config = config_of(*dims, mask=mask)
    assert (config.cta_group, config.is_persistent) == (cta_group, is_persistent)


@pytest.mark.parametrize(
    ("fields", "schedule"),
    [
        ({}, "dynamic"),
        ({"head_dim": 64, "mask": MaskSpec(has_left=True, has_right=True, has_segments=True)}, "dynamic"),
        ({"mask": MaskSpec(has_right=True, has_q_lengths=True)}, "dynamic"),
        ({"head_dim": 192, "head_dim_v": 128}, "single"),  # O has no room beside Q
        ({"mask": LENGTHS}, "single"),
        ({"mask": MaskSpec(has_cu_seqlens=True)}, "single"),
        ({"has_softcap": True}, "single"),
    ],
    ids=str,
)
def test_ctas_take_over_tiles_where_asked_and_where_they_can(fields, schedule):
    spec = AttentionSpec(
        **{"dtype": "bfloat16", "group": 1, "head_dim": 128, "head_dim_v": fields.get("head_dim", 128)} | fields
    )
    config = forward_config(spec, "sm_100a", takes_over=True)
    assert config.schedule == schedule
    assert config.smem_bytes <= SMEM_LIMIT
    asked, unasked = config, forward_config(spec, "sm_100a")
    assert unasked.schedule != "dynamic"
    assert schedule == "dynamic" or asked == unasked


@pytest.mark.parametrize("option", [{"mask": MaskSpec(has_dense=True)}, {"bias_dtype": "bfloat16"}], ids=str)
def test_reading_elements_takes_the_registers_of_a_second_query_tile(option):
    for group in (1, 5):
        spec = AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, group=group, **option)
        config = forward_config(spec, "sm_100a", 100)
        assert (config.q_tiles, config.cta_group, config.softmax_registers) == (1, 1, 240)
        assert config.kernel == ("forward" if group == 1 else "grouped")


def test_what_would_spill_in_a_loop_over_tiles_is_not_persistent():
    for option in ({"has_softcap": True}, {"bias_dtype": "float32"}, {"mask": MaskSpec(has_dense=True)}):
        assert not config_of(**option).is_persistent


def test_only_three_slots_that_would_not_fit_otherwise_are_uneven():
    uneven = config_of(192, 128, mask=CAUSAL)
    assert (uneven.smem.kv_is_uneven, uneven.kv_stage_bytes, uneven.kv_shift_bytes) == (True, 40 * 1024, 8 * 1024)
    assert uneven.smem.kv_bytes == (48 + 32 + 48) * 1024
    assert not config_of(136, 128, mask=CAUSAL).smem.kv_is_uneven
    assert not config_of(192, 128).smem.kv_is_uneven


@pytest.mark.parametrize("arch", ARCHS)
def test_the_ring_never_overlaps_what_is_in_use(arch):
    """Round 0 holds K V K, round 1 V K V; blocks of one round don't meet, and neighbours in time don't either."""
    config = config_of(192, 128, arch, mask=CAUSAL)
    sizes = {"K": config.k_bytes, "V": config.v_bytes}

    def place(block: int) -> range:
        stage, round = block % 3, block // 3
        shift = (0, (-1) ** round * config.kv_shift_bytes, 0)[stage]
        start = stage * config.kv_stage_bytes + shift
        return range(start, start + sizes["KV"[block % 2]])

    for block in range(12):
        mine = place(block)
        assert mine.stop <= config.smem.kv_bytes
        for earlier in range(max(0, block - 2), block):  # what may still be in its slot while this one is loaded
            if (earlier % 3, block % 3, block // 3 % 2) == (1, 0, 0):
                continue  # the load warp waits for the middle slot there
            other = place(earlier)
            assert mine.stop <= other.start or other.stop <= mine.start


def test_roles_divide_the_warps():
    warps = [warp for role in ROLES for warp in range(role.first_warp, role.first_warp + role.warps)]
    assert warps == list(range(config_of().threads // 32))


def test_a_row_of_q_and_out_is_a_lane_of_tensor_memory():
    config = config_of(mask=CAUSAL)
    assert boxes(config) == {"q": (64, 128), "k": (64, 128), "v": (64, 128), "out": (64, 128)}


def test_a_cta_of_a_pair_loads_half_the_keys_of_k_and_half_the_columns_of_v():
    assert boxes(config_of(128, 64)) == {"q": (64, 128), "k": (64, 64), "v": (32, 128), "out": (64, 128)}


def boxes(config):
    return {param.name: param.box[:2] for param in config.params if isinstance(param, MapParam)}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_built_ahead_is_for_that_architecture(arch):
    configs = all_configs(arch)
    assert {config.arch for config in configs} == {arch}
    assert len(set(configs)) == len(configs)
    numbers = collections.Counter(config.kernel for config in configs)
    head_dims_and_masks = 4 * 2 * 4
    forwards = {"forward": 2 * head_dims_and_masks, "grouped": head_dims_and_masks, "decode": head_dims_and_masks}
    assert numbers == forwards | {"schedule": 2 * 4, "combine": 3 * 2}


@pytest.mark.parametrize(
    ("q_len", "group", "kernel", "tile_m"),
    [  # of causal calls
        (1, 8, "grouped", 128),
        (100, 2, "grouped", 256),
        (100, 3, "grouped", 256),
        (200, 2, "forward", 256),  # two tiles either way
        (256, 8, "forward", 256),
        (100, 1, "forward", 256),
        (None, 8, "forward", 256),
    ],
)
def test_heads_share_tiles_where_that_saves_some(q_len, group, kernel, tile_m):
    spec = AttentionSpec(dtype="bfloat16", head_dim=64, head_dim_v=64, group=group, mask=CAUSAL)
    config = forward_config(spec, "sm_100a", q_len)
    assert (config.kernel, config.tile_m) == (kernel, tile_m)


@pytest.mark.parametrize(
    ("page_size", "box", "by_lanes"), [(1, 1, True), (48, 16, False), (12, 4, True), (512, 128, False)]
)
def test_lanes_copy_pages_of_which_tensor_copies_would_take_too_little(page_size, box, by_lanes):
    for head_dim, head_dim_v, ahead in ((8, 8, 2), (128, 128, 1), (192, 128, 1), (256, 256, 0)):
        spec = AttentionSpec(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim_v, group=4, page_size=page_size)
        for rows in (4, 500):
            config = decode_config(spec, "sm_100a", rows)
            assert (config.box_rows, config.gathers_keys) == (box, by_lanes)
            assert config.kv_stages - 2 >= config.blocks_ahead >= ahead


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_a_cta_alone_stores_the_rows_of_a_packed_sequence(dims):
    spec = AttentionSpec(
        dtype="bfloat16", head_dim=dims[0], head_dim_v=dims[1], group=1, mask=MaskSpec(has_cu_seqlens=True)
    )
    config = forward_config(spec, "sm_100a")
    assert (config.cta_group, config.is_persistent, config.out_by_tma, config.clears_values) == (1, False, False, True)
    schedule = query_schedule(spec, config)
    assert (schedule.tile_m, schedule.tile_n, schedule.row_step) == (config.tile_m, 128, None)
    assert config.params[-1].name == "q_schedule"


def test_features_without_a_kernel_have_none():
    assert config_of(mask=MaskSpec(has_cu_seqlens=True, has_segments=True)) is None
    assert config_of(page_size=128) is None
    assert config_of(dtype="float32") is None


@pytest.mark.parametrize(
    ("dims", "mask", "multiprocessors", "grid"),
    [
        ((128, 128), FULL, 148, 148),  # 16 heads of 16 tiles of 512 queries, as many pairs as have room
        ((128, 128), FULL, 1000, 2 * 256),
        ((64, 64), FULL, 148, 148),
        ((128, 128), CAUSAL, 148, 16 * 32),
        ((256, 256), CAUSAL, 148, 2 * 16 * 32),
    ],
)
def test_a_plan_launches_the_ctas_of_its_schedule(dims, mask, multiprocessors, grid):
    config = config_of(*dims, mask=mask)
    (launch,) = forward.forward(config, [Kernel("0" * 64, "kernel")], "BTNH").launches
    q, k, v = (2, 2, 8000, 4, dims[0]), (2, 2, 500, dims[0]), (2, 2, 500, dims[1])
    shapes = (q, k, v, (), (*q[:-1], dims[1]), (2, 2, 4, 8000))
    assert launch.cluster == (config.cta_group, 1, 1)
    assert evaluate(launch.grid[0], shapes, multiprocessors) == grid
