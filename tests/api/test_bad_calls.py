"""What a wrong call is told: every message, word for word."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


BATCH, T, S, N, K, D = 2, 7, 9, 4, 2, 16
Q, KV = array(BATCH, T, N, D), array(BATCH, S, K, D)
GOOD: dict[str, Any] = {"q": Q, "k": KV, "v": KV}

# (id, what differs from a good call, the error, its message)
CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # q, k, v
    ("q-list", {"q": [[1.0]]}, TypeError, "q must be an array, got list"),
    ("k-none", {"k": None}, TypeError, "k must be an array, got None (NoneType)"),
    ("v-number", {"v": 1.0}, TypeError, "v must be an array, got 1.0 (float)"),
    (
        "q-objects",
        {"q": np.full(Q.shape, None)},
        TypeError,
        "q must be an array that JAX can hold, got ndarray of object",
    ),
    (
        "k-masked",
        {"k": np.ma.array(KV)},
        TypeError,
        "k must be an array that JAX can hold, got MaskedArray of float32",
    ),
    (
        "q-big-endian",
        {"q": Q.astype(">f4")},
        TypeError,
        "q must be an array that JAX can hold, got ndarray of float32 in the other byte order",
    ),
    (
        "v-tangent-of-integers",
        {"v": np.zeros(KV.shape, jax.dtypes.float0)},
        TypeError,
        "v must be an array that JAX can hold, got ndarray of float0",
    ),
    (
        "q-integers",
        {"q": Q.astype(np.int32)},
        TypeError,
        "q must be float16, bfloat16, float32 or float64, got int32",
    ),
    (
        "q-complex",
        {"q": Q.astype(np.complex64)},
        TypeError,
        "q must be float16, bfloat16, float32 or float64, got complex64",
    ),
    (
        "v-float8",
        {"v": KV.astype(jnp.float8_e4m3fn)},
        TypeError,
        "v must be float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    (
        "k-other-dtype",
        {"k": KV.astype(np.float16)},
        TypeError,
        "k must have q's dtype float32, got float16; cast one of them",
    ),
    (
        "v-other-dtype",
        {"v": KV.astype(jnp.bfloat16)},
        TypeError,
        "v must have q's dtype float32, got bfloat16; cast one of them",
    ),
    (
        "q-rank-2",
        {"q": array(T, D)},
        ValueError,
        "q must have at least 3 axes [*batch, seq, heads, head_dim], got shape (7, 16)",
    ),
    (
        "k-rank-1-bnth",
        {"k": array(D), "layout": "BNTH"},
        ValueError,
        "k must have at least 3 axes [*batch, heads, seq, head_dim], got shape (16,)",
    ),
    ("k-unbatched", {"k": KV[0]}, ValueError, "k must have 4 axes as q, got shape (9, 2, 16)"),
    (
        "v-more-axes-bnth",
        {"q": array(4, 7, 16), "k": array(2, 9, 16), "v": array(1, 2, 9, 16), "layout": "BNTH"},
        ValueError,
        "v must have 3 axes as q, got shape (1, 2, 9, 16)",
    ),
    ("k-other-batch", {"k": array(3, S, K, D)}, ValueError, "k must have q's batch axes (2,), got (3,)"),
    ("v-batch-of-1", {"v": KV[:1]}, ValueError, "v must have q's batch axes (2,), got (1,)"),
    ("v-shorter", {"v": KV[:, 1:]}, ValueError, "v must have k's length 9, got 8"),
    ("v-other-heads", {"v": array(BATCH, S, 1, D)}, ValueError, "v must have k's 2 heads, got 1"),
    ("k-other-head-dim", {"k": array(BATCH, S, K, 24)}, ValueError, "k must have q's head_dim 16, got 24"),
    (
        "heads-not-divisible",
        {"q": array(BATCH, T, 3, D)},
        ValueError,
        "q must have a multiple of k's 2 heads, got 3; layout='BTNH' means [*batch, seq, heads, head_dim]",
    ),
    (
        "no-kv-heads",
        {"k": KV[:, :, :0], "v": KV[:, :, :0]},
        ValueError,
        "q must have a multiple of k's 0 heads, got 4; layout='BTNH' means [*batch, seq, heads, head_dim]",
    ),
    (
        "btnh-arrays-as-bnth",
        {"layout": "BNTH"},
        ValueError,
        "q must have a multiple of k's 9 heads, got 7; layout='BNTH' means [*batch, heads, seq, head_dim]",
    ),
    (
        "head-dim-12",
        {"q": Q[..., :12], "k": KV[..., :12]},
        ValueError,
        "q's head_dim must be a multiple of 8 from 8 to 256, got 12; pad with zeros and give softmax_scale",
    ),
    (
        "v-head-dim-20",
        {"v": array(BATCH, S, K, 20)},
        ValueError,
        "v's head_dim must be a multiple of 8 from 8 to 256, got 20; pad with zeros and give softmax_scale",
    ),
    (
        "head-dim-0",
        {"q": Q[..., :0], "k": KV[..., :0]},
        ValueError,
        "q's head_dim must be a multiple of 8 from 8 to 256, got 0; pad with zeros and give softmax_scale",
    ),
    (
        "head-dim-264",
        {"q": array(BATCH, T, N, 264), "k": array(BATCH, S, K, 264)},
        ValueError,
        "q's head_dim must be a multiple of 8 from 8 to 256, got 264",
    ),
    # words and flags
    ("layout-unknown", {"layout": "NTHD"}, ValueError, "layout must be 'BTNH' or 'BNTH', got 'NTHD'"),
    ("layout-lower-case", {"layout": "bnth"}, ValueError, "layout must be 'BTNH' or 'BNTH', got 'bnth'"),
    ("layout-none", {"layout": None}, ValueError, "layout must be 'BTNH' or 'BNTH', got None"),
    (
        "implementation-unknown",
        {"implementation": "cudnn"},
        ValueError,
        "implementation must be None, 'kernel', 'xla' or 'emulate', got 'cudnn'",
    ),
    (
        "implementation-bool",
        {"implementation": True},
        TypeError,
        "implementation must be None, 'kernel', 'xla' or 'emulate', got True (bool)",
    ),
    ("causal-number", {"causal": 1}, TypeError, "causal must be a Python bool, got 1 (int)"),
    ("causal-array", {"causal": np.ones(2, bool)}, TypeError, "causal must be a Python bool, got ndarray"),
    ("return-lse-none", {"return_lse": None}, TypeError, "return_lse must be a Python bool, got None (NoneType)"),
    (
        "deterministic-word",
        {"deterministic": "yes"},
        TypeError,
        "deterministic must be a Python bool, got 'yes' (str)",
    ),
    # numbers
    ("scale-nan", {"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite and > 0, got nan"),
    ("scale-infinite", {"softmax_scale": np.inf}, ValueError, "softmax_scale must be finite and > 0, got inf"),
    ("scale-0", {"softmax_scale": 0.0}, ValueError, "softmax_scale must be finite and > 0, got 0.0"),
    ("scale-negative", {"softmax_scale": np.float32(-1)}, ValueError, "softmax_scale must be finite and > 0, got -1.0"),
    (
        "scale-beyond-float32",
        {"softmax_scale": 1e300},
        ValueError,
        "softmax_scale must be from 1.18e-38 to 3.4e+38, got 1e+300",
    ),
    (
        "scale-beyond-floats",
        {"softmax_scale": 10**309},
        ValueError,
        f"softmax_scale must be from 1.18e-38 to 3.4e+38, got {10**309}",
    ),
    (
        "scale-object",
        {"softmax_scale": np.array(None)},
        TypeError,
        "softmax_scale must be an array that JAX can hold, got ndarray of object",
    ),
    (
        "scale-bool",
        {"softmax_scale": True},
        TypeError,
        "softmax_scale must be a number or an array of rank 0, got True (bool)",
    ),
    (
        "scale-per-head",
        {"softmax_scale": array(N)},
        ValueError,
        "softmax_scale must be a number or an array of rank 0, got shape (4,)",
    ),
    (
        "scale-complex",
        {"softmax_scale": jnp.asarray(1j)},
        TypeError,
        "softmax_scale must be a real number, got complex64",
    ),
    ("softcap-0", {"softcap": 0}, ValueError, "softcap must be finite and > 0, got 0"),
    (
        "softcap-that-float32-makes-0",
        {"softcap": 1e-60},
        ValueError,
        "softcap must be from 1.18e-38 to 3.4e+38, got 1e-60",
    ),
    ("softcap-negative", {"softcap": -30.0}, ValueError, "softcap must be finite and > 0, got -30.0"),
    (
        "softcap-word",
        {"softcap": "30"},
        TypeError,
        "softcap must be a number or an array of rank 0, got '30' (str)",
    ),
    # window and offset
    (
        "window-minus-1",
        {"window": (-1, 0)},
        ValueError,
        "window[0] must be None or >= 0, got -1; None is unbounded",
    ),
    (
        "window-negative-right",
        {"window": (None, np.int64(-2))},
        ValueError,
        "window[1] must be None or >= 0, got -2; None is unbounded",
    ),
    ("window-number", {"window": 128}, TypeError, "window must be None or a pair (left, right), got 128 (int)"),
    (
        "window-triple",
        {"window": (1, 2, 3)},
        TypeError,
        "window must be None or a pair (left, right), got a tuple of 3",
    ),
    (
        "window-one-array",
        {"window": jnp.arange(2)},
        TypeError,
        "window must be None or a pair (left, right), got an array",
    ),
    ("window-fraction", {"window": (2.0, 0)}, TypeError, "window[0] must be None or an integer, got 2.0"),
    (
        "window-bool",
        {"window": (True, None)},
        TypeError,
        "window[0] must be None, an integer or an array of rank 0, got True (bool)",
    ),
    (
        "window-array",
        {"window": (None, np.arange(2))},
        ValueError,
        "window[1] must be None, an integer or an array of rank 0, got shape (2,)",
    ),
    ("window-float-array", {"window": (jnp.float32(2), None)}, TypeError, "window[0] must hold integers, got float32"),
    ("offset-fraction", {"q_offset": 0.5, "causal": True}, TypeError, "q_offset must hold integers, got 0.5"),
    ("offset-huge", {"q_offset": 2**31}, ValueError, "q_offset must be within +-2**30, got 2147483648"),
    (
        "offsets-huge",
        {"q_offset": np.array([-(2**32), 0])},
        ValueError,
        "q_offset must be within +-2**30, got -4294967296",
    ),
    (
        "offset-shape",
        {"q_offset": np.arange(3)},
        ValueError,
        "q_offset must broadcast to [*batch] = (2,), got shape (3,)",
    ),
    # lengths and segments
    ("lengths-list", {"kv_lengths": [3, 4]}, TypeError, "kv_lengths must be an array, got list"),
    ("lengths-float", {"kv_lengths": array(2)}, TypeError, "kv_lengths must hold integers, got float32"),
    (
        "lengths-shape",
        {"q_lengths": np.arange(3)},
        ValueError,
        "q_lengths must broadcast to [*batch] = (2,), got shape (3,)",
    ),
    (
        "lengths-beyond-integers",
        {"kv_lengths": 10**30},
        TypeError,
        "kv_lengths must be an array that JAX can hold, got ndarray of object",
    ),
    ("lengths-too-long", {"q_lengths": np.array([3, 8])}, ValueError, "q_lengths must be from 0 to 7, got 8"),
    ("lengths-negative", {"kv_lengths": np.array([-1, 8])}, ValueError, "kv_lengths must be from 0 to 9, got -1"),
    (
        "segments-of-q-alone",
        {"q_segment_ids": np.zeros((BATCH, T), int)},
        ValueError,
        "kv_segment_ids must be given with the other segment ids, got None; self-attention passes the same twice",
    ),
    (
        "segments-of-kv-alone",
        {"kv_segment_ids": np.zeros((BATCH, S), int)},
        ValueError,
        "q_segment_ids must be given with the other segment ids, got None; self-attention passes the same twice",
    ),
    (
        "segments-swapped",
        {"q_segment_ids": np.zeros((BATCH, S), int), "kv_segment_ids": np.zeros((BATCH, T), int)},
        ValueError,
        "q_segment_ids must broadcast to [*batch, T] = (2, 7), got shape (2, 9)",
    ),
    (
        "segments-one-id",
        {"q_segment_ids": np.zeros((BATCH, T), int), "kv_segment_ids": np.zeros((BATCH, 1), int)},
        ValueError,
        "kv_segment_ids must have 9 entries in its last axis, got 1",
    ),
    (
        "segments-64-bit",
        {"q_segment_ids": np.full((BATCH, T), 2**32), "kv_segment_ids": np.zeros((BATCH, S), int)},
        ValueError,
        "q_segment_ids must hold 32-bit integers, got 4294967296",
    ),
    (
        "segments-bool",
        {"q_segment_ids": np.ones((BATCH, T), bool), "kv_segment_ids": np.ones((BATCH, S), bool)},
        TypeError,
        "q_segment_ids must hold integers, got bool",
    ),
    # mask, bias, sinks
    (
        "mask-float",
        {"mask": array(T, S)},
        TypeError,
        "mask must be bool, got float32; numbers to add are `bias`, zeros and ones are `mask != 0`",
    ),
    (
        "mask-of-keys",
        {"mask": np.ones((BATCH, S), bool)},
        ValueError,
        "mask must broadcast to [*batch, N, T, S] = (2, 4, 7, 9), got shape (2, 9)",
    ),
    (
        "mask-rank-5",
        {"mask": np.ones((1, BATCH, 1, T, S), bool)},
        ValueError,
        "mask must broadcast to [*batch, N, T, S] = (2, 4, 7, 9), got shape (1, 2, 1, 7, 9)",
    ),
    (
        "bias-bool",
        {"bias": np.ones((T, S), bool)},
        TypeError,
        "bias must be a floating-point array, got bool; a boolean array is `mask`",
    ),
    (
        "bias-integer",
        {"bias": np.ones((T, S), np.int32)},
        TypeError,
        "bias must be float16, bfloat16, float32 or float64, got int32",
    ),
    (
        "bias-of-kv-heads",
        {"bias": array(BATCH, K, T, S)},
        ValueError,
        "bias must broadcast to [*batch, N, T, S] = (2, 4, 7, 9), got shape (2, 2, 7, 9)",
    ),
    (
        "sinks-of-kv-heads",
        {"sinks": array(K)},
        ValueError,
        "sinks must broadcast to [N] or [*batch, N] = (2, 4), got shape (2,)",
    ),
    ("sinks-one", {"sinks": array(1)}, ValueError, "sinks must have 4 entries in its last axis, got 1"),
    (
        "sinks-integer",
        {"sinks": np.zeros(N, np.int32)},
        TypeError,
        "sinks must be float16, bfloat16, float32 or float64, got int32",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), [pytest.param(*rest, id=name) for name, *rest in CALLS])
def test_a_bad_call_is_told_what_was_wrong(change, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        jax_fa4.attention(**{**GOOD, **change})


def test_a_bad_call_fails_while_it_is_traced():
    with pytest.raises(ValueError, match=r"^k must have q's batch axes \(2,\), got \(3,\)"):
        jax.eval_shape(jax_fa4.attention, Q, array(3, S, K, D), KV)


def test_a_traced_flag_is_told_to_be_static():
    message = "causal must be a Python bool, got a traced value; make it a static argument of the jitted function"
    with pytest.raises(TypeError, match=f"^{message}"):
        jax.jit(lambda causal: jax_fa4.attention(**GOOD, causal=causal))(True)


def test_a_traced_word_is_told_to_be_one():
    message = "implementation must be None, 'kernel', 'xla' or 'emulate', got a traced value"
    with pytest.raises(TypeError, match=f"^{message}"):
        jax.jit(lambda implementation: jax_fa4.attention(**GOOD, implementation=implementation))(1)


def test_a_misspelt_argument_is_named():
    with pytest.raises(TypeError, match="'is_causal'"):
        jax_fa4.attention(**GOOD, is_causal=True)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="takes 3 positional arguments"):
        jax_fa4.attention(Q, KV, KV, 0.5)


def test_the_kernel_is_refused_on_a_cpu_when_the_program_is_lowered():
    attention = jax.jit(lambda q, kv: jax_fa4.attention(q, kv, kv, implementation="kernel"))
    traced = attention.trace(Q, KV)
    with pytest.raises(NotImplementedError, match="kernel"):
        traced.lower(lowering_platforms=("cpu",))
