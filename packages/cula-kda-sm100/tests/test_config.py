"""Plans for Blackwell: the planner is shared and tested where it has its master; here are its numbers."""

from __future__ import annotations

import pytest

from cula_kda_sm100 import arch, config
from cula_kda_sm100.config import BLOCK_BYTES, CHUNK, HEAD_DIM, RecurrenceConfig, plan

SMS = 148


def planned(tokens: int, heads: int, batch: int = 1, wanted: str | bool = "auto") -> config.Plan:
    workspace = config.workspace_bytes(batch, tokens, heads)
    return plan(batch, tokens, heads, None, SMS, workspace, wanted)


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 64), (2, 64), (4, 96)])
def test_a_cta_has_all_columns(batch, heads):
    assert planned(512, heads, batch).tiles == 1


@pytest.mark.parametrize("tokens, heads", [(65536, 4), (65536, 8), (131072, 16)])
def test_long_sequences_of_few_heads_are_cut(tokens, heads):
    spread = planned(tokens, heads)
    assert spread.split
    # As many segments as there are multiprocessors for them, or as many as there may be.
    assert spread.segments * heads <= max(SMS, 2 * heads)
    assert spread.segment_tokens % CHUNK == 0


@pytest.mark.parametrize("tokens, heads", [(1024, 4), (16384, 64), (65536, 128)])
def test_short_ones_and_many_heads_stay_whole(tokens, heads):
    assert not planned(tokens, heads).split
    assert planned(2048, heads, wanted=True).split


def test_a_cut_call_is_predicted_to_be_faster():
    for tokens in (16384, 65536):
        chunks = tokens // CHUNK
        whole = config.whole_us(chunks, chunks, 4, SMS)
        parts = config.parts_of(chunks, chunks, 4, SMS, "auto")
        assert parts > 1 and config.cut_us(chunks, chunks, parts, 4, SMS) * config.GAIN < whole


def test_a_stage_is_a_block_and_v():
    forward, scan = RecurrenceConfig("bfloat16"), RecurrenceConfig("bfloat16", scan=True)
    assert forward.stage_bytes == BLOCK_BYTES + 2 * CHUNK * HEAD_DIM
    # Without qg and the triangle of Aqk.
    assert forward.stage_bytes - scan.stage_bytes == 2 * (CHUNK * HEAD_DIM + config.TRIANGLE)
    assert (forward.stages, scan.stages) == (arch.STAGES, arch.SCAN_STAGES)
