"""What GPU tests with FLA share: which kernels a call launches, and how far two results of 16 bits may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

BOUND = 1e-2  # two bf16 results, each allowed 5e-3
GRADIENT_BOUND = 2e-2
# Parts of the names of our kernels that FLA's functions are served by on Hopper.
NAMES = ("KdaPrepare", "LightningPrefill", "Prepare", "Recurrence", "DeltaDecode")


def launched(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the names of the kernels that it launches. It is called once before that."""
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as told:
        found = function()
        torch.cuda.synchronize()
    return found, [event.key for event in told.key_averages()]


def ours_among(kernels: Iterable[str]) -> set[str]:
    """The parts of names of our kernels that stand in names of these."""
    return {part for part in NAMES for kernel in kernels if part in kernel}


def assert_near(got: Tensor, want: Tensor, bound: float = BOUND, name: str = "") -> None:
    assert got.shape == want.shape and got.dtype == want.dtype and torch.isfinite(got).all(), name
    difference = (got.double() - want.double()).norm() / want.double().norm()
    assert difference <= bound, f"{name}: relative RMSE {difference:.2e}"
