"""What a wrong call of the packed and paged functions is told: every message of theirs, word for word."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def integers(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


T, S, B, P, N, K, D = 6, 8, 2, 3, 4, 2, 16
NEW = array(B, 1, K, D)
POOL = array(5, 4, K, D)
TABLE = integers([0, 1, 2], [3, 4, 0])
VARLEN = {"q": array(T, N, D), "k": array(S, K, D), "v": array(S, K, D), "cu_seqlens_q": integers(0, 2, 6)}
VARLEN["cu_seqlens_kv"] = integers(0, 5, 8)
PAGED = {"q": array(B, 3, N, D), "k_pages": POOL, "v_pages": POOL, "page_table": TABLE, "kv_lengths": integers(12, 0)}
PACKED = PAGED | {"q": array(T, N, D), "cu_seqlens_q": integers(0, 2, 6)}
APPEND = {"k_pages": POOL, "v_pages": POOL, "k": NEW, "v": NEW, "page_table": TABLE, "positions": integers([4], [0])}
COMBINE = {"outs": array(3, B, T, N, D), "lses": array(3, B, N, T)}
GOOD = {"varlen": VARLEN, "paged": PAGED, "packed": PACKED, "append": APPEND, "combine": COMBINE}
FUNCTIONS = {
    "varlen": jax_fa4.attention_varlen,
    "paged": jax_fa4.attention_paged,
    "packed": jax_fa4.attention_paged,
    "append": jax_fa4.append_kv,
    "combine": jax_fa4.combine,
}
ROWS = "[total, heads, head_dim]"
BATCH = "[batch, seq, heads, head_dim]"
PAGES = "[num_pages, page_size, kv_heads, head_dim]"

# (which call, what differs from a good one, the error, its message)
CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("varlen", {"q": array(1, T, N, D)}, ValueError, f"q must have 3 axes {ROWS}, got shape (1, 6, 4, 16)"),
    ("varlen", {"v": array(S, D)}, ValueError, f"v must have 3 axes {ROWS}, got shape (8, 16)"),
    ("varlen", {"q": array(T, 3, D)}, ValueError, "q must have a multiple of k's 2 heads, got 3"),
    ("varlen", {"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q must be an array, got list"),
    ("varlen", {"cu_seqlens_q": array(3)}, TypeError, "cu_seqlens_q must hold integers, got float32"),
    (
        "varlen",
        {"cu_seqlens_q": integers()},
        ValueError,
        "cu_seqlens_q must have 1 axis, of one entry more than there are sequences, got shape (0,)",
    ),
    ("varlen", {"cu_seqlens_q": integers(0, 4, 3)}, ValueError, "cu_seqlens_q must not descend, got 3 behind 4, at 2"),
    ("varlen", {"cu_seqlens_q": integers(0, 4, 7)}, ValueError, "cu_seqlens_q must be from 0 to 6, got 7"),
    ("varlen", {"cu_seqlens_q": integers(-1, 4, 6)}, ValueError, "cu_seqlens_q must be from 0 to 6, got -1"),
    (
        "varlen",
        {"cu_seqlens_kv": integers(0, 8)},
        ValueError,
        "cu_seqlens_kv must have 3 entries, one more than sequences, got 2",
    ),
    (
        "varlen",
        {"cu_seqlens_kv": None, "k": array(5, K, D), "v": array(5, K, D)},
        ValueError,
        "cu_seqlens_kv must be from 0 to 5, got 6",
    ),
    ("varlen", {"q_lengths": integers(1, 2, 3)}, ValueError, "q_lengths must broadcast to [L] = (2,), got shape (3,)"),
    ("varlen", {"kv_lengths": integers(1, 9)}, ValueError, "kv_lengths must be from 0 to 8, got 9"),
    ("varlen", {"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q must be None or an integer, got 2.5"),
    ("varlen", {"max_seqlen_kv": -1}, ValueError, "max_seqlen_kv must be None or >= 0, got -1"),
    (
        "varlen",
        {"max_seqlen_q": array(2, dtype=np.int32)},
        ValueError,
        "max_seqlen_q must be None, an integer or an array of rank 0, got shape (2,)",
    ),
    (
        "varlen",
        {"implementation": "fast"},
        ValueError,
        "implementation must be None, 'kernel', 'xla' or 'emulate', got 'fast'",
    ),
    (
        "paged",
        {"q": array(B, N, D)},
        ValueError,
        f"q must have 4 axes {BATCH}, got shape (2, 4, 16); one query a sequence is q[:, None], packed queries need "
        "cu_seqlens_q",
    ),
    ("paged", {"q": array(B, 3, 3, D)}, ValueError, "q must have a multiple of k_pages's 2 heads, got 3"),
    ("paged", {"q": array(B, 3, N, 8)}, ValueError, "k_pages must have q's head_dim 8, got 16"),
    (
        "paged",
        {"q": array(B, 3, N, D, dtype=np.float16)},
        TypeError,
        "k_pages must have q's dtype float16, got float32; cast one of them",
    ),
    ("paged", {"k_pages": array(5, K, D)}, ValueError, f"k_pages must have 4 axes {PAGES}, got shape (5, 2, 16)"),
    ("paged", {"v_pages": array(4, 4, K, D)}, ValueError, "v_pages must have k_pages's 5 pages, got 4"),
    ("paged", {"v_pages": array(5, 3, K, D)}, ValueError, "v_pages must have k_pages's 4 rows a page, got 3"),
    ("paged", {"v_pages": array(5, 4, 1, D)}, ValueError, "v_pages must have k_pages's 2 heads, got 1"),
    (
        "paged",
        {"k_pages": array(0, 4, K, D), "v_pages": array(0, 4, K, D)},
        ValueError,
        "k_pages must have a page or more, and a row or more in each, got shape (0, 4, 2, 16)",
    ),
    (
        "paged",
        {"page_table": TABLE[0]},
        ValueError,
        "page_table must have 2 axes [batch, pages of a sequence], got shape (3,)",
    ),
    (
        "paged",
        {"page_table": TABLE + np.int64(2**32)},
        ValueError,
        "page_table must hold 32-bit integers, got 4294967296",
    ),
    ("paged", {"page_table": TABLE * 1.0}, TypeError, "page_table must hold integers, got float32"),
    (
        "paged",
        {"page_table": TABLE[:1]},
        ValueError,
        "page_table must have a row for each of 2 sequences, got 1",
    ),
    ("paged", {"kv_lengths": integers(13, 0)}, ValueError, "kv_lengths must be from 0 to 12, got 13"),
    ("paged", {"q_lengths": integers(3, 4)}, ValueError, "q_lengths must be from 0 to 3, got 4"),
    ("paged", {"causal": None}, TypeError, "causal must be a Python bool, got None (NoneType)"),
    ("packed", {"q": array(B, 3, N, D)}, ValueError, f"q must have 3 axes {ROWS}, got shape (2, 3, 4, 16)"),
    (
        "packed",
        {"cu_seqlens_q": integers(0, 6)},
        ValueError,
        "cu_seqlens_q must have 3 entries, one more than sequences, got 2",
    ),
    ("append", {"k": NEW[0]}, ValueError, f"k must have 4 axes {BATCH}, got shape (1, 2, 16)"),
    (
        "append",
        {"v": NEW[..., :8]},
        ValueError,
        "v must have v_pages's heads and head_dim (2, 16), got (2, 8)",
    ),
    (
        "append",
        {"k": NEW.astype(np.float16)},
        TypeError,
        "k must have k_pages's dtype float32, got float16; cast one of them",
    ),
    ("append", {"v": array(B, 2, K, D)}, ValueError, "v must have k's 2 first axes (2, 1), got (2, 2)"),
    (
        "append",
        {"positions": integers(4, 0, 1)},
        ValueError,
        "positions must broadcast to [B, T] = (2, 1), got shape (3,)",
    ),
    (
        "append",
        {"positions": np.array([[2**32], [0]])},
        ValueError,
        "positions must hold 32-bit integers, got 4294967296",
    ),
    (
        "combine",
        {"outs": array(T, N, D)},
        ValueError,
        "outs must have at least 4 axes [parts, *batch, seq, heads, head_dim], got shape (6, 4, 16)",
    ),
    (
        "combine",
        {"layout": "BNTH"},
        ValueError,
        "lses must have the shape [parts, *batch, heads, seq] = (3, 2, 6, 4), got (3, 2, 4, 6)",
    ),
    ("combine", {"lses": None}, TypeError, "lses must be an array, got None (NoneType)"),
]


@pytest.mark.parametrize(("call", "change", "error", "message"), CALLS, ids=[message[:60] for *_, message in CALLS])
def test_the_message_says_what_is_wrong(call, change, error, message):
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda: FUNCTIONS[call](**{**GOOD[call], **change}))
    assert str(raised.value) == message


def test_keys_of_all_packed_queries_can_be_numbered():
    shapes = {name: jax.ShapeDtypeStruct(np.shape(a), a.dtype) for name, a in PACKED.items()}
    shapes |= {name: jax.ShapeDtypeStruct((1, 2**29, K, D), np.float32) for name in ("k_pages", "v_pages")}
    message = r"page_table must name places for up to 2147483647 keys of .*, got \(2, 3\) pages of 536870912"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: jax_fa4.attention_paged(**x), shapes)


@pytest.mark.parametrize("call", GOOD)
def test_the_calls_that_these_differ_from_are_good(call):
    jax.eval_shape(lambda: FUNCTIONS[call](**GOOD[call]))


@pytest.mark.parametrize("call", ["varlen", "paged", "packed"])
def test_a_kernel_that_is_asked_for_and_not_there_is_an_error(call):
    with pytest.raises(NotImplementedError, match="implementation='kernel' needs an NVIDIA GPU"):
        jax.block_until_ready(FUNCTIONS[call](**GOOD[call], implementation="kernel"))


def test_values_that_are_traced_are_not_checked():
    out = jax.jit(jax_fa4.attention_varlen)(**{**VARLEN, "cu_seqlens_q": jnp.array([0, 2, 99])})
    assert out.shape == (T, N, D)
