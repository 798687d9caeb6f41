"""What tests of `cula.compat` share: inputs, and a loop over tokens in fp64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

H, HV, K, V = 2, 4, 8, 6
CU = torch.tensor([0, 5, 5, 6, 75], dtype=torch.int32)
N, T = 4, 75
ROWS = torch.tensor([5, -1, 0], dtype=torch.int32)


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor, cu: Tensor, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k `[T, HQ, K]`, v `[T, HV, V]`, log decays g `[T, HS, 1 or K]`, beta `[T, HS]`, states `[N, HS, K, V]`.

    Without beta nothing is subtracted: plain linear attention. Returns outputs `[T, HS, V]` and states.
    """
    heads = states.shape[1]
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    o, states = torch.zeros_like(v), states.clone()
    for n in range(len(cu) - 1):
        state = states[n]
        for t in range(int(cu[n]), int(cu[n + 1])):
            state = g[t].exp()[..., None] * state
            value = v[t]
            if beta is not None:
                value = beta[t, :, None] * (value - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t, :, :, None] * value[:, None]
            o[t] = scale * torch.einsum("hk,hkv->hv", q[t], state)
        states[n] = state
    return o, states


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Raw:
    """Raw inputs of KDA for T tokens, and what they mean."""

    def __init__(self, tokens: int = T) -> None:
        self.q, self.k, self.v = rand(tokens, H, K), rand(tokens, H, K), rand(tokens, HV, V)
        self.g, self.beta = rand(tokens, HV, K), rand(tokens, HV)
        self.A_log, self.dt_bias = rand(HV), rand(HV, K)

    def bounded(self, bound: float) -> Tensor:
        return bound * torch.sigmoid(self.A_log.exp()[:, None] * (self.g + self.dt_bias))

    def softplus(self, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        x = functional.softplus(self.g + self.dt_bias, beta, threshold)
        return -self.A_log.exp()[:, None] * x


def lightning_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rand(T, H, K), rand(T, H, K), rand(T, HV, V), torch.rand(HV, dtype=torch.float64)
