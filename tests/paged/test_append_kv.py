"""New keys and values in their pages, against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fa4

PAGE_SIZE, NUM_PAGES = 3, 9
TABLE = np.array([[4, 0, 7], [2, 8, 1]], np.int32)


def pools(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((NUM_PAGES, PAGE_SIZE, 2, dim)).astype(np.float32) for dim in (16, 8)]


def tokens(*lead):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((*lead, 2, dim)).astype(np.float32) for dim in (16, 8)]


def written(pool, new, sequences, positions, table=TABLE):
    pool = pool.copy()
    for token, sequence, position in zip(new, sequences, positions, strict=True):
        if 0 <= position < table.shape[1] * PAGE_SIZE and 0 <= table[sequence, position // PAGE_SIZE] < NUM_PAGES:
            pool[table[sequence, position // PAGE_SIZE], position % PAGE_SIZE] = token
    return pool


POSITIONS = {
    "in-order": [[0, 1, 2, 3], [5, 6, 7, 8]],
    "padding": [[-1, 2, -1, -1], [-1, -1, -1, -1]],
    "behind-the-last-page": [[7, 8, 9, 10], [0, 100, 2**31 - 1, -(2**31)]],
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_tokens_lie_where_their_positions_say(positions):
    new = tokens(2, 4)
    result = jax_fa4.append_kv(*pools(), *new, TABLE, np.array(positions))
    sequences = np.repeat([0, 1], 4)
    for ours, pool, rows in zip(result, pools(), new, strict=True):
        expected = written(pool, rows.reshape(8, *rows.shape[2:]), sequences, np.ravel(positions))
        np.testing.assert_array_equal(ours, expected)


def test_packed_tokens_lie_where_their_positions_say():
    new, positions = tokens(7), [8, 0, 1, 2, 4, 5, 6]  # a row before the first offset, 3 and 2 tokens, one behind
    result = jax_fa4.append_kv(*pools(), *new, TABLE, np.array(positions), cu_seqlens=np.array([1, 4, 6]))
    for ours, pool, rows in zip(result, pools(), new, strict=True):
        np.testing.assert_array_equal(ours, written(pool, rows[1:6], [0, 0, 0, 1, 1], positions[1:6]))


def test_one_position_serves_all_sequences():
    new = tokens(2, 1)
    result = jax_fa4.append_kv(*pools(), *new, TABLE, np.array([[4]]))
    np.testing.assert_array_equal(result[0], written(pools()[0], new[0][:, 0], [0, 1], [4, 4]))


@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**31 - 1])
def test_a_page_outside_the_pool_is_not_written(page):
    new, table = tokens(2, 1), TABLE.copy()
    table[1, 1] = page
    result = jax_fa4.append_kv(*pools(), *new, table, np.array([[4], [4]]))
    np.testing.assert_array_equal(result[0], written(pools()[0], new[0][:, 0], [0, 1], [4, 4], table))


def test_sequences_without_pages_write_nothing():
    result = jax_fa4.append_kv(*pools(), *tokens(2, 1), TABLE[:, :0], np.array([[0], [4]]))
    for ours, pool in zip(result, pools(), strict=True):
        np.testing.assert_array_equal(ours, pool)


@pytest.mark.parametrize("tokens_lead", [(2, 1), (2,)], ids=["padded", "packed"])
def test_pools_of_an_explicit_mesh_keep_their_sharding(tokens_lead):
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
    packed = {} if len(tokens_lead) == 2 else {"cu_seqlens": np.array([0, 1, 2])}
    positions = np.array([[4], [3]]).reshape(tokens_lead)
    wanted = jax_fa4.append_kv(*pools(), *tokens(*tokens_lead), TABLE, positions, **packed)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, P(None, None, "heads")) for a in pools()]
        new = [jax.device_put(a, P("data", *[None] * (a.ndim - 3), "heads")) for a in tokens(*tokens_lead)]
        result = jax.jit(jax_fa4.append_kv)(*placed, *new, TABLE, positions, **packed)
    for ours, pool, expected in zip(result, placed, wanted, strict=True):
        assert jax.typeof(ours).sharding == jax.typeof(pool).sharding
        np.testing.assert_array_equal(ours, expected)


def test_donated_pools_are_written_in_place():
    append = jax.jit(jax_fa4.append_kv, donate_argnums=(0, 1))
    given = [jnp.array(pool, copy=True) for pool in pools()]  # memory of numpy is not given away
    places = [pool.unsafe_buffer_pointer() for pool in given]
    result = append(*given, *tokens(2, 1), TABLE, np.array([[4], [0]]))
    assert [pool.unsafe_buffer_pointer() for pool in result] == places
    assert all(pool.is_deleted() for pool in given)


def test_a_program_for_a_gpu_writes_donated_pools_in_place():
    append = jax.jit(jax_fa4.append_kv, donate_argnums=(0, 1))
    traced = append.trace(*pools(), *tokens(2, 1), TABLE, np.array([[4], [0]]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [f"tf.aliasing_output = {n}" in text for n in (0, 1)] == [True, True]


def test_a_step_of_decoding_sees_its_own_token():
    (k_pages, v_pages), (k, v) = pools(), tokens(2, 1)
    lengths = np.array([4, 0], np.int32)
    k_pages, v_pages = jax_fa4.append_kv(k_pages, v_pages, k, v, TABLE, lengths[:, None])
    q = np.random.default_rng(2).standard_normal((2, 1, 2, 16)).astype(np.float32)
    out = jax_fa4.attention_paged(q, k_pages, v_pages, TABLE, lengths + 1)
    np.testing.assert_allclose(out[1], v[1], rtol=0, atol=1e-6)  # the only key it has


def test_gradients_of_rows_that_are_overwritten_are_zero():
    new, positions = tokens(2, 1), np.array([[4], [0]])

    def loss(pool, rows):
        return (jax_fa4.append_kv(pool, pool, rows, rows, TABLE, positions)[0] * 2).sum()

    pool = jnp.asarray(pools()[0])
    of_pool, of_rows = jax.grad(loss, (0, 1))(pool, jnp.asarray(new[0]))
    assert (of_rows == 2).all()
    np.testing.assert_array_equal(of_pool, written(np.full(pool.shape, 2.0), np.zeros((2, 2, 16)), [0, 1], [4, 0]))
