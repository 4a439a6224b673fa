"""Launch plans: what the custom call of one attention does on the GPU."""

from jax_fa4.plan.encode import encode, encode_images
from jax_fa4.plan.expr import Expr, ExprLike, ceil_div, dim, evaluate, lead, maximum, minimum, multiprocessors
from jax_fa4.plan.params import Param, Pointer, Record, RecordField, Scalar, TensorMap
from jax_fa4.plan.plan import BufferSpec, Launch, Plan

__all__ = [
    "BufferSpec",
    "Expr",
    "ExprLike",
    "Launch",
    "Param",
    "Plan",
    "Pointer",
    "Record",
    "RecordField",
    "Scalar",
    "TensorMap",
    "ceil_div",
    "dim",
    "encode",
    "encode_images",
    "evaluate",
    "lead",
    "maximum",
    "minimum",
    "multiprocessors",
]
