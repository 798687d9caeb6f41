"""Results of the family that no GPU gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.registry import Op, Setting


@pytest.fixture
def timed_alone(measured: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Times all settings of an op on the fake device: providers serve every setting, and nothing is made or checked."""

    def run(op: Op, cost_us: Callable[[str, Setting], float], **changes: Any) -> dict[str, Any]:
        served = [
            dataclasses.replace(p, supports=lambda problem: None, prepare=lambda problem: None)
            for p in op.providers
        ]
        changes |= {"make_inputs": lambda problem, device, seed: seed}
        changes |= {"check": lambda provider, problem, device: {}}
        return measured(op, cost_us, op.settings(False), providers=served, **changes)

    return run
