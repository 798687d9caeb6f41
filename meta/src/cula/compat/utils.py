"""What tests and benchmarks of cuLA take from `cula.utils`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cula.compat.kda import kda_prefill_hopper

__all__ = ["get_kda_fused_fwd"]


def get_kda_fused_fwd(device: object = None) -> Callable[..., Any]:
    """Returns `kda_prefill_hopper`, which serves every device.

    Args:
        device: ignored.

    Example:
        >>> from cula.compat.utils import get_kda_fused_fwd
        >>> get_kda_fused_fwd("cpu").__name__
        'kda_prefill_hopper'
    """
    return kda_prefill_hopper
