"""FlashAttention-4 for JAX: `attention` is one call that composes with every JAX transformation."""

from jax_fa4 import launcher
from jax_fa4.api import attention
from jax_fa4.export import export_disabled_checks, target_arch
from jax_fa4.jax_nn import dot_product_attention

__all__ = ["__version__", "attention", "dot_product_attention", "export_disabled_checks", "target_arch"]

__version__ = "0.1.0"

launcher.register()  # opens our own library, so that a deserialised program finds the custom call; libcuda stays closed
