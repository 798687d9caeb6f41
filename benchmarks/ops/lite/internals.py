"""What the benchmarks use of liteattention_sm89 beyond its main functions; no other file here imports that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from liteattention_sm89.quality import compare
from liteattention_sm89.reference import masked_gradients
from liteattention_sm89.replay import calibrated, replay, threshold_for

__all__ = [
    "backward_operator",
    "calibrated",
    "compare",
    "masked_gradients",
    "replay",
    "threshold_for",
]


def backward_operator() -> Callable[..., Any]:
    """The operator that autograd calls for gradients."""
    return torch.ops.liteattention_sm89.backward.default
