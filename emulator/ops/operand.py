"""Matrix operands of wgmma and tcgen05 in shared memory: checked when an MMA is issued, read when it executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jax_fa4.emulator.errors import Fault
from jax_fa4.emulator.layout import matrix
from jax_fa4.emulator.layout.number import Format
from jax_fa4.emulator.order import Times
from jax_fa4.emulator.state import Cta

__all__ = ["SharedMatrix", "shared_matrix"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedMatrix:
    """`rows` times 32 bytes of K in the shared memory of one CTA."""

    cta: Cta
    access: matrix.Access
    format: Format
    what: str

    def check(self, times: Times, agent: int, epoch: int) -> None:
        """The matrix lies inside shared memory, written and visible to the async proxy; `agent` reads it at `epoch`."""
        smem = self.cta.smem
        smem.check_range(self.access.first_byte, self.access.end_byte - self.access.first_byte, 16, self.what)
        if smem.check_races:
            smem.shadow.check_read(self.access.words, times, by_async=True, what=self.what)
            smem.shadow.mark_read(self.access.words, agent, epoch)

    def read(self) -> npt.NDArray[np.float32]:
        """Its values now: [rows, K]."""
        return self.format.decode(self.cta.smem.views[self.format.element_bytes][self.access.elements])


def shared_matrix(
    cta: Cta,
    bits: int,
    decode: Callable[[int], matrix.MatrixDescriptor],
    *,
    rows: int,
    format: Format,
    mn_major: bool,
    what: str,
) -> SharedMatrix:
    """The operand that descriptor `bits` names in `cta`. Raises Fault for a descriptor that is not legal."""
    try:
        descriptor = decode(bits)
        access = matrix.access(descriptor, rows=rows, element_bytes=format.element_bytes, mn_major=mn_major)
    except ValueError as error:
        raise Fault("descriptor", f"{what}: {error}") from error
    return SharedMatrix(cta=cta, access=access, format=format, what=what)
