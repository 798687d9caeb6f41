"""Queries, keys and values of the steps of a run, for what measures and replays them."""

from __future__ import annotations

import torch


def inputs(batch=1, queries=300, keys=None, heads=2, heads_kv=None, dim=32, dtype=torch.float32):
    """Keys like the queries at their place."""
    keys = queries if keys is None else keys
    q = 1.5 * torch.randn(batch, queries, heads, dim)
    near = torch.arange(keys) * queries // keys
    k = q[:, near][:, :, : heads_kv or heads] + 0.5 * torch.randn(
        batch, keys, heads_kv or heads, dim
    )
    return tuple(x.to(dtype) for x in (q, k, torch.randn_like(k)))


def trajectory(steps=4, **shape):
    first = inputs(**shape)
    return [tuple(x + 0.1 * n * torch.randn_like(x) for x in first) for n in range(steps)]
