"""A spec is held to its reasons and to what it says is missing."""

from __future__ import annotations

import pytest

from cula_core.spec import missing_language
from cula_testing.specs import assert_answer, assert_says_what_to_install


def supports(dim: int = 64) -> str | None:
    return missing_language("cula-x") or (None if dim == 64 else f"K must be 64, not {dim}")


@pytest.mark.parametrize("problem, reason", [({}, None), ({"dim": 3}, "64, not 3")])
def test_the_right_answer_passes(problem, reason):
    assert_answer(supports, problem, reason)


@pytest.mark.parametrize(
    "problem, reason", [({"dim": 3}, None), ({"dim": 3}, "not 4"), ({}, "64, not 3")]
)
def test_another_answer_fails(problem, reason):
    with pytest.raises(AssertionError):
        assert_answer(supports, problem, reason)


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_what_is_missing_is_named_with_the_command(monkeypatch, missing):
    assert_says_what_to_install(monkeypatch, supports, missing, "cula-x")
    for answer in (None, "it is missing"):
        with pytest.raises(AssertionError):
            assert_says_what_to_install(
                monkeypatch, lambda answer=answer: answer, missing, "cula-x"
            )
