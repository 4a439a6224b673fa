"""The op as JAX sees it: primitives and their rules for shapes, derivatives, vmap and sharding."""

from jax_fa4.rules.forward import LSE_NAME, OUT_NAME, attend

__all__ = ["LSE_NAME", "OUT_NAME", "attend"]
