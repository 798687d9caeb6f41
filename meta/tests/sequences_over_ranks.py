"""What the tests of context parallelism compare with: the equations, one token after another, in fp64."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

HEADS, WIDTH, CHANNELS = 3, 4, 5


class Inputs(NamedTuple):
    """q, k `[T, H, K]`, v `[T, H, V]`, log decay g `[T, H, K]` or `[T, H, 1]`, beta `[T, H]`; None: no delta rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def part(self, start: int, stop: int) -> Inputs:
        return Inputs(*(x if x is None else x[start:stop] for x in self))


def recurrence(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[T, H, V]`, and the state `[H, K, V]` behind."""
    outputs = [x.v[:0]]
    for t in range(len(x.q)):
        state = x.g[t].exp()[..., None] * state
        written = x.v[t]
        if x.beta is not None:
            written = x.beta[t][:, None] * (written - torch.einsum("hkv,hk->hv", state, x.k[t]))
        state = state + x.k[t][..., None] * written[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, x.q[t])[None])
    return torch.cat(outputs), state


def whole(x: Inputs, states: Tensor, cu_seqlens: list[int]) -> tuple[Tensor, Tensor]:
    """All sequences in one process."""
    done = [
        recurrence(x.part(a, b), state)
        for a, b, state in zip(cu_seqlens, cu_seqlens[1:], states, strict=False)
    ]
    return torch.cat([o for o, _ in done]), torch.stack([state for _, state in done])


def problem(
    seed: int, tokens: int, sequences: int, kind: str
) -> tuple[Inputs, Tensor, Tensor, Tensor]:
    """Inputs, initial states, and gradients of outputs and final states. kind: "kda", "gdn" or "gla"."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, k, v = (normal(tokens, HEADS, n) for n in (WIDTH, WIDTH, CHANNELS))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -normal(tokens, HEADS, WIDTH if kind == "kda" else 1).abs() * 0.3
    beta = None if kind == "gla" else normal(tokens, HEADS).sigmoid()
    states = normal(sequences, HEADS, WIDTH, CHANNELS)
    return Inputs(q, k, v, g, beta), states, normal(*v.shape), normal(*states.shape)


def random_batch(rng: random.Random, ranks: int) -> tuple[list[int], list[int] | None, bool]:
    """`cu_seqlens`, bounds and zigzag of a batch, with empty sequences and empty slices among them."""
    lengths = [rng.choice((0, 1, 2, 5, 9)) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.4:
        lengths = [rng.randint(1, 24)]
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    zigzag = rng.random() < 0.4
    if rng.random() < 0.4:
        return cu_seqlens, None, zigzag
    inner = sorted(rng.randint(0, cu_seqlens[-1]) for _ in range(ranks * (1 + zigzag) - 1))
    return cu_seqlens, [0, *inner, cu_seqlens[-1]], zigzag
