"""The kernel of gradients by bias and softcap: which is asked for, what fits, and how its plan shares out the work."""

import pytest

from jax_fa4.configs import ScoresConfig, backward_config, score_configs
from jax_fa4.plan import backward, evaluate
from jax_fa4.plan.axes import Axes
from jax_fa4.plan.bind import Kernel
from jax_fa4.spec import AttentionSpec

GOOD = {"arch": "sm_90a", "dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "tile_m": 64, "tile_n": 128}


def main(head_dim=64, head_dim_v=None, **options):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim}
    options = {"bias_dtype": "float32", "has_softcap": True} | options
    config = backward_config(AttentionSpec(dtype="bfloat16", group=1, **dims, **options), "sm_90a")
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_n": 64, "bias": "float32"}, "tile_m and tile_n must be 64 and 128, got 64 and 64"),
        ({}, "there must be a bias or a softcap, got neither"),
    ],
)
def test_a_bad_choice_is_refused_with_its_numbers(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ScoresConfig(kept="tiles", **{**GOOD, **change})


@pytest.mark.parametrize(
    ("wrt", "bias_has_rows", "kept"),
    [
        (("q", "k", "v", "softmax_scale", "sinks"), True, []),
        (("q", "bias"), True, ["tiles"]),
        (("q", "bias"), False, ["rows"]),
        (("softcap", "bias"), True, ["tiles", "total"]),
    ],
)
def test_there_is_a_kernel_for_each_gradient_that_is_asked_for(wrt, bias_has_rows, kept):
    configs = score_configs(main(), wrt, bias_has_rows=bias_has_rows)
    assert [config.kept for config in configs] == kept
    assert len({config.name for config in configs}) == len(configs)


@pytest.mark.parametrize("bias_has_rows", [False, True])
@pytest.mark.parametrize("head_dim_v", [8, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [8, 64, 136, 256])
def test_all_head_dims_fit_in_shared_memory(head_dim, head_dim_v, bias_has_rows):
    assert score_configs(main(head_dim, head_dim_v), ("bias", "softcap"), bias_has_rows=bias_has_rows)


@pytest.mark.parametrize(
    ("bias", "letters", "grid"),
    [
        ((2, 6, 300, 500), "bnts", 4 * 6 * 2),  # a CTA has all queries of a head
        ((1, 6, 300, 500), "xnts", 4 * 6 * 5),  # or a tile of queries of all batch entries
        ((1, 1, 300, 500), "xyts", 4 * 5),
        ((1, 1, 1, 500), "xyzs", 4 * 6 * 2),  # each head has a row of its own, which are summed later
        ((2, 3, 2, 300, 500), "kgts", 4 * 6 * 2),  # as the devices of a mesh get theirs
    ],
    ids=str,
)
def test_a_bias_is_shared_out_by_what_is_summed_apart_without_an_array_of_scores(bias, letters, grid):
    config, is_tiled = main(), bias[-2] > 1
    scores = score_configs(config, ("bias",), bias_has_rows=is_tiled)
    axes = Axes(letters, letters, batched=letters[0] == "k")
    kernels = [Kernel("0" * 64, "kernel")] * (len(config.kernels) + 1)
    plan = backward.backward(config, kernels, "BTNH", {"bias": axes, "dbias": axes}, (), scores)
    sizes = {"q": (2, 3, 300, 2, 64), "k": (2, 3, 500, 64), "v": (2, 3, 500, 64), "bias": bias}
    shapes = [sizes.get(buffer.name, ()) for buffer in plan.operands]
    assert evaluate(plan.launches[-1].grid[0], shapes) == grid
    assert [each.name for each in plan.results if {"T", "S"} <= set(each.shape)] == ["dbias"] * is_tiled
