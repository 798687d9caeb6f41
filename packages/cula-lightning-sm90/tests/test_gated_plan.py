"""How calls of the gated delta rule are spread over multiprocessors."""

from __future__ import annotations

import pytest
import torch

from cula_core.delta_rule.config import MIN_SEGMENT_CHUNKS
from cula_lightning_sm90.gated import launch
from cula_lightning_sm90.gated.call import Call
from cula_lightning_sm90.gated.config import (
    PLACES,
    UNCUT,
    V_TILES,
    PrepareConfig,
    RecurrenceConfig,
)
from cula_lightning_sm90.gated.plan import Plan, Walk, plan

LENGTHS = (1, 2, 15, 16, 31, 32, 33, 64, 100, 256, 1024, 2048)
CHAINS = (1, 2, 7, 16, 64, 100, 600)


def assert_walks(walk: Walk, longest: int, total: int) -> None:
    """Every step has a machine, every machine a step, and none less than a whole chain."""
    assert walk.machines * walk.share >= total > (walk.machines - 1) * walk.share
    assert walk.share >= min(longest, total)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("choice", ["auto", "on", "off"])
@pytest.mark.parametrize("count", [2, 20, 78, 132, 144])
@pytest.mark.parametrize("longest", LENGTHS)
def test_plans_fit_the_card(longest, count, choice, group):
    for chains in CHAINS:
        heads = chains * group
        total = longest * heads
        found = plan(longest, longest, total, heads, group, count, choice)
        first, second = found.first, found.second
        together = first.together
        assert heads % together == 0 and (group % together == 0 or together % group == 0)
        total //= first.together
        # A card that has no multiprocessor left beside the smallest walk runs one kernel after the other.
        least = first.columns // first.tiles
        beside = found.prepare_ctas if second is None else 0
        assert first.ctas + beside <= max(count, least + 1)
        assert 1 <= found.prepare_ctas <= count and found.ahead >= 1
        chain = longest if second is None else found.segment
        assert_walks(first, chain, total)
        if second is None:
            assert found.segment == UNCUT and first.columns == V_TILES and found.flags[1] == 0
        else:
            assert MIN_SEGMENT_CHUNKS <= found.segment < longest and first.columns == PLACES
            assert_walks(second, chain, total)
            assert second.together == first.together
            assert second.ctas <= max(count, V_TILES // second.tiles)
        if choice != "auto":
            cut = choice == "on" and longest >= 2 * MIN_SEGMENT_CHUNKS
            assert (second is not None) == cut


@pytest.mark.parametrize("heads", [1, 6, 64])
@pytest.mark.parametrize("count", [78, 132])
def test_a_given_length_of_segments_is_taken(count, heads):
    for longest in (17, 64, 1024):
        found = plan(longest, longest, 5 * longest * heads, heads, 1, count, "off", 16)
        assert found.segment == 16 and found.second is not None
        assert_walks(found.first, 16, 5 * longest * heads // found.first.together)
        assert_walks(found.second, 16, 5 * longest * heads // found.second.together)


def test_one_multiprocessor_is_enough():
    found = plan(3, 3, 12, 4, 1, 1)
    assert found.first.machines == 1 and found.prepare_ctas == 1


@pytest.mark.parametrize(
    "longest, chains, tiles, machines",
    [
        (16, 64, 2, (64, 64)),
        (64, 64, 2, (64, 64)),
        (256, 64, 2, (64, 64)),
        (256, 128, 2, (80, 80)),
        (32, 32, 1, (32, 32)),
        (128, 32, 1, (32, 32)),
    ],
)
def test_what_was_the_fastest_on_an_h200(longest, chains, tiles, machines):
    found = plan(longest, longest, longest * chains, chains, 1, 132)
    assert found.second is None and found.first.tiles == tiles
    assert machines[0] <= found.first.seats <= machines[1]


def test_short_chains_take_more_machines():
    """Where 20 sequences, of 15 steps on average, are packed, whether or not the longest one is known."""
    unknown, known = (plan(longest, 15, 9472, 32, 1, 132).first.seats for longest in (15, 59))
    assert unknown == known >= 84


@pytest.mark.parametrize(
    "longest, chains", [(1024, 8), (512, 8), (256, 8), (128, 4), (256, 16), (128, 16)]
)
def test_few_long_chains_are_cut(longest, chains):
    """Where that was faster on an H200."""
    found = plan(longest, longest, longest * chains, chains, 1, 132)
    assert isinstance(found, Plan) and found.second is not None
    assert found.second.seats >= 4 * chains


@pytest.mark.parametrize(
    "longest, chains, heads, group, together",
    [
        (130, 256, 64, 4, 4),
        (128, 32, 32, 2, 4),
        (256, 64, 64, 1, 4),
        (1024, 8, 8, 8, 4),
        (15, 640, 32, 1, 4),
        (32, 512, 64, 1, 4),
        (32, 90, 9, 3, 3),
        (64, 35, 7, 1, 1),
    ],
)
def test_neighbouring_heads_are_walked_in_step(longest, chains, heads, group, together):
    found = plan(longest, longest, longest * chains, heads, group, 132)
    assert found.first.together == together
    assert found.first.seats >= min(chains, 60)


def test_calls_that_are_too_large_go_by_heads():
    """Or are refused, before any memory is asked for, where one head has too many chunks."""
    launched = []

    def launch_meta(heads: int, heads_k: int, tokens: int = 1 << 20) -> None:
        x, k = (
            torch.empty(1, tokens, n, 128, dtype=torch.bfloat16, device="meta")
            for n in (heads, heads_k)
        )
        values = dict.fromkeys(Call._fields) | {
            "q": k, "k": k, "v": x, "out": x, "scale": 1.0, "softplus_beta": 1.0, "softplus_threshold": 20.0,
            "intracard_cp": "auto", "checkpoint_every": 0, "segment_tokens": 0,
        }  # fmt: skip
        launch.run(
            Call(**values), multiprocessors=132,
            kernels=lambda config: lambda q, k, *_: launched.append((q.shape[2], k.shape[2], type(config))),
        )  # fmt: skip

    with pytest.raises(
        ValueError, match=r"q, v: expected less than 762,600 chunks .*got 1,048,576"
    ):
        launch_meta(1, 1, 1 << 26)
    assert not launched
    kernels = PrepareConfig, RecurrenceConfig
    for heads, heads_k, groups in ((64, 16, 2), (96, 6, 3), (32, 32, 1), (64, 1, 2)):
        launch_meta(heads, heads_k)
        own = max(heads_k // groups, 1)
        assert launched == [(own, own, kind) for kind in kernels] * groups
        launched.clear()
