"""Few test cases that try every option, or every pair of options, where all combinations would take too long."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence


def covering_cases(
    factors: Mapping[str, Sequence],
    possible: Callable[[dict], bool],
    first: Sequence[dict] = (),
    strength: int = 2,
) -> list[dict]:
    """Few cases in which every possible pair of two factors' values meets; always the same ones.

    factors: the values of each, by name. possible: whether a case, a value per name, is one that can be. first: cases
    that are there in any event; the others cover the pairs that these leave. strength: of how many factors every
    combination of values occurs; 2 are pairs, 1 the values alone.
    """
    generator = random.Random(0)

    def draw(fixed: dict) -> dict | None:
        for _ in range(300):
            case = {name: generator.choice(values) for name, values in factors.items()} | fixed
            if possible(case):
                return case
        return None

    def combinations(case: dict) -> set[tuple]:
        return set(itertools.combinations([(name, case[name]) for name in factors], strength))

    missing: dict[tuple, None] = {}
    for names in itertools.combinations(factors, strength):
        for values in itertools.product(*(factors[name] for name in names)):
            if draw(dict(zip(names, values))):
                missing[tuple(zip(names, values))] = None
    cases = list(first)
    for case in cases:
        for found in combinations(case):
            missing.pop(found, None)
    while missing:
        fixed = dict(next(iter(missing)))
        drawn = [case for case in (draw(fixed) for _ in range(400)) if case]
        best = max(drawn, key=lambda case: sum(c in missing for c in combinations(case)))
        for found in combinations(best):
            missing.pop(found, None)
        cases.append(best)
    return cases
