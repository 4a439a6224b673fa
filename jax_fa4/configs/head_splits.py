"""How many CTAs of a backward share the query heads of a kv head: where tiles of keys are few, some would do it all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_fa4.configs.backward import BackwardConfig

__all__ = ["head_splits"]

MULTIPROCESSORS = 132  # of an H200; with a few less the choice is much the same
# 32 heads of one kv head, 8k causal (H200): 8 CTAs give 1.22 of what 2 give, 1.07 of 4 and 1.01 of 16, and each adds a
# part of dk and dv in float32.
MAX_SPLITS = 8
TAIL = 4  # the last tiles end as unevenly as about a quarter of the longest takes
# In steps, tiles of queries that a CTA computes with (2.3 us at head dim 128): a CTA writes 128 KiB of parts, and as
# much is read again at the speed of memory; a call with parts has two kernels more.
PART_STEPS, LAUNCH_STEPS = 4, 2


def head_splits(config: BackwardConfig, *, q_len: int, kv_len: int, group: int, kv_heads: int) -> int:
    """CTAs of a kernel for each tile of keys; 1 to `group`, the query heads of each of the batch's `kv_heads`.

    All parts of dk and dv together are at most half of dq.
    """
    if config.is_wide or config.has_cu_seqlens:
        return 1
    key_tiles, q_tiles = -(-kv_len // config.tile_n) * kv_heads, -(-q_len // config.tile_m)
    part_floats, dq_floats = kv_len * (config.head_dim + config.head_dim_v), group * q_len * config.head_dim

    def steps(splits: int) -> float:
        """The longest that a multiprocessor is busy."""
        ctas, longest = key_tiles * splits, -(-group // splits) * q_tiles
        extra = PART_STEPS * ctas / MULTIPROCESSORS + LAUNCH_STEPS if splits > 1 else 0.0
        if config.longest_first:  # a tile of keys meets half the tiles of queries on average
            return max(longest, ctas * longest / 2 / MULTIPROCESSORS + longest / TAIL) + extra
        return -(-ctas // MULTIPROCESSORS) * longest + extra

    # with 5 heads 4 splits would have 2, 2, 1 and none
    counts = {-(-group // heads) for heads in range(1, group + 1)}
    allowed = [n for n in sorted(counts) if n == 1 or (n <= MAX_SPLITS and 2 * n * part_floats <= dq_floats)]
    return min(allowed, key=steps)
