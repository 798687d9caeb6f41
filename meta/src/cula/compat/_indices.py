"""Rows of a pool, which other libraries take as int64 too."""

from __future__ import annotations

import torch
from torch import Tensor

from cula_core import arguments


def int32(name: str, x: Tensor) -> Tensor:
    """Rows as our functions take them; what is no integer is left to their checks."""
    arguments.tensor(name, x)
    return x.to(torch.int32) if x.dtype == torch.int64 else x
