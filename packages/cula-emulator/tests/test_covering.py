"""Covering sets: every pair that can be is there, nothing that cannot, and far less than everything."""

from __future__ import annotations

import itertools
import math

from cula_emulator.covering import covering_cases

FACTORS = {
    "dtype": ("a", "b", "c"),
    "packed": (False, True),
    "index": (None, 32, 64),
    "tiles": (1, 2),
}


def possible(case: dict) -> bool:
    return case["packed"] or case["index"] is None


def pairs(cases: list[dict]) -> set[tuple]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_possible_pair_meets():
    product = [dict(zip(FACTORS, values)) for values in itertools.product(*FACTORS.values())]
    cases = covering_cases(FACTORS, possible)
    assert all(map(possible, cases))
    assert pairs(cases) == pairs(list(filter(possible, product)))
    assert len(cases) < math.prod(map(len, FACTORS.values())) / 2


def test_every_possible_value_occurs():
    cases = covering_cases(FACTORS, possible, strength=1)
    assert all(map(possible, cases)) and len(cases) == 3
    assert {value for case in cases for value in case.items()} == {
        (name, value) for name, values in FACTORS.items() for value in values
    }


def test_the_cases_are_always_the_same():
    assert covering_cases(FACTORS, possible) == covering_cases(FACTORS, possible)


def test_given_cases_come_first_and_what_they_cover_is_not_covered_again():
    without = covering_cases(FACTORS, possible)
    first = without[: len(without) // 2]
    cases = covering_cases(FACTORS, possible, first)
    assert cases[: len(first)] == first and pairs(cases) == pairs(without)
    assert covering_cases(FACTORS, possible, without) == without
