"""The fifth-generation tensor core and its memory, PTX ISA 9.7.16 (sm_100a)."""

import jax_fa4.emulator.ops.tcgen05.access
import jax_fa4.emulator.ops.tcgen05.allocation
import jax_fa4.emulator.ops.tcgen05.multiply  # noqa: F401 (each registers its instructions)
