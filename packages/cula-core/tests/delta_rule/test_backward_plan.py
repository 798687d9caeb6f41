"""How both walks of a backward pass are spread out: what is cut, into what, and that it fits on the card."""

from __future__ import annotations

import itertools

import pytest

from cula_core.delta_rule.backward.config import V_TILES
from cula_core.delta_rule.backward.plan import Spread, plan
from cula_core.delta_rule.config import CHUNK, MIN_SEGMENT_CHUNKS

SMS = 132


def planned(
    tokens: int, heads: int, batch: int = 1, sequences: int | None = None, **more
) -> Spread:
    return plan(batch, tokens, heads, sequences, SMS, **more)


@pytest.mark.parametrize("heads, tokens", list(itertools.product((1, 2, 4, 8), (8192, 16_384))))
def test_few_long_sequences_are_cut(heads, tokens):
    """Into segments whose walks both fit on the card, as long as there are more CTAs than without."""
    spread = planned(tokens, heads)
    assert spread.cut
    assert spread.segment_tokens % CHUNK == 0
    assert spread.segment_tokens >= MIN_SEGMENT_CHUNKS * CHUNK
    assert spread.segments == -(-tokens // spread.segment_tokens)
    chains = spread.segments * heads * (V_TILES // spread.tiles)
    assert V_TILES * heads < chains and 2 * chains <= SMS


@pytest.mark.parametrize("tokens, heads", [(2048, 1), (16_384, 64), (16_384, 32)])
def test_short_sequences_and_many_heads_stay_whole(tokens, heads):
    spread = planned(tokens, heads)
    assert (spread.cut, spread.segment_tokens, spread.segments) == (False, tokens, 1)


@pytest.mark.parametrize("heads, tiles", [(1, 1), (66, 1), (67, 2)])
def test_a_head_has_two_ctas_while_those_of_a_walk_fit(heads, tiles):
    assert planned(512, heads).tiles == tiles
    assert planned(512, heads, batch=2).tiles == (1 if heads == 1 else 2)


def test_the_caller_decides():
    assert planned(16_384, 2).cut
    assert not planned(16_384, 2, intracard_cp="off").cut
    assert not planned(2048, 2).cut and planned(2048, 2, intracard_cp="on").cut
    given = planned(16_384, 64, batch=2, segment_tokens=4096)
    assert (given.cut, given.segment_tokens, given.segments) == (True, 4096, 8)
    assert not planned(4096, 1, segment_tokens=4096).cut


def test_lengths_of_packed_sequences_decide_where_they_are_known():
    total, count = 16_384, 8
    unknown, known = (planned(total, 4, sequences=count, longest=n) for n in (None, total // count))
    assert unknown.cut and not known.cut
    # However the tokens are packed, no sequence has more segments than are counted.
    assert unknown.segments == total // unknown.segment_tokens + count
    assert known.segments == count


def test_a_chunk_is_a_chunk_however_few_tokens_there_are():
    assert planned(1, 1).segment_tokens == CHUNK
