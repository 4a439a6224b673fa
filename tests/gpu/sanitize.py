"""Small calls of every kernel for NVIDIA's compute-sanitizer; lengths lie one under and one over what tiles hold.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck --report-api-errors no --padding 65536 \\
        python tests/gpu/sanitize.py

Names of groups of calls (`dense`, `features`, `few`, `pages`, `packed`) behind the file's name choose some of them.

With the platform's allocator every array is an allocation of its own, and `--padding` keeps so many bytes behind each
free, so a touch beyond its end is seen and not taken for one of the next array. Errors of API calls are left out,
because the launcher asks for one parameter more than a kernel has to learn that there is none.
"""

import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4
from jax_fa4 import testing
from jax_fa4.configs import backward_config, forward_config
from jax_fa4.testing import Cell

ARCH = "sm_90a"
SMALL = Cell(batch=(1,), kv_heads=1, group=2, dtype="bfloat16")
HEAD_DIMS = (  # of each class that has tiles of its own
    {"head_dim": 64},
    {"head_dim": 96},
    {"head_dim": 128},
    {"head_dim": 192, "head_dim_v": 128},
    {"head_dim": 192},
    {"head_dim": 256},
)
FEATURES = (  # with the edge of the tiles
    (1, {"head_dim": 128, "q_lengths": (0, 129), "kv_lengths": (1, 127)}),
    (-1, {"head_dim": 64, "causal": True, "q_lengths": (64, 191), "kv_lengths": (113, 0), "sinks": True}),
    (1, {"head_dim": 128, "window": (50, 20), "q_offset": 3}),
    (-1, {"head_dim": 256, "window": (50, None), "softcap": 20.0, "dtype": "float16"}),
    (-1, {"head_dim": 128, "segments": 3, "causal": True}),
    (1, {"head_dim": 192, "head_dim_v": 128, "segments": 3, "kv_lengths": (127, 129), "dtype": "float16"}),
    (1, {"head_dim": 128, "mask": "full", "causal": True, "layout": "BNTH"}),
    (-1, {"head_dim": 96, "mask": "shared", "softcap": 20.0, "sinks": True}),
    (1, {"head_dim": 128, "bias": "full", "causal": True}),
    (-1, {"head_dim": 192, "bias": "keys", "window": (None, 30), "layout": "BNTH", "dtype": "float16"}),
    (1, {"head_dim": 128, "bias": "shared", "softcap": 20.0}),
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


def backward(cell, **more):
    x, arrays, options = arrays_and_options(cell)
    wrt = {name: jnp.asarray(x[name]) for name in ("q", "k", "v", "bias", "softcap") if name in x}
    options = {name: value for name, value in options.items() if name not in wrt}

    def loss(wrt):
        out = jax_fa4.attention(**{**arrays, **wrt}, **options, **more, implementation="kernel")
        return out.astype(jnp.float32).sum()

    got = jax.grad(loss)(wrt)
    exact = testing.gradients(x, np.ones((*x["q"].shape[:-1], x["v"].shape[-1])))
    for name in wrt:
        scale = max(np.abs(exact[name]).max(), 1)
        close(np.asarray(got[name], np.float64) / scale, exact[name] / scale)


def fused(cell):
    """Of three slices of one array, whose last element is v's."""
    x, _, options = arrays_and_options(cell)
    qkv = jnp.stack([jnp.asarray(x[name]) for name in "qkv"], axis=-3)

    def loss(qkv):
        out = jax_fa4.attention_qkv(qkv, **options, implementation="kernel")
        return out.astype(jnp.float32).sum(), out

    got, out = jax.grad(loss, has_aux=True)(qkv)
    close(out, testing.attention(x).out)
    exact = testing.gradients(x, np.ones(x["q"].shape))
    for i, name in enumerate("qkv"):
        scale = max(np.abs(exact[name]).max(), 1)
        close(np.asarray(got[:, :, i], np.float64) / scale, exact[name] / scale)


def paged(page_size, q, offsets=None, head_dim=128, lengths=(0, 65, 333), **options):
    """The last row of every pool belongs to a sequence, and the last query of packed ones.

    Indices of the first page and of the last lie outside the pool, and so do those of the sequence without keys.
    """
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
    x["page_table"] = np.where(table == 3 * slots - 1, 1 << 30, np.where(table == 0, -1, table)).reshape(3, slots)
    x["page_table"] = x["page_table"].astype(np.int32)
    x["page_table"][0] = 1 << 30
    arrays = {name: jnp.asarray(a) for name, a in x.items() if isinstance(a, np.ndarray)}
    static = {name: a for name, a in x.items() if name not in arrays}
    out, lse = jax_fa4.attention_paged(**arrays, **static, return_lse=True, implementation="kernel")
    close(out, exact.out)
    close(lse, exact.lse)


def packed(head_dim, *, deterministic=False, dtype="bfloat16", lengths=None, **options):
    """Sequences that end within a tile, and rows of none; without lengths the last row of all arrays belongs to one."""
    rng = np.random.default_rng(0)
    shapes = {"q": (391, 2, head_dim), "k": (391, 1, head_dim), "v": (391, 1, head_dim)}
    x = {name: rng.standard_normal(shape).astype(testing.np_dtype(dtype)) for name, shape in shapes.items()}
    integers = {"cu_seqlens_q": np.array([3, 3, 130, 194, 391], np.int32)}
    integers |= {name: np.array(value, np.int32) for name, value in (lengths or {}).items()}
    options = {"causal": True, **options}
    static = {"deterministic": deterministic, "return_lse": True, "implementation": "kernel"}

    def call(qkv):
        return jax_fa4.attention_varlen(**qkv, **integers, **options, **static)

    (out, lse), pullback = jax.vjp(call, {name: jnp.asarray(x[name]) for name in "qkv"})
    x |= integers | options
    exact = testing.attention_varlen(x)
    close(out, exact.out)
    close(lse, exact.lse)
    (got,) = pullback((jnp.ones_like(out), jnp.zeros_like(lse)))
    exact = testing.gradients_varlen(x, np.ones(out.shape), np.zeros(lse.shape))
    for name in "qkv":
        scale = max(np.abs(exact[name]).max(), 1)
        close(np.asarray(got[name], np.float64) / scale, exact[name] / scale)


DECODE = ({"kv_lengths": (257, 1030), "q_lengths": (0, 2)}, {"window": (700, None)}, {"softcap": 20.0, "sinks": True})


def at_edge(cell, edge, *, key_tiles=1, of=forward_config):
    """The cell with one tile of queries and some of keys, and `edge` more of each."""
    config = of(cell.spec, ARCH)
    return dataclasses.replace(cell, q=config.tile_m + edge, k=key_tiles * config.tile_n + edge)


def both(cell, **more):
    forward(cell)
    backward(cell, **more)


def dense_calls():
    for head_dims in HEAD_DIMS:
        cell = dataclasses.replace(SMALL, **head_dims)
        halves = dataclasses.replace(cell, causal=True, dtype="float16", layout="BNTH")
        both(at_edge(cell, -1))
        both(at_edge(halves, 1))
        backward(at_edge(cell, 1, of=backward_config), deterministic=True)
    for head_dim, head_dim_v in ((8, 8), (72, 104)):
        both(dataclasses.replace(SMALL, q=129, k=191, head_dim=head_dim, head_dim_v=head_dim_v))
    both(dataclasses.replace(SMALL, q=1, k=1, head_dim=64))
    both(dataclasses.replace(SMALL, q=300, k=65, head_dim=128, causal=True))  # rows that see no key
    backward(dataclasses.replace(SMALL, group=15, q=1000, k=300, head_dim=128))  # CTAs share a tile's query heads
    fused(dataclasses.replace(SMALL, q=129, kv_heads=2, group=1, head_dim=128, causal=True))


def calls_with_features():
    for edge, feature in FEATURES:
        both(at_edge(dataclasses.replace(SMALL, batch=(2,), **feature), edge, key_tiles=2))


def calls_of_few_queries():
    for feature, q in itertools.product(DECODE, (1, 3)):
        forward(dataclasses.replace(SMALL, batch=(2,), q=q, k=1031, head_dim=128, group=3, **feature))
    # splits that a second kernel merges: many of few tiles, few of many
    forward(dataclasses.replace(SMALL, batch=(2,), q=2, k=9001, head_dim=64, group=3))
    forward(dataclasses.replace(SMALL, batch=(33,), k=1031, q=1, head_dim=128, group=3))


def calls_in_pages():
    for page_size, q in ((1, 1), (16, 3), (80, 40)):
        paged(page_size, q)
    paged(16, 70, [0, 1, 1, 70])
    paged(16, 70, [2, 3, 40, 70], q_lengths=[1, 9, 30], window=(100, None), head_dim=64)
    paged(1, 9, [0, 0, 8, 9], lengths=(0, 1, 2500))
    paged(64, 9, [0, 9, 9, 9], softcap=20.0)


def packed_calls():
    packed(64, window=(70, 30), causal=False, dtype="float16")
    packed(64, deterministic=True, sinks=np.array([0.5, -1], np.float32))
    packed(128)
    packed(128, softcap=5.0, dtype="float16")
    packed(128, deterministic=True, window=(70, None))
    packed(192, dtype="float16")
    packed(192, deterministic=True)
    for head_dim in (128, 256):
        packed(head_dim, lengths={"q_lengths": [0, 1, 64, 190], "kv_lengths": [0, 127, 9, 197]})


GROUPS = {
    "dense": dense_calls,
    "features": calls_with_features,
    "few": calls_of_few_queries,
    "pages": calls_in_pages,
    "packed": packed_calls,
}


def main(names):
    for name in names or GROUPS:
        GROUPS[name]()
    print("done")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
