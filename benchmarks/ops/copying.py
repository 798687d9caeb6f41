"""The ceiling of ops that read their inputs once and write their outputs once: a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Provider, Setting
from benchmarks.ops.checks import SEED

NOTE = (
    "copy_ceiling is torch.neg from one fp32 buffer to another: half of the bytes read, half written. A plain copy_ is "
    "a memcpy, which is slower at some sizes."
)


def copy(moved: int, device: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    """A source tensor, and a call that writes it with the other sign elsewhere; the call moves `moved` bytes in all."""
    source = torch.empty(moved // 8, device=device)
    target = torch.empty_like(source)
    return source, lambda: torch.neg(source, out=target)


def ceiling(moved: Callable[[Setting], int]) -> Provider:
    """A provider that moves as many bytes as the op, rounded down to a multiple of 8."""

    def whole(problem: Setting) -> int:
        return moved(problem) // 8 * 8

    def bind(problem: Setting, x: Any) -> Callable[[], Tensor]:
        return copy(whole(problem), x.q.device)[1]

    return Provider("copy_ceiling", "ceiling", bind, whole)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Raises CheckFailed unless the copy is exact."""
    source, call = copy(provider.moved(problem), device)
    source.normal_(generator=torch.Generator(device).manual_seed(SEED))
    if not torch.equal(call(), -source):
        raise CheckFailed(f"{problem.name}: the copy is not exact")
    return {}
