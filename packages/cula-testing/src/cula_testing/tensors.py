"""Small tensors, and the same values laid out in other ways."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def normals(generator: torch.Generator) -> Callable[..., Tensor]:
    """Returns what draws normal numbers of a shape, in fp64, so that they are the same for every dtype and device."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return normal


def int32(*values: int) -> Tensor:
    """Returns a vector of int32."""
    return torch.tensor(values, dtype=torch.int32)


def column(vector: Tensor) -> Tensor:
    """Returns a vector as a column of a table, as engines hold indices, between columns of other values."""
    return torch.stack((~vector, vector, ~vector), 1)[:, 1]


def turned(states: Tensor) -> Tensor:
    """Returns the same values and shape, stored in the other layout."""
    return states.mT.contiguous().mT


def spaced(tensor: Tensor, gap: int = 8) -> Tensor:
    """Returns the same values with `gap` elements, NaN, behind every row of the last dimension."""
    *outer, last = tensor.shape
    wide = tensor.new_full((*outer, last + gap), float("nan"))
    return wide[..., :last].copy_(tensor)


def scattered(tensor: Tensor) -> Tensor:
    """Returns the same values in every other row of a larger tensor, at an odd offset."""
    spread = torch.zeros(tensor.numel() * 2 + 3, dtype=tensor.dtype, device=tensor.device)
    strides = (2 * tensor.stride(0), *tensor.stride()[1:])
    return spread.as_strided(tensor.shape, strides, 3).copy_(tensor)


def every_other(tensor: Tensor) -> Tensor:
    """Returns the same shape and values, two elements apart in the last dimension."""
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    spread[..., 0] = tensor
    return spread[..., 0]


def gapped(tensor: Tensor) -> Tensor:
    """Returns zeros of the same shape inside a larger tensor, at odd distances."""
    shape = tensor.shape
    spread = torch.zeros(shape[0], 2 * shape[1] + 1, shape[2] + 3, shape[3] + 5, dtype=tensor.dtype)
    return spread[:, 1::2, 1 : 1 + shape[2], 3 : 3 + shape[3]]


def shifted(tensor: Tensor) -> Tensor:
    """Returns zeros of the same shape and dense strides, one element behind an aligned address."""
    flat = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape)


def misplaced(tensor: Tensor) -> Tensor:
    """Returns the same values and dense strides at an address that is no multiple of 16 bytes."""
    flat = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
    skip = next(n for n in range(8) if flat[n:].data_ptr() % 16)
    return flat[skip : skip + tensor.numel()].view(tensor.shape).copy_(tensor)


@contextlib.contextmanager
def unsynchronised() -> Iterator[None]:
    """In this context an operation that waits for the GPU raises RuntimeError."""
    with warnings.catch_warnings():
        # PyTorch says at the first use that it does not know every operation that waits.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Gives torch one thread, because several wait for each other at every one of many small steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
