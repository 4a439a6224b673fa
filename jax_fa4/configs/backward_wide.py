"""The main kernel of a backward whose head dims exceed 128: a cluster of two CTAs owns a tile of keys."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_fa4.configs.backward import BackwardConfig
from jax_fa4.configs.config import MBARRIER_BYTES, REGISTER_FILE, WARPGROUP, WARPGROUP_ROWS

__all__ = ["BackwardWideConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardWideConfig(BackwardConfig):
    """A CTA owns 64 of a tile's keys; of its two consumer warpgroups one holds dv, the other dk.

    Raises ValueError where shared memory, registers or an instruction forbid it.
    """

    kernel: Literal["backward_wide"] = "backward_wide"  # type: ignore[assignment]

    @property
    def other_registers(self) -> int:
        """Fewer than where a thread also adds to dq."""
        return 8

    @property
    def ds_stages_that_work(self) -> tuple[int, ...]:
        """Of the tiles that weights and ds pass through."""
        return (1, 2)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups: two hold dv and dk, the third sums dq."""
        return 3

    @property
    def producer_registers(self) -> int:
        """A thread of the producer warpgroup keeps so many."""
        return 24

    @property
    def kept_registers(self) -> dict[str, int]:
        """Of a thread, for the roles that give others away."""
        return {"producer": self.producer_registers, "queries": self.queries_registers}

    @property
    def slabs_at_once(self) -> int:
        """Of 64 columns of dq that a thread holds: as many as dk and dv leave registers for."""
        return 2 if max(self.columns, self.v_columns) <= 3 * self.slab else 1

    @property
    def queries_registers(self) -> int:
        """A thread of the warpgroup that sums dq keeps so many."""
        return 40 + 32 * self.slabs_at_once

    @property
    def consumer_registers(self) -> int:
        """A thread of the warpgroups that hold dk and dv gets so many."""
        return (REGISTER_FILE // WARPGROUP - self.producer_registers - self.queries_registers) // 2

    @property
    def slabs(self) -> int:
        """Of 64 columns of q, k and dq."""
        return self.columns // self.slab

    @property
    def v_slabs(self) -> int:
        """Of v and dout."""
        return self.v_columns // self.slab

    @property
    def peer_slabs(self) -> int:
        """Of the other CTA's keys: those columns of which this one sums dq."""
        return -(-self.slabs // self.cluster_ctas)

    @property
    def keys_first(self) -> bool:
        """Whether dk += ds q comes before dp, not beside the computation of ds: q's slot is free the sooner.

        A third stage of q hides its copy, and the other order then gives 1.06 to 1.10; with two this one does (H200,
        2026-11-30: d256 1.07 and 1.08 at 4k and 16k, causal 1.08 and 1.07).
        """
        return self.q_stages == 2

    @property
    def accumulator_registers(self) -> int:
        """Of a thread of the warpgroup that needs most: dk or dv, s or dp, p or ds in 16 bit."""
        elements = max(self.columns, self.v_columns) + self.tile_m + self.tile_m // 2
        return elements * WARPGROUP_ROWS // WARPGROUP

    @property
    def k_bytes(self) -> int:
        """Of a CTA's keys, and of columns of the other one's."""
        return WARPGROUP_ROWS * (self.columns + self.peer_slabs * self.slab) * self.element_bytes

    @property
    def v_bytes(self) -> int:
        """Of a CTA's values."""
        return WARPGROUP_ROWS * self.v_columns * self.element_bytes

    @property
    def ds_bytes(self) -> int:
        """Of one stage of ds: the CTA's own, and the other one's."""
        return self.cluster_ctas * self.tile_m * WARPGROUP_ROWS * self.element_bytes

    @property
    def dq_bytes(self) -> int:
        """Dq is added from registers."""
        return 0

    @property
    def barrier_bytes(self) -> int:
        """A full and an empty barrier for k, for v and for each stage of q, of dout and of ds."""
        return 2 * (2 + self.q_stages + self.dout_stages + self.ds_stages) * MBARRIER_BYTES
