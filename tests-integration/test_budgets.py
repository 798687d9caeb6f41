"""The table of budgets: what is added up, what is said to be over, and when nothing is printed."""

from __future__ import annotations

import json

import pytest

import noxfile
from tools.budgets import VARIABLE, Budgets


def test_every_folder_of_tests_has_a_budget() -> None:
    tested = {*noxfile.SHARED_TESTS, *map(noxfile._tests, noxfile.TESTED)}
    assert set(noxfile.BUDGETS) == tested
    assert all(cold >= warm > 0 for cold, warm in noxfile.BUDGETS.values())


def test_a_folder_over_its_budget_is_named() -> None:
    budgets = Budgets({"a/tests": 10.0, "b/tests": 10.0}, workers=2)
    budgets.seconds.update({"a/tests": 19.0, "b/tests": 21.0})
    first, second = budgets.lines()
    assert first.split()[:2] == ["a/tests", "10"] and "over" not in first
    assert second.split()[:2] == ["b/tests", "10"] and second.endswith("over its budget")


@pytest.mark.parametrize("options, printed", [((), True), (("-k", "slow"), False)])
def test_a_whole_run_is_summed_up(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple, printed: bool
) -> None:
    for folder in ("a", "b"):
        (pytester.path / folder).mkdir()
    test = "import time\ndef test_slow():\n    time.sleep(0.3)\n"
    (pytester.path / "a" / "test_a.py").write_text(test)
    (pytester.path / "b" / "test_b.py").write_text("def test_quick():\n    pass\n")
    monkeypatch.setenv(VARIABLE, json.dumps({"a": 0.2, "b": 0.2}))
    # hypothesis would be imported anew by every inner run.
    plugins = ("-p", "tools.budgets", "-p", "no:hypothesispytest")
    result = pytester.runpytest_inprocess(*plugins, *options, "a", "b")
    text = result.stdout.str()
    assert ("of    0 s  over its budget" in text) == printed
    assert text.count("over its budget") == printed
