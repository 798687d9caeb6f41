"""Memory for tests of kernels: what was not written is NaN, and rows have gaps between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def loose_strides(shape: Sequence[int], gap: int, dense: int = 1) -> tuple[int, ...]:
    """Strides with `gap` elements after every slice of a dimension but the last `dense` ones."""
    strides: list[int] = []
    step = 1
    for dim, size in enumerate(reversed(shape)):
        strides.insert(0, step)
        step = step * size + (gap if dim + 1 >= dense else 0)
    return tuple(strides)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, integers of their maximum: workspaces too must be written before they are read."""
    import torch

    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    # torch fills fresh memory only in deterministic mode; warn_only keeps every algorithm available.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill
