"""What several references share."""

from __future__ import annotations

from torch import Tensor

_EPSILON = 1e-6


def normalized(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x / (x.square().sum(-1, keepdim=True) + _EPSILON).sqrt()
