"""The order of slots: in settings, in inputs, and a multiplication of the slots that is checked."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.delta import delta_decode_slots, providers
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.problem import setting

SMALL = {"heads": 2, "heads_v": 4}


def negate_as(peers, wrong: bool):
    def negate(pool, slots):
        pool[slots.long()[: -1 if wrong else None]] *= -1

    peers.module("benchmarks.ops.negate_slots", negate=negate)


def test_every_setting_is_there_in_both_orders():
    names = [s.name for s in delta_decode_slots.settings(False)]
    ordered = {name for name in names if name.endswith("-ordered")}
    assert len(set(names)) == len(names) == 72 and len(ordered) == 36
    assert {f"{name}-ordered" for name in names if name not in ordered} == ordered
    assert {s.name for s in delta_decode_slots.settings(True)} < set(names)


def test_slots_are_in_order_where_they_shall_be():
    for ordered in (False, True):
        x = delta.make_inputs(setting("gdn", 64, ordered=ordered, **SMALL), "cpu", 0)
        assert x.slots.sort().values.equal(torch.arange(64, dtype=torch.int32))
        assert x.slots.equal(torch.arange(64, dtype=torch.int32)) == ordered


def test_the_multiplication_is_checked(peers, monkeypatch):
    monkeypatch.setattr(delta, "DIM", 16)
    problem = setting("gdn", 3, **SMALL)
    negate_as(peers, wrong=False)
    assert delta_decode_slots.check(delta_decode_slots.NEGATED, problem, "cpu") == {}
    negate_as(peers, wrong=True)
    with pytest.raises(CheckFailed, match="not multiplied by -1"):
        delta_decode_slots.check(delta_decode_slots.NEGATED, problem, "cpu")
    assert providers.CEILING in delta_decode_slots.OP.providers
