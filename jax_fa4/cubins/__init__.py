"""Kernel binaries: built from a config, cached on disk, checked against launch plans, handed to the launcher."""

from jax_fa4.cubins.cubin import BadCubinError, Cubin, Param
from jax_fa4.cubins.load import register
from jax_fa4.cubins.lookup import get
from jax_fa4.cubins.ptx_params import check_params

__all__ = ["BadCubinError", "Cubin", "Param", "check_params", "get", "register"]
