"""FlashAttention-4 for JAX: `attention` is one call that composes with every JAX transformation."""

from jax_fa4 import launcher
from jax_fa4.api import attention
from jax_fa4.combine import combine
from jax_fa4.export import export_disabled_checks, target_arch
from jax_fa4.fused import attention_qkv
from jax_fa4.jax_nn import dot_product_attention
from jax_fa4.paged import append_kv, attention_paged
from jax_fa4.scheduling import cluster_launch_control
from jax_fa4.varlen import attention_varlen

__all__ = [
    "__version__",
    "append_kv",
    "attention",
    "attention_paged",
    "attention_qkv",
    "attention_varlen",
    "cluster_launch_control",
    "combine",
    "dot_product_attention",
    "export_disabled_checks",
    "target_arch",
]

__version__ = "0.1.0"

launcher.register()  # opens our own library, so that a deserialised program finds the custom call; libcuda stays closed
