"""What several references share."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def work_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Returns the dtype of sums: fp64 if any of the tensors is fp64, else fp32."""
    double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if double else torch.float32


def normalized(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
