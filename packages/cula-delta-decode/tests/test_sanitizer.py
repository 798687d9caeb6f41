"""The problems for compute-sanitizer are right on the CPU, and notice what is wrong."""

from __future__ import annotations

import delta_sanitizer as sanitizer
import pytest
import torch

from cula_delta_decode import delta_rule_decode


@pytest.mark.parametrize("problem", sanitizer.PROBLEMS, ids=lambda p: p.name)
def test_problems_are_right(problem):
    errors = problem.run(problem.case, torch.device("cpu"))
    assert "state" in errors and max(errors.values()) < sanitizer.LIMIT


def test_a_wrong_number_is_counted(monkeypatch, capsys):
    def louder(*tokens, out, **options):
        delta_rule_decode(*tokens, **options, out=out)
        out *= 1.01

    monkeypatch.setattr(sanitizer, "delta_rule_decode", louder)
    count = sum(p.run is not sanitizer.recurrent for p in sanitizer.PROBLEMS[::3])
    assert sanitizer.run_here(0, 3, "cpu") == count
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(sanitizer.PROBLEMS[::3])
    assert sum(" WRONG " in line for line in printed) == count
