"""The planner with Hopper's costs."""

import pytest

from cula_core.delta_rule.config import workspace_bytes
from cula_core.delta_rule.plan import plan
from cula_cp_sm90.arch import TARGET

SMS = 132


@pytest.mark.parametrize(
    ("tokens", "heads", "parts"),
    [(1024, 4, 1), (2048, 8, 1), (4096, 4, 4), (8192, 8, 8), (65536, 8, 8), (65536, 4, 16), (8192, 16, 4)]
    + [(16384, 32, 1), (65536, 32, 1), (16384, 64, 1), (131072, 64, 1)],
)  # fmt: skip
def test_long_sequences_of_few_heads_are_cut(tokens, heads, parts):
    """As was measured to be the best choice on an H200."""
    workspace = workspace_bytes(1, tokens, heads)
    spread = plan(TARGET, 1, tokens, heads, None, SMS, workspace)
    assert (-(-tokens // spread.segment_tokens) if spread.split else 1) == parts


@pytest.mark.parametrize(
    ("tokens", "heads", "maps", "parts"),
    [
        (65536, 64, (2, 1), 1),  # a scan of the whole slice costs less than cutting it
        (131072, 16, (0, 0), 5),
        (131072, 16, (2, 1), 4),  # as many scans at once as there are multiprocessors
        (131072, 16, (1, 0), 4),
    ],
)
def test_maps_for_other_cards_count(tokens, heads, maps, parts):
    workspace = workspace_bytes(1, tokens, heads)
    spread = plan(TARGET, 1, tokens, heads, None, SMS, workspace, maps=maps)
    assert (-(-tokens // spread.segment_tokens) if spread.split else 1) == parts
