"""Functions that several test files use: the same values in other places and layouts."""

from __future__ import annotations

import torch
from torch import Tensor


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def turned(states: Tensor) -> Tensor:
    """The same values and shape, stored in the other layout."""
    return states.mT.contiguous().mT


def gapped(tensor: Tensor) -> Tensor:
    """The same values in every other row of a larger tensor, at an odd offset."""
    spread = torch.zeros(tensor.numel() * 2 + 3, dtype=tensor.dtype, device=tensor.device)
    strides = (2 * tensor.stride(0), *tensor.stride()[1:])
    return spread.as_strided(tensor.shape, strides, 3).copy_(tensor)


def misplaced(tensor: Tensor) -> Tensor:
    """The same values and strides at an address that is no multiple of 16 bytes."""
    flat = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
    skip = next(n for n in range(8) if flat[n:].data_ptr() % 16)
    return flat[skip : skip + tensor.numel()].view(tensor.shape).copy_(tensor)


def spaced(tensor: Tensor, gap: int = 4) -> Tensor:
    """The same values with `gap` elements between heads; 4 of 16 bits are no multiple of 16 bytes, 8 are one."""
    *outer, last = tensor.shape
    wide = torch.zeros(*outer, last + gap, dtype=tensor.dtype, device=tensor.device)
    return wide[..., :last].copy_(tensor)
