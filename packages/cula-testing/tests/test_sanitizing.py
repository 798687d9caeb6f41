"""Programs for compute-sanitizer print a line per problem and count what is wrong."""

from __future__ import annotations

import pytest

from cula_testing.sanitizing import run_checks


def wrong() -> str:
    raise AssertionError("off by 3")


def broken() -> str:
    raise RuntimeError("launch failed")


def test_every_problem_has_a_line(capsys):
    assert run_checks([("one", lambda: "right"), ("two", wrong), ("three", lambda: "1e-3")]) == 1
    assert capsys.readouterr().out == "one right\ntwo WRONG off by 3\nthree 1e-3\n"


def test_what_is_no_failed_assertion_ends_the_program():
    with pytest.raises(RuntimeError, match="launch failed"):
        run_checks([("one", broken)])
