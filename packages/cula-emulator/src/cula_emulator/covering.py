"""Few test cases that try every pair of options together, where a full product would take too long to compile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence


def covering_cases(
    factors: Mapping[str, Sequence], possible: Callable[[dict], bool], first: Sequence[dict] = ()
) -> list[dict]:
    """Few cases in which every possible pair of two factors' values meets; always the same ones.

    factors: the values of each, by name. possible: whether a case, a value per name, is one that can be. first: cases
    that are there in any event; the others cover the pairs that these leave.
    """
    generator = random.Random(0)

    def draw(fixed: dict) -> dict | None:
        for _ in range(300):
            case = {name: generator.choice(values) for name, values in factors.items()} | fixed
            if possible(case):
                return case
        return None

    def pairs(case: dict) -> set[tuple]:
        return set(itertools.combinations([(name, case[name]) for name in factors], 2))

    missing: dict[tuple, None] = {}
    for one, other in itertools.combinations(factors, 2):
        for values in itertools.product(factors[one], factors[other]):
            if draw({one: values[0], other: values[1]}):
                missing[(one, values[0]), (other, values[1])] = None
    cases = list(first)
    for case in cases:
        for pair in pairs(case):
            missing.pop(pair, None)
    while missing:
        fixed = dict(next(iter(missing)))
        drawn = [case for case in (draw(fixed) for _ in range(400)) if case]
        best = max(drawn, key=lambda case: sum(pair in missing for pair in pairs(case)))
        for pair in pairs(best):
            missing.pop(pair, None)
        cases.append(best)
    return cases
