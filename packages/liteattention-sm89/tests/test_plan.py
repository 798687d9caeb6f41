"""How calls are spread out: every row and key belongs to one CTA, and workspaces hold every packing of their tokens."""

from __future__ import annotations

import itertools

import pytest

from liteattention_sm89.config import BLOCK_M, HEAD_DIMS, KEY_GROUP, QUERY_GROUP, Problem
from liteattention_sm89.plan import places, plan_backward, plan_forward, plan_quantize

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 300)


@pytest.mark.parametrize("period", [KEY_GROUP, BLOCK_M])
def test_places_hold_every_packing(period):
    for lengths in itertools.product(LENGTHS, repeat=3):
        tokens, most = sum(lengths), places(sum(lengths), len(lengths), period)
        first = end = 0
        for number, length in enumerate(lengths):
            # Where a kernel puts a sequence: behind the last whole group, and one further for each before it.
            begin = first // period + number
            assert begin + -(-length // period) <= most
            assert begin >= end
            end, first = begin + -(-length // period), first + length
        assert first == tokens
    assert [places(n, None, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_the_forward_pass_has_a_cta_for_each_query_tile():
    problem = Problem("bfloat16", 128)
    for longest, tiles in ((0, 0), (1, 1), (128, 1), (129, 2)):
        plan = plan_forward(problem, "sm_89", 3, None, longest)
        assert (plan.query_tiles, plan.sequences) == (tiles, 3)
    assert plan_forward(problem, "sm_89", 1, 5, 200).sequences == 5
    assert plan.config.problem == problem


def test_rounding_has_a_scale_for_each_group():
    queries = plan_quantize(False, 2, 130, None, 130)
    assert (queries.tiles, queries.sequences, queries.groups) == (3, 2, 2 * BLOCK_M // QUERY_GROUP)
    keys = plan_quantize(True, 1, 130, 2, 129)
    assert (keys.tiles, keys.sequences, keys.groups) == (3, 2, 2 + 2)
    assert plan_quantize(True, 1, 0, None, 0).tiles == 0


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_backward_pass(dim):
    problem = Problem("bfloat16", dim, causal=True, skip=True, packed=True)
    for deterministic in (False, True):
        plan = plan_backward(problem, "sm_90a", 1, 500, 3, 300, 200, deterministic)
        main = plan.main
        assert main.role == ("keys" if deterministic else "both")
        assert (plan.queries is not None) == deterministic
        assert plan.ends.problem == problem.plain
        assert (plan.ends.rows, plan.ends.width) == (main.rows, main.width)
        assert plan.slots * main.rows == (500 // BLOCK_M + 3) * BLOCK_M
        # Sums are needed of whole query tiles, whose last rows do not exist.
        assert plan.row_tiles * main.rows == 3 * BLOCK_M
        assert (plan.query_tiles - 1) * main.rows < 300 <= plan.query_tiles * main.rows
        assert (plan.key_tiles - 1) * main.keys < 200 <= plan.key_tiles * main.keys
        assert plan.mask_tiles == (3, -(-200 // problem.block_n)) and plan.sequences == 3
