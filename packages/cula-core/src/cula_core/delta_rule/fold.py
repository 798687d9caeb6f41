"""Folds maps of slices, which lie on several GPUs, into the states behind them, all by one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .config import FoldConfig

Chain = tuple[tuple[int, int], ...]
Kernels = Callable[[FoldConfig], Callable[..., None]]


def fold(
    kernels: Kernels, added: Tensor, maps: Tensor, chains: Sequence[Chain], back: bool
) -> list[Tensor]:
    """Returns the state [HV, K, V] behind every chain, from A [slots, HV, K, V] and M [slots, HV, K, K] of slices.

    Both are fp32 with the second last dimension contiguous. A slice turns S into M S + A, and with back into M^T S + A.

    chains: slots of A and of M of slices that follow each other; M of the first is not read.
    """
    places, cuts, rows = _table(tuple(chains), added.device)
    states = added.new_empty((places.shape[1], added.shape[1], added.shape[3], added.shape[2]))
    if states.numel() > 0:  # a rank may hold no heads
        kernels(FoldConfig(back))(added.mT, maps.mT, states, places, cuts, cuts.shape[0] - 1)
    return [states[row].mT for row in rows]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept serves training too
def _table(chains: tuple[Chain, ...], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the slots of slices [2, slices], where chains begin and end among them, and for every chain the number of
    its last slice. A chain that another one begins with is part of that."""
    longest: list[Chain] = []
    for chain in sorted(set(chains), key=len, reverse=True):
        if not any(other[: len(chain)] == chain for other in longest):
            longest.append(chain)
    cuts, last = [0], dict[Chain, int]()
    for chain in longest:
        for length in range(1, len(chain) + 1):
            last.setdefault(chain[:length], cuts[-1] + length - 1)
        cuts.append(cuts[-1] + len(chain))
    places = list(zip(*(step for chain in longest for step in chain), strict=True))
    numbers = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    return numbers(places), numbers(cuts), [last[chain] for chain in chains]
