"""The op as JAX sees it: primitives and their rules for shapes, derivatives, vmap and sharding.

    operands --forward--> out, lse --checkpoint names--> attach --> out, lse
                                                           |  jvp
                                                        tangent <--transpose--> backward

`forward` has no derivative; `attach` is the identity on its results and has all of it. So grad runs one forward and one
backward, a checkpoint policy that saves out and lse spares the second forward, and, since tangent and backward are
linear primitives with plain JAX behind them, every order and mode of differentiation works.
"""

from jax_fa4.rules.forward import LSE_NAME, OUT_NAME, attend
from jax_fa4.rules.sharding import automatic

__all__ = ["LSE_NAME", "OUT_NAME", "attend", "automatic"]
