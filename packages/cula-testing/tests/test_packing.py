"""Lengths and rows of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cula_testing.packing import Slots, spread


@dataclass(frozen=True)
class Problem(Slots):
    lengths: tuple[int, ...]
    slots: tuple[int, ...] | None = None


def test_a_sequence_without_a_slot_has_the_row_of_its_number():
    assert Problem((5, 0, 7)).rows == (0, 1, 2) and Problem((5, 0, 7)).padding == ()


def test_negative_slots_are_padding():
    problem = Problem((5, 0, 7, 1), (3, -1, 0, -9))
    assert problem.rows == (3, -1, 0, -9) and problem.padding == (1, 3)


@pytest.mark.parametrize("seed", range(5))
def test_spread_lengths_sum_to_the_tokens(seed):
    lengths = spread(seed, 300, 3000)
    assert len(lengths) == 300 and sum(lengths) == 3000 and min(lengths) == 0 and 1 in lengths
    assert lengths == spread(seed, 300, 3000) != spread(seed + 1, 300, 3000)
