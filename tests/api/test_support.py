"""Which calls have a kernel, and the texts about those that have none."""

import dataclasses
import warnings

import pytest

from jax_fa4 import support
from jax_fa4.spec import AttentionSpec, MaskSpec

PLAIN = AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, group=4)


def spec(**changes) -> AttentionSpec:
    return dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    "supported",
    [
        PLAIN,
        spec(dtype="float16", head_dim=64, head_dim_v=64, group=1),
        spec(mask=MaskSpec(has_right=True)),
        spec(mask=MaskSpec(has_segments=True, has_dense=True), has_softcap=True, has_sinks=True, bias_dtype="float16"),
        spec(layout="BNTH", deterministic=True, implementation="kernel"),
        spec(mask=MaskSpec(has_right=True, has_kv_lengths=True, has_cu_seqlens=True), page_size=16),
    ],
    ids=["plain", "float16-d64", "causal", "features", "selects-nothing", "packed-queries-and-pages"],
)
def test_nothing_stands_in_the_way_of_a_kernel(supported):
    assert support.why_unsupported(supported, "sm_90a") is None


REASONS = [
    (spec(dtype="float32"), "jax_fa4 has no sm_90a kernel for head_dim 128 in float32"),
    (spec(dtype="float32", head_dim=192), "jax_fa4 has no sm_90a kernel for head_dim 192 with 128 of v in float32"),
    (spec(bias_dtype="float64"), "jax_fa4 has no sm_90a kernel for bias"),
    (
        spec(mask=MaskSpec(has_cu_seqlens=True), has_sinks=True, bias_dtype="float64", page_size=8),
        "jax_fa4 has no sm_90a kernel for packed sequences and bias",
    ),
    (
        spec(mask=MaskSpec(has_cu_seqlens=True, has_segments=True)),
        "jax_fa4 has no sm_90a kernel for segment ids and packed sequences",
    ),
    (spec(has_softcap=True, dtype="float32"), "jax_fa4 has no sm_90a kernel for head_dim 128 in float32"),
]


@pytest.mark.parametrize(("unsupported", "reason"), REASONS, ids=[reason.split(" for ")[1] for _, reason in REASONS])
def test_the_reason_names_what_has_no_kernel(unsupported, reason):
    assert support.why_unsupported(unsupported, "sm_90a") == reason


def test_pages_have_no_gradient_kernel():
    in_pages = spec(mask=MaskSpec(has_right=True, has_kv_lengths=True), page_size=16)
    reason = "jax_fa4 has no sm_90a gradient kernel for pages of keys"
    assert support.why_no_gradient(in_pages, "sm_90a") == reason


def test_an_unknown_architecture_has_no_kernel():
    assert support.why_unsupported(PLAIN, "sm_80") == "jax_fa4 has no sm_80 kernel for head_dim 128 in bfloat16"


def test_a_fallback_is_said_once():
    support.warn_fallback.cache_clear()
    with pytest.warns(
        support.FallbackWarning, match="^no kernel for tests: it runs as blockwise JAX, which is slower;"
    ):
        support.warn_fallback("no kernel for tests")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        support.warn_fallback("no kernel for tests")
