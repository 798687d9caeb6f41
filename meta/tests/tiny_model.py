"""A model small enough for tests of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cula.kda import chunk_kda

WIDTH, HEADS, DIM = 12, 2, 4


class Layer(nn.Module):
    """KDA between two projections: `[B, T, WIDTH]` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, HEADS * (4 * DIM + 1))
        self.outside = nn.Linear(HEADS * DIM, WIDTH)
        self.A_log = nn.Parameter(torch.rand(HEADS))
        self.dt_bias = nn.Parameter(torch.rand(HEADS * DIM))

    def forward(self, x: Tensor) -> Tensor:
        *tokens, beta = self.inside(x).split([HEADS * DIM] * 4 + [HEADS], dim=-1)
        q, k, v, g = (t.unflatten(-1, (HEADS, DIM)) for t in tokens)
        o, _ = chunk_kda(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        return x + self.outside(o.flatten(2))


def model(layers: int = 2) -> nn.Sequential:
    """The same layers at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Layer() for _ in range(layers)))


def batch(sequences: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[B, T, WIDTH]`, the same at every call."""
    return torch.randn(
        sequences, tokens, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)
    )


def loss(run: nn.Module, x: Tensor) -> Tensor:
    """A mean over sequences, so that parts of a batch have gradients whose mean is that of the batch."""
    return (run(x).float() if x.dtype != torch.float64 else run(x)).square().sum((1, 2)).mean()


def gradients(run: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in run.named_parameters() if p.grad is not None}
