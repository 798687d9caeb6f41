"""How programs for compute-sanitizer run their problems; needs no pytest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable


def run_checks(checks: Iterable[tuple[str, Callable[[], str]]]) -> int:
    """Runs named checks, prints a line with the name and what each returns, and returns how many are wrong.

    A check is wrong if an assertion fails in it.
    """
    wrong = 0
    for name, check in checks:
        try:
            result = check()
        except AssertionError as error:
            wrong += 1
            result = f"WRONG {error}"
        sys.stdout.write(f"{name} {result}\n")
        sys.stdout.flush()
    return wrong
