"""Block bounds against masks written out key by key."""

import itertools

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL (pip install 'jax-fa4[cuda13]')")

from jax_fa4.kernels.core.bounds import Bounds, SegmentBlocks
from jax_fa4.kernels.core.seqlen import Sequence

LENGTHS = (1, 2, 5, 8, 9)
WINDOWS = (0, 1, 3, 2**31 - 1)
EDGES = [(left, right) for left in (None, *WINDOWS) for right in (None, *WINDOWS)]
TILE_M, TILE_N = 4, 3


def sees(seq, left, right, query, key):
    """The mask's definition, on the windows as the caller gave them."""
    on_left = left is None or key >= query + seq.diagonal - left
    on_right = right is None or key <= query + seq.diagonal + right
    return on_left and on_right and 0 <= key < seq.kv_len


def tiles(left, right, shifts=(0,)):
    """(seq, rows of a tile, its visit) for every tile of sequences of all lengths."""
    bounds = Bounds(tile_m=TILE_M, tile_n=TILE_N, has_left=left is not None, has_right=right is not None)
    for q_len, kv_len, shift in itertools.product(LENGTHS, (0, *LENGTHS), shifts):
        seq = Sequence.aligned(q_len, kv_len, kv_len - q_len + shift, left, right)
        for m_block in range(-(-q_len // TILE_M)):
            rows = range(m_block * TILE_M, min((m_block + 1) * TILE_M, q_len))
            yield seq, rows, bounds.visit(m_block, seq)


def blocks(visit):
    """n_block -> (right, left): the edges that may cut it, in the order of visiting."""
    if visit.num_n_blocks <= 0:
        return {}
    found = {visit.first: (True, True)}
    for span in visit.spans:
        found |= {span.first - i: (span.right, span.left) for i in range(span.num_n_blocks)}
    return found


@pytest.mark.parametrize(("left", "right"), EDGES)
def test_every_visible_key_is_in_a_visited_block(left, right):
    for seq, rows, visit in tiles(left, right, shifts=(0, 2, -3)):
        needed = {key // TILE_N for row in rows for key in range(seq.kv_len) if sees(seq, left, right, row, key)}
        assert needed <= set(blocks(visit)), (seq, rows)


@pytest.mark.parametrize(("left", "right"), EDGES)
def test_blocks_descend_without_a_gap_and_as_many_as_announced(left, right):
    for seq, rows, visit in tiles(left, right, shifts=(0, 2, -3)):
        order = list(blocks(visit))
        assert order == list(range(visit.first, visit.first - visit.num_n_blocks, -1)), (seq, rows)
        assert all(block >= 0 for block in order)


@pytest.mark.parametrize(("left", "right"), EDGES)
def test_the_outermost_blocks_hold_a_visible_key(left, right):
    for seq, rows, visit in tiles(left, right):
        for block in list(blocks(visit))[:1] + list(blocks(visit))[-1:]:
            keys = range(block * TILE_N, (block + 1) * TILE_N)
            assert any(sees(seq, left, right, row, key) for row in rows for key in keys), (seq, rows, block)


@pytest.mark.parametrize(("left", "right"), EDGES)
def test_a_block_is_cut_only_by_the_edges_of_its_span(left, right):
    for seq, rows, visit in tiles(left, right, shifts=(0, 2, -3)):
        for block, (cut_right, cut_left) in blocks(visit).items():
            for row, key in itertools.product(rows, range(block * TILE_N, (block + 1) * TILE_N)):
                assert cut_right or key < seq.right_end(row), (seq, row, key)
                assert cut_left or key >= seq.left_start(row), (seq, row, key)


@pytest.mark.parametrize("left", WINDOWS)
@pytest.mark.parametrize("right", WINDOWS)
def test_a_cut_window_shows_the_same_keys_and_its_sums_stay_in_32_bits(left, right):
    for seq, rows, _ in tiles(left, right, shifts=(0, 2, -3)):
        for row, key in itertools.product(rows, range(seq.kv_len)):
            inside = seq.left_start(row) <= key < seq.right_end(row)
            assert inside == sees(seq, left, right, row, key)
            assert abs(row + seq.diagonal + seq.window_right + 1) < 2**31


@pytest.mark.parametrize(("left", "right"), EDGES)
def test_a_tile_beyond_the_last_query_visits_nothing(left, right):
    bounds = Bounds(tile_m=4, tile_n=3, has_left=left is not None, has_right=right is not None, has_padding=True)
    for q_len, m_block in itertools.product((0, 1, 4, 5), range(4)):
        seq = Sequence.aligned(q_len, 20, 20 - q_len, left, right)
        assert (bounds.visit(m_block, seq).num_n_blocks > 0) == (m_block * 4 < q_len)


@pytest.mark.parametrize(("left", "right"), EDGES)
@pytest.mark.parametrize("within", [(0, 9), (1, 2), (2, 2), (3, 1), (0, 0)])
def test_a_visit_stays_within_the_blocks_it_is_given(left, right, within):
    bounds = Bounds(tile_m=4, tile_n=3, has_left=left is not None, has_right=right is not None)
    for q_len, kv_len in itertools.product((1, 5, 9), (0, 1, 8, 9)):
        seq = Sequence.aligned(q_len, kv_len, kv_len - q_len, left, right)
        for m_block in range(-(-q_len // 4)):
            every, some = (blocks(bounds.visit(m_block, seq, w)) for w in (None, within))
            assert list(some) == [block for block in every if within[0] <= block < within[1]]
            assert all(every[block] <= some[block] for block in some if block != max(some))


@pytest.mark.parametrize(("left", "right"), EDGES)
@pytest.mark.parametrize("within", [(0, 9, 0, 9), (0, 9, 1, 2), (1, 3, 0, 2), (1, 3, 2, 2), (0, 2, 2, 3), (2, 2, 0, 9)])
def test_of_a_call_with_segments_only_blocks_of_one_are_not_masked(left, right, within):
    edges = {"has_left": left is not None, "has_right": right is not None}
    plain = Bounds(tile_m=4, tile_n=3, **edges)
    bounds = Bounds(tile_m=4, tile_n=3, has_segments=True, **edges)
    for q_len, kv_len in itertools.product((1, 5, 9), (0, 1, 8, 9)):
        seq = Sequence.aligned(q_len, kv_len, kv_len - q_len, left, right)
        for m_block in range(-(-q_len // 4)):
            visit = bounds.visit(m_block, seq, SegmentBlocks(*within))
            cut, found = blocks(plain.visit(m_block, seq, within[:2])), blocks(visit)
            assert list(found) == list(cut)
            clean = {span.first - i for span in visit.spans if not span.segments for i in range(span.num_n_blocks)}
            uncut = {block for block in list(cut)[1:] if cut[block] == (False, False)}
            assert clean == uncut & set(range(*within[2:]))
            assert all(cut[block] <= found[block] for block in cut)


@pytest.mark.parametrize(("left", "right"), EDGES)
def test_a_visit_that_is_never_empty_takes_another_block_in_place_of_none(left, right):
    empty = 0
    for seq, rows, visit in tiles(left, right, shifts=(0, 20, -20)):
        kept = visit.never_empty(99)
        if visit.num_n_blocks:
            assert kept == visit, (seq, rows)
        else:
            assert list(blocks(kept)) == [99], (seq, rows)
            empty += 1
    assert empty


def test_a_kernel_without_edges_masks_only_the_first_block():
    bounds = Bounds(tile_m=128, tile_n=128, has_left=False, has_right=False)
    visit = bounds.visit(0, Sequence.bottom_right(128, 1000, None, None))
    assert (visit.first, visit.num_n_blocks) == (7, 8)
    assert [(span.first, span.num_n_blocks, span.right, span.left) for span in visit.spans] == [(6, 7, False, False)]
