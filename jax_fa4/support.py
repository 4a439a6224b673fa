"""Which calls have a kernel, and what a user is told about those that have none."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

from jax_fa4.configs import Config, backward_config, decode_config, forward_config
from jax_fa4.spec import AttentionSpec, MaskSpec

__all__ = ["FallbackWarning", "UntriedWarning", "warn_fallback", "warn_untried", "why_no_gradient", "why_unsupported"]

MASK_FEATURES = {
    "has_left": "a left window",
    "has_right": "causal or a right window",
    "has_q_offset": "q_offset",
    "has_q_lengths": "q_lengths",
    "has_kv_lengths": "kv_lengths",
    "has_segments": "segment ids",
    "has_cu_seqlens": "packed sequences",
    "has_dense": "a mask array",
}
FEATURES = {
    "has_softcap": "softcap",
    "has_sinks": "sinks",
    "bias_dtype": "bias",
    "page_size": "pages of keys",
    "has_batched_scalars": "a scale, softcap or window that vmap maps",
}


class FallbackWarning(UserWarning):
    """A GPU runs blockwise JAX, because this call has no kernel yet."""


class UntriedWarning(UserWarning):
    """A GPU runs kernels that had been emulated, and had not run on such a GPU yet."""


def why_unsupported(spec: AttentionSpec, arch: str) -> str | None:
    """None where the architecture (such as "sm_90a") has a kernel for the call, else what stands in the way."""

    is_paged = spec.page_size is not None

    def config_of(spec: AttentionSpec, arch: str) -> Config | None:
        in_pages = spec.page_size is not None or (is_paged and spec.mask.has_cu_seqlens)  # as a feature alone, too
        return decode_config(spec, arch) if in_pages else forward_config(spec, arch)

    return _why_none(spec, arch, config_of, "kernel")


def why_no_gradient(spec: AttentionSpec, arch: str) -> str | None:
    """None where the architecture has kernels for the gradients of the call, else what stands in the way."""
    return _why_none(spec, arch, backward_config, "gradient kernel")


def _why_none(
    spec: AttentionSpec, arch: str, config_of: Callable[[AttentionSpec, str], Config | None], what: str
) -> str | None:
    if config_of(spec, arch) is not None:
        return None
    plain = AttentionSpec(dtype=spec.dtype, head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, group=spec.group)
    if config_of(plain, arch) is None:
        dims = f"head_dim {spec.head_dim}"
        if spec.head_dim_v != spec.head_dim:
            dims += f" with {spec.head_dim_v} of v"
        return f"jax_fa4 has no {arch} {what} for {dims} in {spec.dtype}"
    missing = [text for text, alone in _one_by_one(spec, plain) if config_of(alone, arch) is None]
    return f"jax_fa4 has no {arch} {what} for {_listed(missing or [text for text, _ in _one_by_one(spec, plain)])}"


@functools.cache  # once for each text
def warn_fallback(reason: str) -> None:
    """Says once in a process that a GPU runs blockwise JAX, and why."""
    message = f"{reason}: it runs as blockwise JAX, which is slower; implementation='xla' says that you know"
    warnings.warn(message, FallbackWarning, stacklevel=2)


@functools.cache  # once for each architecture
def warn_untried(arch: str) -> None:
    """Says once in a process that a GPU runs kernels which only the emulator has run."""
    message = (
        f"jax_fa4's {arch} kernels have been emulated and have not run on hardware yet: compare their results with "
        f"those of implementation='xla'; implementation='kernel' says that you know"
    )
    warnings.warn(message, UntriedWarning, stacklevel=2)


def _one_by_one(spec: AttentionSpec, plain: AttentionSpec) -> list[tuple[str, AttentionSpec]]:
    """Each feature of `spec`, as a user calls it, and the spec that has only this one."""
    singles: list[tuple[str, AttentionSpec]] = []
    for name, text in MASK_FEATURES.items():
        if getattr(spec.mask, name):
            mask: dict[str, Any] = {name: True}
            singles.append((text, dataclasses.replace(plain, mask=MaskSpec(**mask))))
    for name, text in FEATURES.items():
        if value := getattr(spec, name):
            feature: dict[str, Any] = {name: value}
            singles.append((text, dataclasses.replace(plain, **feature)))
    return singles


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
