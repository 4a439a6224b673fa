"""What every argument of the public calls may be, and the text that a user reads when it is something else.

One form for all: `<argument> must <be what>, got <what came>[; <hint>]`. A wrong kind of value is a TypeError, a wrong
value or shape a ValueError. Checks see shapes, dtypes and numbers of Python and numpy; they never read an array of a
device.
"""

from jax_fa4.checks.operands import fused, head_dims, query_key_value
from jax_fa4.checks.options import lengths, mask_and_bias, offset, positive, segment_ids, sinks, window
from jax_fa4.checks.serving import (
    append,
    max_seqlen,
    offsets,
    packed_page_table,
    page_table,
    paged_queries,
    pages,
    parts,
    sequence_lengths,
)
from jax_fa4.checks.values import array, choice, fail, flag, integers, names

__all__ = [
    "append",
    "array",
    "choice",
    "fail",
    "flag",
    "fused",
    "head_dims",
    "integers",
    "lengths",
    "mask_and_bias",
    "max_seqlen",
    "names",
    "offset",
    "offsets",
    "packed_page_table",
    "page_table",
    "paged_queries",
    "pages",
    "parts",
    "positive",
    "query_key_value",
    "segment_ids",
    "sequence_lengths",
    "sinks",
    "window",
]
