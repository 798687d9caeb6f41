"""The planner with Blackwell's costs."""

import pytest

from cula_core.delta_rule.config import CHUNK, workspace_bytes
from cula_core.delta_rule.plan import GAIN, CostModel, Plan, plan
from cula_kda_sm100.arch import TARGET

SMS = 148


def planned(tokens: int, heads: int, wanted: str = "auto") -> Plan:
    workspace = workspace_bytes(1, tokens, heads)
    return plan(TARGET, 1, tokens, heads, None, SMS, workspace, wanted)


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
    assert planned(2048, heads, wanted="on").split


def test_a_cut_call_is_predicted_to_be_faster():
    model = CostModel(TARGET.costs, TARGET.v_tiles, 4, SMS)
    for tokens in (16384, 65536):
        chunks = tokens // CHUNK
        whole = model.whole_us(chunks, chunks)
        parts = model.parts_of(chunks, chunks, "auto")
        assert parts > 1 and model.cut_us(chunks, chunks, parts) * GAIN < whole
