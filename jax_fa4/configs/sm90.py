"""Hopper's tiles, one row a line: what was chosen for a head dim, and the evidence."""

from __future__ import annotations

import dataclasses

from jax_fa4.configs.backward import NARROW_LIMIT, BackwardConfig
from jax_fa4.configs.backward_wide import BackwardWideConfig
from jax_fa4.configs.config import MMA_COLUMNS, KernelConfig, round_up
from jax_fa4.configs.decode import MERGES, decode
from jax_fa4.configs.features import common_specs, fields_of, first_that_fits, has_known_dtypes, packs_with_others
from jax_fa4.configs.scores import Config
from jax_fa4.spec import AttentionSpec

__all__ = ["BACKWARD", "FORWARD", "all_configs", "backward", "forward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Choices for one pair of head dims."""

    tile_m: int
    tile_n: int
    kv_stages: int
    q_stages: int = 1
    persistent: bool = False
    staggered: bool = False
    exp2_period: int = 0
    q_register_steps: int = 0
    tells_tiles: bool = True
    scales_late: bool = False
    trusts_maxima: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardRow:
    """Choices for one pair of head dims. `tile_m` is 64 at least where two warpgroups hold all columns of a tile."""

    tile_m: int
    tile_n: int
    q_stages: int
    dout_stages: int
    ds_stages: int
    k_register_steps: int = 0
    v_register_steps: int = 0


# Up to (head_dim, head_dim_v); the first row that fits. Measured on an H200 against the kernels before, ratios for 1k,
# 4k, 16k (d128 512, 2k, 8k, 16k), 2026-11-30, the median of 15 rounds in random order:
#   two Q stages against one tile a CTA: d64 1.18, 1.11, 1.10; causal 1.33, 1.10, 1.00; d128 1.40, 1.19, 1.11, 1.11;
#   causal 1.33, 1.15, 1.03, 1.03
#   the load warp telling consumers of their tile: d64 causal 1.06, 1.01, 1.00; d128 causal 1.06, 1.04, 1.03, 1.03; but
#   d64 full 0.96, 0.94, 0.92, with staggered rows 0.99, 0.98, 0.97: the assembler orders each loop in its own way
#   staggered rows against not, both told: d64 1.03, 1.04, 1.05; d128 1.01, 1.03, 1.04, 1.04; d192 1.02; but d64 causal
#   0.98, 0.95, 0.93, d128 causal 1.00, 0.99, 1.00, 1.00, d256 causal 1.00, 1.00, 0.99
#   all of Q in registers, d128: 0.98, 1.04, 1.06, 1.06; causal 0.98, 0.98, 0.99, 0.99, with staggered rows 0.97, 0.98,
#   1.00, 1.00; (192, 128) 1.00, causal 4k 1.03, 16k 1.00; a quarter, d192 and d256: 0.98 to 1.00; d64, d96: spills
#   persistent with one Q stage against one tile a CTA: d256 1.07, 1.02, 0.99; causal 1.02, 1.03, 1.03; d192 4k 1.04,
#   causal 1.03; (192, 128) 4k 1.09; causal 1.09, 16k 1.04
#   d96: 192x96 against 128x128 1.07, 1.08, causal 1.06, 1.08; 128x144 0.97, 192x80 less than 192x96
#   d128 with one Q stage and rows stored from registers, 2 or 3 KV stages: 0.88 at 512, 0.96 at 2k, 1.00 from 8k on
#   d256, against rows that are not staggered, scaled before the next S and the last of O behind the next Q: full 1.03,
#   1.04, 1.05; causal 1.03, 1.03, 1.05; scaled late, d128 0.98, d192 1.00, (192, 128) 0.99
#   maxima trusted: d128 with a window 1.02; causal 0.99, full 0.96; d256 1.00, d64 1.00 to 1.01, d96, d192 causal 0.99
# No gain: K and V for a cluster of two by multicast, d128 and d256 full 1.00 (0.7 if consumers release them with the
# scope of the cluster, causal too); a third stage of K or V, d128 0.94 to 1.06, in the mean 1.00, d64 0.94 to 1.00;
# 192x80, d128 0.84 to 1.01; O scaled only where a maximum grew, causal 0.91 to 1.01; 2^x by polynomial for 1/8 of the
# weights, d128 0.91 to 1.02, d64 0.91 to 0.97, for 1/4 0.88 to 0.98
FORWARD = {
    (64, 64): Row(tile_m=192, tile_n=128, kv_stages=2, q_stages=2, persistent=True, tells_tiles=False),
    (96, 96): Row(tile_m=192, tile_n=96, kv_stages=2, q_stages=2, persistent=True, staggered=True),
    (128, 128): Row(
        tile_m=128, tile_n=128, kv_stages=2, q_stages=2, persistent=True, staggered=True, q_register_steps=8
    ),
    (192, 128): Row(tile_m=128, tile_n=128, kv_stages=2, persistent=True, staggered=True),
    (192, 192): Row(tile_m=128, tile_n=112, kv_stages=2, persistent=True, staggered=True),
    (256, 256): Row(tile_m=128, tile_n=80, kv_stages=2, persistent=True, staggered=True, scales_late=True),
}
EDGES = FORWARD | {  # a causal mask, a window
    (64, 64): Row(tile_m=192, tile_n=128, kv_stages=2, q_stages=2, persistent=True),
    (128, 128): Row(tile_m=128, tile_n=128, kv_stages=2, q_stages=2, persistent=True),
}
WINDOW = EDGES | {  # with a left edge
    (128, 128): Row(tile_m=128, tile_n=128, kv_stages=2, q_stages=2, persistent=True, trusts_maxima=True),
}
# Rows that keep features from spilling: what they need of a thread's registers, its accumulators must leave.
WIDE = {
    (128, 128): Row(tile_m=128, tile_n=128, kv_stages=2, q_stages=2, persistent=True),
    (192, 128): Row(tile_m=128, tile_n=128, kv_stages=2),
    (192, 192): Row(tile_m=128, tile_n=112, kv_stages=2),
    (256, 256): Row(tile_m=128, tile_n=80, kv_stages=2),
}
LENGTHS = {  # of keys
    (64, 64): Row(tile_m=192, tile_n=112, kv_stages=2, q_stages=2, persistent=True),
    **WIDE,
}
PACKED = LENGTHS | {(64, 64): Row(tile_m=192, tile_n=128, kv_stages=2, q_stages=2, persistent=True)}
SEGMENTS = {
    (64, 64): Row(tile_m=192, tile_n=128, kv_stages=2),
    (120, 120): Row(tile_m=128, tile_n=112, kv_stages=2, q_stages=2, persistent=True),
    **WIDE,
}
SEGMENTS_AND_LENGTHS = SEGMENTS | {(64, 64): Row(tile_m=192, tile_n=112, kv_stages=2)}
SOFTCAP = {
    (64, 64): Row(tile_m=128, tile_n=128, kv_stages=2),
    (128, 128): Row(tile_m=128, tile_n=128, kv_stages=2),
    (192, 192): Row(tile_m=128, tile_n=96, kv_stages=2),
    (256, 256): Row(tile_m=128, tile_n=64, kv_stages=2),
}
DENSE = {  # a mask or a bias array
    (64, 64): Row(tile_m=128, tile_n=128, kv_stages=2),
    (192, 192): Row(tile_m=128, tile_n=96, kv_stages=2),
    (256, 256): Row(tile_m=128, tile_n=64, kv_stages=2),
}
DENSE_AND_SOFTCAP = {
    (192, 192): Row(tile_m=128, tile_n=80, kv_stages=2),
    (256, 256): Row(tile_m=128, tile_n=64, kv_stages=2),
}
# K and V in registers (H200, 2026-11-30, the main kernel at 4k and 16k; d128 at 2k, 8k, 16k): d96, six steps of K 1.06
# and 1.05, causal 1.03, 1.04, and four of V 1.09, 1.09, causal 1.08, 1.05, or five 1.10, 1.09, causal 1.08, 1.06; d128,
# three of K 1.02, 1.00, 1.00, causal 1.00; d64, all of K 1.01, 1.02, causal, three of it, 0.99. More spill.
# Head dims beyond 128 (H200, 2026-11-30, full at 4k and causal at 16k): a third stage of Q gives 1.35 and 1.36 at d192,
# 1.33 and 1.43 at (192, 128); a second one of dS, with two of Q, 0.99 and 0.98, 1.00 and 0.94. At d256 dO in three
# halves, which leaves room for a second stage of dS, gave 0.78 and 0.81.
# Postprocess that starts before the main kernel ends: d128 512 1.02, 2k 1.03, d256 1k and 4k 1.02, causal 1.00 to 1.02;
# d64 0.99, 1.03, 1.00, causal 0.99, 1.01 for 1k, 4k, 16k
UNCOUNTED_LIMIT = 64
BACKWARD = {  # up to (head_dim, head_dim_v); the first row that fits
    (64, 64): BackwardRow(tile_m=128, tile_n=128, q_stages=3, dout_stages=2, ds_stages=2),
    (96, 96): BackwardRow(
        tile_m=64, tile_n=128, q_stages=3, dout_stages=2, ds_stages=2, k_register_steps=6, v_register_steps=4
    ),
    (128, 128): BackwardRow(tile_m=64, tile_n=128, q_stages=3, dout_stages=2, ds_stages=2),
    (192, 128): BackwardRow(tile_m=64, tile_n=128, q_stages=3, dout_stages=3, ds_stages=2),
    (192, 192): BackwardRow(tile_m=64, tile_n=128, q_stages=3, dout_stages=2, ds_stages=2),
    (256, 256): BackwardRow(tile_m=64, tile_n=128, q_stages=2, dout_stages=2, ds_stages=1),
}
# Scores with a cap, a byte or a bias need registers, which a smaller tile of queries has, though it pads head dims.
BACKWARD_OF_ELEMENTS = {
    (128, 128): BackwardRow(tile_m=64, tile_n=128, q_stages=3, dout_stages=2, ds_stages=2),
    (192, 128): BackwardRow(tile_m=64, tile_n=128, q_stages=3, dout_stages=3, ds_stages=2),
    (192, 192): BackwardRow(tile_m=64, tile_n=128, q_stages=3, dout_stages=2, ds_stages=2),
    (256, 256): BackwardRow(tile_m=64, tile_n=128, q_stages=2, dout_stages=2, ds_stages=1),
}


def forward(spec: AttentionSpec) -> KernelConfig | None:
    """The forward kernel of a spec, or None where there is none."""
    if not has_known_dtypes(spec) or packs_with_others(spec):
        return None
    row = _row(spec)
    if row is None:
        return None
    row = dataclasses.replace(row, q_register_steps=_held(row.q_register_steps, spec.head_dim))
    return KernelConfig(arch="sm_90a", kernel="forward", **fields_of(spec), **dataclasses.asdict(row))


def _row(spec: AttentionSpec) -> Row | None:
    mask = spec.mask
    has_lengths = mask.has_kv_lengths or mask.has_cu_seqlens
    table = WINDOW if mask.has_left else EDGES if mask.has_right else FORWARD
    if has_lengths:
        table = PACKED if mask.has_cu_seqlens and not (mask.has_left and mask.has_right) else LENGTHS
    if mask.has_segments:
        table = SEGMENTS_AND_LENGTHS if has_lengths else SEGMENTS
    if spec.has_softcap:
        table = SOFTCAP
    if mask.has_dense or spec.bias_dtype:
        table = DENSE_AND_SOFTCAP if spec.has_softcap else DENSE
    return first_that_fits(table, spec)


def backward(spec: AttentionSpec) -> BackwardConfig | None:
    """The backward kernels of a spec, or None where there are none."""
    is_wide = max(spec.head_dim, spec.head_dim_v) > NARROW_LIMIT
    if not has_known_dtypes(spec) or packs_with_others(spec):
        return None
    has_elements = spec.has_softcap or spec.mask.has_dense or spec.bias_dtype is not None
    row = first_that_fits(BACKWARD_OF_ELEMENTS if has_elements else BACKWARD, spec)
    if row is None:
        return None
    row = dataclasses.replace(
        row,
        k_register_steps=_held(row.k_register_steps, spec.head_dim),
        v_register_steps=_held(row.v_register_steps, spec.head_dim_v),
    )
    fields = fields_of(spec)
    del fields["has_sinks"]  # it finds them in lse
    kind = BackwardWideConfig if is_wide else BackwardConfig
    # the first tile that a tile of queries may see must visit it: where there are segments, only if all tiles do
    fields["stores_dq"] = not is_wide and (spec.deterministic or not spec.mask.has_segments)
    fields["counts_adders"] = spec.head_dim > UNCOUNTED_LIMIT
    return kind(arch="sm_90a", deterministic=spec.deterministic, **fields, **dataclasses.asdict(row))


def _held(steps: int, head_dim: int) -> int:
    """Steps of MMA_COLUMNS that registers hold, of which an array may have fewer."""
    return min(steps, round_up(head_dim, MMA_COLUMNS) // MMA_COLUMNS)


def all_configs() -> tuple[Config, ...]:
    """What calls mostly ask for; `forward` and `backward` give others, compiled when they are first needed."""
    specs = tuple(common_specs(FORWARD | BACKWARD))
    forwards = [config for spec in specs if (config := forward(spec))]
    backwards = [kernel for spec in specs if (kernels := backward(spec)) for kernel in kernels.kernels]
    few = [one for spec in specs if (one := decode(spec))]
    # a window seldom hides a key of the few splits that a cluster makes
    merged = [(one, merge) for one in few for merge in MERGES if not (merge == "cluster" and one.has_left)]
    decodes = [kernel for one, merge in merged for kernel in dataclasses.replace(one, merge=merge).kernels]
    return tuple(dict.fromkeys([*forwards, *backwards, *decodes]))
