"""Activations that turn a model's raw projections into decays, write strengths and normalised keys."""

from __future__ import annotations

import torch
from torch import Tensor

L2NORM_EPS = 1e-6


def log_decay(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Log decay (natural log, <= 0) of a raw gate `x` of shape `[..., HV, K]`, or `[..., HV, 1]` for one gate per head.

    softplus form, without `lower_bound`:  `-exp(A_log) * softplus(x + dt_bias)`;
    safe form, with `lower_bound < 0`:     `lower_bound * sigmoid(exp(A_log) * (x + dt_bias))`, in `(lower_bound, 0)`.

    A_log has HV elements, dt_bias as many as `x` has per token. A_log may be None in the safe form: the rate is then 1.
    Source: Kimi Linear, arXiv 2510.26692, and Mamba-2 for the softplus form, arXiv 2405.21060.
    """
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).reshape(x.shape[-2:])
    rate = None if A_log is None else A_log.to(x.dtype).reshape(-1, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(x if rate is None else rate * x)
    if rate is None:
        raise ValueError("A_log: expected a tensor because lower_bound is None, got None")
    # logaddexp has no linear shortcut for large x, so it stays exact in fp64
    return -rate * torch.logaddexp(x, torch.zeros_like(x))


def write_strength(logits: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """`sigmoid(logits)`, or twice that, in (0, 2), which lets `I - beta k k^T` have a negative eigenvalue."""
    beta = torch.sigmoid(logits)
    return 2 * beta if allow_neg_eigval else beta


def l2norm(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
