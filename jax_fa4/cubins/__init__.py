"""Kernel binaries: built from a config, cached on disk, loaded once per process."""

from jax_fa4.cubins.cubin import Cubin, DamagedCubinError, Param
from jax_fa4.cubins.lookup import get

__all__ = ["Cubin", "DamagedCubinError", "Param", "get"]
