"""Folds maps of slices, by one kernel: the states behind them, and the map of slices that follow each other.

A slice turns S into M S + A, and gradients of states, against the tokens, into M^T S + A.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .config import HEAD_DIM, FoldConfig

Chain = tuple[tuple[int, int], ...]
FoldKernels = Callable[[FoldConfig], Callable[..., None]]


def fold(
    kernels: FoldKernels,
    added: Tensor,
    maps: Tensor,
    chains: Sequence[Chain],
    back: bool,
    first: Tensor | None = None,
) -> list[Tensor]:
    """Returns the state [HV, K, V] behind every chain, from A [slots, HV, K, V] and M [slots, HV, K, K] of slices.

    All are fp32 with the second last dimension contiguous. chains: slots of A and of M of slices that follow each
    other; M of the first is not read. back: M^T in place of M. first: where the slots of A of first slices are, else in
    `added`.
    """
    places, cuts, rows = _table(tuple(chains), added.device)
    own = added.mT
    states = own.new_empty((places.shape[1], *own.shape[1:]))
    if states.numel() > 0:  # a rank may hold no heads
        begins = own if first is None else first.mT
        kernels(FoldConfig(back))(begins, own, maps.mT, states, places, cuts, cuts.shape[0] - 1)
    return [states[row].mT for row in rows]


def behind(kernels: FoldKernels, segments: Tensor, start: Tensor | None = None) -> Tensor:
    """Returns the transposed state [HV, V, K] behind segments that follow each other, from their maps
    [segments, HV, 256, 128], A^T above M^T.

    start: the state [HV, K, V] in front of them; else A of the first one is the state behind that.
    """
    if start is None and len(segments) == 1:
        return segments[0, :, :HEAD_DIM]
    added, maps = segments.mT.split(HEAD_DIM, -1)
    chain, first = _in_turn(len(segments)), None
    if start is not None:
        chain, first = ((0, 0), *chain), start.mT.contiguous().mT[None]
    (state,) = fold(kernels, added, maps, [chain], False, first)
    return state.mT


def joined(kernels: FoldKernels, segments: Tensor) -> Tensor:
    """Returns the map [HV, 256, 128] of segments that follow each other, from those of each."""
    if len(segments) == 1:
        return segments[0]
    added, maps = segments.split(HEAD_DIM, 2)
    places, cuts, _ = _table((_in_turn(len(segments)),), segments.device)
    found = torch.empty_like(segments[:1])
    kernels(FoldConfig(whole=True))(added, added, maps, found, places, cuts, 1)
    return found[0]


def _in_turn(count: int) -> Chain:
    return tuple((i, i) for i in range(count))


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
