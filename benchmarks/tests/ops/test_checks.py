"""Errors, limits and spare rows of the checks, and what says that a package is missing."""

import math
import sys
import types

import pytest
import torch

from benchmarks.harness.registry import CheckFailed, Setting
from benchmarks.ops import checks
from benchmarks.ops.installed import missing

PROBLEM = Setting("a problem", {})


def test_the_worst_head_counts():
    """A small head that is wrong by a tenth, beside a large one that is right."""
    want = torch.ones(2, 3, dtype=torch.float64) * torch.tensor([1e6, 1.0, 1.0])
    got = want * torch.tensor([1.0, 1.1, 1.0])
    assert checks.worst_head(got, want, 1) == pytest.approx(0.1)
    assert checks.relative_rmse(got, want) < 1e-6


@pytest.mark.parametrize(("heads", "found"), [(1, [0]), (2, [0, 1]), (64, [0, 32, 63])])
def test_first_middle_and_last_head(heads, found):
    assert checks.checked_heads(heads) == found


@pytest.mark.parametrize("error", [0.02, math.nan, math.inf])
def test_errors_beyond_their_limit_are_refused(error):
    limits = {"output": 0.01, "lse": 0.01}
    checks.require_within(PROBLEM, {"output": 0.01}, limits)
    with pytest.raises(
        CheckFailed, match="^a problem: relative RMSE of the output is .*limit 1e-02"
    ):
        checks.require_within(PROBLEM, {"lse": 0.0, "output": error}, limits)
    with pytest.raises(CheckFailed, match="^a problem: largest error of the lse is"):
        checks.require_within(PROBLEM, {"lse": error}, limits, {"lse": "largest error"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value):
    fine, spoiled = torch.zeros(3), torch.tensor([0.0, value])
    checks.require_finite(PROBLEM, o=fine)
    with pytest.raises(CheckFailed, match="^a problem: final state holds values"):
        checks.require_finite(PROBLEM, o=fine, final_state=spoiled)


def test_rows_that_no_sequence_owns_must_stay():
    pool, indices = torch.arange(4.0), torch.tensor([2, 0], dtype=torch.int32)
    spare = checks.SpareRows(pool, indices)
    pool[[0, 2]] += 1
    spare.require_unchanged(PROBLEM)
    pool[3] += 1
    with pytest.raises(CheckFailed, match="no sequence owns"):
        spare.require_unchanged(PROBLEM)
    checks.SpareRows(pool, None).require_unchanged(PROBLEM)
    checks.SpareRows(None, None).require_unchanged(PROBLEM)


def test_a_missing_package_is_named_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpu_package", None)
    probe = missing("gpu_package")
    assert "gpu_package cannot be imported: import of gpu_package halted" in probe()
    monkeypatch.setitem(sys.modules, "gpu_package", types.ModuleType("gpu_package"))
    assert missing("gpu_package")() is None


@pytest.mark.parametrize("count", [1, 2, 5, 256])
def test_checked_rows_hold_both_ends_and_nothing_twice(count):
    rows = checks.checked_rows(count)
    assert rows[0] == 0 and rows[-1] == count - 1
    assert len(rows) == len(set(rows)) and all(0 <= r < count for r in rows)
    assert len(rows) >= min(count, checks.CHECKED_ROWS)
