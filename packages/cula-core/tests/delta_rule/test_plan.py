"""Plans: what is cut, into what, and that nothing but shapes decides."""

from __future__ import annotations

import itertools

import pytest

from cula_cp_sm90 import config
from cula_cp_sm90.config import BLOCK_BYTES, CHUNK, MIN_SEGMENT_CHUNKS, plan, workspace_bytes

SMS = 132


def planned(tokens, heads, batch=1, sequences=None, workspace=None, wanted="auto", longest=None):
    if workspace is None:
        workspace = workspace_bytes(batch, tokens, heads, sequences)
    return plan(batch, tokens, heads, sequences, SMS, workspace, wanted, longest)


@pytest.mark.parametrize(
    ("tokens", "heads", "parts"),
    [(1024, 4, 1), (2048, 8, 1), (4096, 4, 4), (8192, 8, 8), (65536, 8, 8), (65536, 4, 16), (8192, 16, 4)]
    + [(16384, 32, 1), (65536, 32, 1), (16384, 64, 1), (131072, 64, 1)],
)  # fmt: skip
def test_long_sequences_of_few_heads_are_cut(tokens, heads, parts):
    """As was measured to be the best choice on an H200."""
    spread = planned(tokens, heads)
    assert (-(-tokens // spread.segment_tokens) if spread.split else 1) == parts


@pytest.mark.parametrize(
    ("heads", "tokens"), list(itertools.product((1, 4, 16, 64), (2048, 5000, 65536)))
)
def test_segments_are_whole_chunks_and_long_enough(heads, tokens):
    spread = planned(tokens, heads, wanted=True)
    assert spread.split
    assert spread.segment_tokens % CHUNK == 0
    assert spread.segment_tokens >= MIN_SEGMENT_CHUNKS * CHUNK
    assert spread.segments == -(-tokens // spread.segment_tokens) >= 2


@pytest.mark.parametrize("wanted", ["auto", True, False])
def test_short_sequences_stay_whole(wanted):
    assert not planned(2 * MIN_SEGMENT_CHUNKS * CHUNK - CHUNK, 1, wanted=wanted).split
    assert not planned(100_000, 4, wanted=False).split


def test_lengths_of_packed_sequences_decide_where_they_are_known():
    total, count = 32_768, 8
    unknown, known = (planned(total, 8, sequences=count, longest=n) for n in (None, total // count))
    assert unknown.split
    assert not known.split
    one_long = planned(total + 1024, 8, sequences=2, longest=total)
    assert one_long.split
    # However the tokens are packed, no sequence has more segments than are counted.
    assert one_long.segments == (total + 1024) // one_long.segment_tokens + 2


@pytest.mark.parametrize("chunks", [1, 3, 7, 64])
def test_a_small_workspace_means_pieces(chunks):
    heads, tokens = 4, 64 * CHUNK
    spread = planned(tokens, heads, workspace=chunks * heads * BLOCK_BYTES + 100)
    assert spread.piece_slots == chunks
    assert spread.pieces == -(-64 // chunks)
    if chunks < 64:
        assert not spread.split


def test_one_launch_takes_no_more_chunks_than_a_grid_has():
    tokens = (config.MAX_GRID_Z + 10) * CHUNK
    spread = planned(tokens, 1)
    assert spread.pieces == 2
    assert spread.piece_slots <= config.MAX_GRID_Z


@pytest.mark.parametrize(
    ("batch", "heads", "tiles"), [(1, 64, 1), (1, 66, 1), (1, 67, 2), (2, 64, 2), (2, 33, 1)]
)
def test_a_head_has_two_ctas_while_all_fit_on_the_card(batch, heads, tiles):
    assert planned(512, heads, batch).tiles == tiles


def test_the_workspace_is_a_block_per_chunk_and_head():
    assert workspace_bytes(2, 100, 3) == 2 * 2 * 3 * BLOCK_BYTES
    # Packed: any lengths that make up the tokens have at most T // 64 + N chunks.
    assert workspace_bytes(1, 200, 1, sequences=5) == (3 + 5) * BLOCK_BYTES
    assert BLOCK_BYTES == 2 * (3 * 64 * 128 + 2 * (64 * 64 - 6 * 16 * 16)) + 4 * 128


def test_more_parts_shorten_the_chain_and_lengthen_the_merge():
    costs = [config.cut_us(1024, 1024, parts, 4, SMS) for parts in (2, 4, 8, 16)]
    assert costs == sorted(costs, reverse=True)
    assert config.whole_us(1024, 1024, 4, SMS) > costs[-1]
    assert config.cut_us(32, 32, 2, 4, SMS) > config.whole_us(32, 32, 4, SMS)
