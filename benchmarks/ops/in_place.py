"""The ceiling of ops that update states in place: a multiplication of the same memory, which does nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Provider, Setting

NOTE = "inplace_ceiling is state.mul_(-1.0): reads and writes the state and does nothing else."


def ceiling(
    states: Callable[[Any], Tensor],
    state_bytes: Callable[[Setting], int],
    supports: Callable[[Setting], str | None],
) -> Provider:
    """A provider that multiplies `states(inputs)`, `state_bytes(setting)` in all, by -1: exact, and of stable size."""

    def bind(problem: Setting, x: Any) -> Callable[[], Tensor]:
        found = states(x)
        return lambda: found.mul_(-1.0)

    return Provider(
        "inplace_ceiling",
        "ceiling",
        bind,
        lambda problem: 2 * state_bytes(problem),
        supports=supports,
    )


def check(provider: Provider, states: Callable[[Any], Tensor], problem: Setting, x: Any) -> dict:
    """Raises CheckFailed unless the ceiling changes the sign of every state of some inputs, and nothing else."""
    want = -states(x)[-1:].clone()
    provider.bind(problem, x)()
    if not torch.equal(states(x)[-1:], want):
        raise CheckFailed(f"{problem.name}: the in-place update is not exact")
    return {}
