"""FLA's backward pass where FLA refuses it."""

import dataclasses
import sys
import types

import pytest

from benchmarks.ops.lightning import lifted
from benchmarks.ops.lightning.problem import setting
from benchmarks.ops.lightning.providers import FLA


@pytest.mark.parametrize(
    "refused, reason",
    [
        (None, "FLA runs its backward here"),
        ("needs Triton 3.7.1 or newer", None),
        ("another reason", "another reason"),
    ],
)
def test_a_refusal_is_lifted_only_if_it_is_for_triton(refused, reason):
    forward, trained = (
        dataclasses.replace(FLA, supports=lambda _, told=told: told) for told in (None, refused)
    )
    assert lifted.supports(forward, trained, setting(512)) == reason


def test_what_the_forward_pass_lacks_comes_first():
    forward, trained = (
        dataclasses.replace(FLA, supports=lambda _, told=told: told)
        for told in ("not installed", "needs Triton 3.7.1 or newer")
    )
    assert lifted.supports(forward, trained, setting(512)) == "not installed"


def test_the_refusal_is_lifted_during_the_call_alone(monkeypatch):
    chunk_o = types.SimpleNamespace(TRITON_ABOVE_3_7_1=False)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    common = types.ModuleType("fla.ops.common")
    common.chunk_o = chunk_o
    monkeypatch.setitem(sys.modules, "fla.ops.common", common)
    call = lifted.lifted(lambda: (chunk_o.TRITON_ABOVE_3_7_1,))
    assert call() == (True,) and not chunk_o.TRITON_ABOVE_3_7_1
