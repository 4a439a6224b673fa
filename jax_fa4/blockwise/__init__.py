"""Attention in plain JAX: what runs where there is no kernel, and what higher derivatives are made of."""

from jax_fa4.blockwise.backward import backward
from jax_fa4.blockwise.forward import forward
from jax_fa4.blockwise.rows import Results
from jax_fa4.blockwise.tangent import tangent

__all__ = ["Results", "backward", "forward", "tangent"]
