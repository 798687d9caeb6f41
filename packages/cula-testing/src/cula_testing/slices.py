"""Sequences cut into slices, as GPUs beside each other hold them, all of which one process computes in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_rule.call import Slice

from .comparing import relative_rmse
from .tensors import int32

LENGTHS = (70, 0, 230)
# Of three ranks: the middle one lies inside a sequence, or ends one and begins another; one rank cuts nothing.
BOUNDS = {
    "three": (0, 150, 220, 300),
    "one": (0, 300),
    "in a chunk": (0, 10, 235, 300),
}

# Of slices that follow each other the slots of what they add and of their matrices; some chains begin alike.
LONG = ((3, 0), (0, 2), (4, 1), (1, 3))
CHAINS = (LONG[:2], LONG, ((2, 2),), ((1, 1), (2, 0)), LONG[:1])


def slices_of(low: int, high: int) -> list[tuple[int, Slice]]:
    """Returns the slices of a rank with tokens low .. high - 1, and whose they are. Empty sequences are the first's."""
    found = []
    ends = list(itertools.accumulate(LENGTHS, initial=0))
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        start, stop = max(low, begin), min(high, end)
        if start < stop or (begin == end and low <= begin < high):
            found.append((n, Slice(start - low, stop - low, begin < start, stop < end)))
    return found


def over_ranks(
    begin: Callable[..., Any], tokens: dict[str, Tensor], initial: Tensor, bounds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Begins the call of every rank, tells each what those before it do to a state, and finishes all; returns outputs
    and the sequences' final states.

    begin: of a rank's tokens by name, with slices, cu_seqlens and initial_state, of which the states that are not
    known yet are NaN. tokens: of all ranks `[1, T, ..]`; initial: of the sequences `[N, H, K, V]`.
    """
    outs: list[Tensor] = []
    states: list[Tensor] = list(initial)  # in front of the sequences' next slices
    for low, high in itertools.pairwise(bounds):
        own = slices_of(low, high)
        cuts = int32(*[part.start for _, part in own], high - low).to(initial.device)
        unknown = torch.stack([initial[n] * (torch.nan if part.comes_on else 1) for n, part in own])
        begun = begin(
            **{name: x[:, low:high] for name, x in tokens.items()},
            slices=tuple(part for _, part in own), cu_seqlens=cuts, initial_state=unknown,
        )  # fmt: skip
        out, final = begun.finish(torch.stack([states[n] for n, _ in own]))
        maps = iter(begun.maps)
        for (n, part), state in zip(own, final):
            if part.goes_on:
                added, matrix = next(maps)
                states[n] = added if matrix is None else matrix @ states[n] + added
                # Not the last digit, because states are rounded for the products on the way.
                torch.testing.assert_close(
                    states[n], state, rtol=0, atol=4e-3 * state.abs().max().item()
                )
            else:
                states[n] = state
        outs.append(out)
    return torch.cat(outs, 1).cpu(), torch.stack(states).cpu()


def assert_folds(
    fold: Callable[[Tensor, Tensor, Sequence, bool], Sequence[Tensor]],
    back: bool,
    device: str = "cpu",
) -> None:
    """Fails where `fold` does not give the states behind all chains, as `cula_core.delta_rule.fold` does."""
    generator = torch.Generator().manual_seed(int(back))
    # As they travel: what slots add above their matrices, all transposed.
    maps = torch.randn(5, 2, 256, 128, generator=generator) / 128**0.5
    vectors, matrices = maps.to(device).mT.split(128, -1)
    for chain, found in zip(CHAINS, fold(vectors, matrices, CHAINS, back), strict=True):
        state = torch.zeros(2, 128, 128, dtype=torch.float64)
        for vector, matrix in chain:
            added, own = maps[vector, :, :128].mT.double(), maps[matrix, :, 128:].mT.double()
            state = (own.mT if back else own) @ state + added
        # Tensor cores cut off what an fp32 sum has no room for, so that fp32 comes a few times as near. A tf32 product
        # of one term would be hundreds of times further off.
        assert relative_rmse(found.cpu(), state) < 2e-6
