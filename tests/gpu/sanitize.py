"""Small calls of every kernel for NVIDIA's compute-sanitizer; lengths lie one under and one over tile multiples.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --report-api-errors no python tests/gpu/sanitize.py

Names of groups of calls (`dense`, `features`, `few`, `pages`, `packed`) behind the file's name choose some of them.

With the platform's allocator every array is an allocation of its own, so a touch beyond its end is seen. Errors of API
calls are left out, because the launcher asks for one parameter more than a kernel has to learn that there is none.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4
from jax_fa4 import testing
from jax_fa4.testing import Cell

LENGTHS = ((1, 1), (127, 129), (193, 191), (129, 300), (300, 65))
FEATURES = (
    {"q_lengths": (0, 129), "kv_lengths": (1, 190)},
    {"window": (50, 20), "q_offset": 3},
    {"segments": 3},
    {"mask": "full"},
    {"bias": "full"},
    {"bias": "keys"},
    {"bias": "shared", "softcap": 20.0},
    {"softcap": 20.0},
    {"sinks": True},
)


def close(got, exact):
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert np.array_equal(np.isinf(got), np.isinf(exact))
    assert np.abs(np.where(np.isinf(exact), 0, got - np.where(np.isinf(exact), 0, exact))).max(initial=0) < 0.05


def arrays_and_options(cell):
    x = testing.random(cell)
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    return x, arrays, {name: value for name, value in x.items() if name not in arrays}


def forward(cell):
    x, arrays, options = arrays_and_options(cell)
    out, lse = jax_fa4.attention(**arrays, **options, return_lse=True, implementation="kernel")
    exact = testing.attention(x)
    close(out, exact.out)
    close(lse, exact.lse)


def backward(cell):
    x, arrays, options = arrays_and_options(cell)
    wrt = {name: jnp.asarray(x[name]) for name in ("q", "k", "v", "bias", "softcap") if name in x}
    options = {name: value for name, value in options.items() if name not in wrt}

    def loss(wrt):
        return jax_fa4.attention(**{**arrays, **wrt}, **options, implementation="kernel").astype(jnp.float32).sum()

    got = jax.grad(loss)(wrt)
    exact = testing.gradients(x, np.ones((*x["q"].shape[:-1], x["v"].shape[-1])))
    for name in wrt:
        scale = max(np.abs(exact[name]).max(), 1)
        close(np.asarray(got[name], np.float64) / scale, exact[name] / scale)


def paged(page_size, q, offsets=None, head_dim=128, lengths=(0, 65, 333), **options):
    """The last row of every pool belongs to a sequence, and the last query of packed ones."""
    rng, dtype = np.random.default_rng(0), testing.np_dtype("bfloat16")
    slots = -(-max(lengths) // page_size)
    pools = (rng.standard_normal((3 * slots, page_size, 1, head_dim)).astype(dtype) for _ in range(2))
    queries = (3, q) if offsets is None else (q,)
    x = {"q": rng.standard_normal((*queries, 3, head_dim)).astype(dtype)}
    x |= dict(zip(("k_pages", "v_pages"), pools, strict=True))
    table = rng.permutation(3 * slots)
    last, place = np.argmax(table), 3 * slots - 1 - (slots - -(-lengths[-1] // page_size))
    table[[last, place]] = table[[place, last]]  # the last page of the last sequence
    x |= {"page_table": table.reshape(3, slots).astype(np.int32), "kv_lengths": np.array(lengths, np.int32)}
    x |= {} if offsets is None else {"cu_seqlens_q": np.array(offsets, np.int32)}
    x |= {name: np.array(value, np.int32) if isinstance(value, list) else value for name, value in options.items()}
    exact = testing.attention_paged(x)
    x["page_table"][0] = 1 << 30  # of a sequence without keys
    arrays = {name: jnp.asarray(a) for name, a in x.items() if isinstance(a, np.ndarray)}
    static = {name: a for name, a in x.items() if name not in arrays}
    out, lse = jax_fa4.attention_paged(**arrays, **static, return_lse=True, implementation="kernel")
    close(out, exact.out)
    close(lse, exact.lse)


def packed(head_dim, deterministic, **lengths):
    """Sequences that end within a tile, and rows of none; without lengths the last row of all arrays belongs to one."""
    rng, dtype = np.random.default_rng(0), testing.np_dtype("bfloat16")
    shapes = {"q": (391, 2, head_dim), "k": (391, 1, head_dim), "v": (391, 1, head_dim)}
    x = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    x |= {"cu_seqlens_q": np.array([3, 3, 130, 194, 391], np.int32), "causal": True}
    x |= {name: np.array(value, np.int32) for name, value in lengths.items()}
    integers = {name: jnp.asarray(x[name]) for name in ("cu_seqlens_q", *lengths)}

    def call(qkv):
        options = {"causal": True, "deterministic": deterministic, "return_lse": True, "implementation": "kernel"}
        return jax_fa4.attention_varlen(**qkv, **integers, **options)

    (out, lse), pullback = jax.vjp(call, {name: jnp.asarray(x[name]) for name in "qkv"})
    exact = testing.attention_varlen(x)
    close(out, exact.out)
    close(lse, exact.lse)
    (got,) = pullback((jnp.ones_like(out), jnp.zeros_like(lse)))
    exact = testing.gradients_varlen(x, np.ones(out.shape), np.zeros(lse.shape))
    for name in "qkv":
        scale = max(np.abs(exact[name]).max(), 1)
        close(np.asarray(got[name], np.float64) / scale, exact[name] / scale)


SMALL = {"batch": (1,), "kv_heads": 1, "group": 2, "dtype": "bfloat16"}
DECODE = ({"kv_lengths": (257, 1030), "q_lengths": (0, 2)}, {"window": (700, None)}, {"softcap": 20.0, "sinks": True})


def both(**changes):
    cell = Cell(**{**SMALL, **changes})
    forward(cell)
    backward(cell)


def dense_calls():
    for head_dim, causal, (q, k) in itertools.product((64, 128), (False, True), LENGTHS):
        both(q=q, k=k, head_dim=head_dim, causal=causal)
    for head_dim, head_dim_v in ((8, 8), (96, 96), (72, 104), (192, 128), (256, 256)):
        both(q=129, k=191, head_dim=head_dim, head_dim_v=head_dim_v)
    backward(Cell(**{**SMALL, "group": 15, "q": 1000, "k": 300, "head_dim": 128}))  # CTAs share a tile's query heads


def calls_with_features():
    for feature in FEATURES:
        both(batch=(2,), q=129, k=191, head_dim=128, **feature)


def calls_of_few_queries():
    for feature, q in itertools.product(DECODE, (1, 3)):
        forward(Cell(**{**SMALL, "batch": (2,), "q": q, "k": 1031, "head_dim": 128, "group": 3, **feature}))
    # splits that a second kernel merges: many of few tiles, few of many
    forward(Cell(**{**SMALL, "batch": (2,), "q": 2, "k": 9001, "head_dim": 64, "group": 3}))
    forward(Cell(**{**SMALL, "batch": (33,), "k": 1031, "q": 1, "head_dim": 128, "group": 3}))


def calls_in_pages():
    for page_size, q in ((1, 1), (16, 3), (80, 40)):
        paged(page_size, q)
    paged(16, 70, [0, 1, 1, 70])
    paged(16, 70, [2, 3, 40, 70], q_lengths=[1, 9, 30], window=(100, None), head_dim=64)
    paged(1, 9, [0, 0, 8, 9], lengths=(0, 1, 2500))
    paged(64, 9, [0, 9, 9, 9], softcap=20.0)


def packed_calls():
    for head_dim, deterministic in itertools.product((64, 128, 192), (False, True)):
        packed(head_dim, deterministic)
    for head_dim in (128, 256):
        packed(head_dim, False, q_lengths=[0, 1, 64, 190], kv_lengths=[0, 127, 9, 197])


GROUPS = {
    "dense": dense_calls,
    "features": calls_with_features,
    "few": calls_of_few_queries,
    "pages": calls_in_pages,
    "packed": packed_calls,
}
for name in sys.argv[1:] or GROUPS:
    GROUPS[name]()
print("done")  # noqa: T201
