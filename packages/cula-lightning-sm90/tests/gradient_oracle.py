"""Gradients of Lightning attention and simple GLA by autograd through the recurrence, token by token in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial: Tensor | None, bounds: list[tuple[int, int, int]],
    scale: float, l2norm: bool = False, live: list[bool] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [B, T, HV, V] and final states [N, HV, K, V].

    log_decay [B, T, HV]. initial [N, HV, K, V]. bounds: batch entry, first token and end of every sequence. live: which
    are none of padding.
    """
    group = v.shape[2] // q.shape[2]
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    rows: dict[tuple[int, int], Tensor] = {}
    finals = []
    for n, (b, start, stop) in enumerate(bounds):
        state = v.new_zeros(v.shape[2], k.shape[3], v.shape[3])
        if live is not None and not live[n]:
            finals.append(state)
            rows |= {(b, t): torch.zeros_like(v[b, t]) for t in range(start, stop)}
            continue
        if initial is not None:
            state = initial[n]
        for t in range(start, stop):
            update = k[b, t][:, :, None] * v[b, t][:, None]
            state = log_decay[b, t].exp()[:, None, None] * state + update
            rows[b, t] = scale * torch.einsum("hk,hkv->hv", q[b, t], state)
        finals.append(state)
    batch, tokens = v.shape[:2]
    if not rows:
        return v.clone(), torch.stack(finals)
    outputs = [torch.stack([rows[b, t] for t in range(tokens)]) for b in range(batch)]
    return torch.stack(outputs), torch.stack(finals)


def gradients(
    tensors: dict[str, Tensor | None], do: Tensor | None, dht: Tensor | None, **fixed: Any
) -> list[Tensor]:
    """Gradients of q, k, v and, if given, initial and log_decay, in fp64, in the order of `tensors`.

    fixed: the other arguments of `recurrence`.
    """
    leaves = {
        name: None if x is None else x.detach().double().requires_grad_()
        for name, x in tensors.items()
    }
    results = recurrence(**leaves, **fixed)
    pairs = [(y, dy.double()) for y, dy in zip(results, (do, dht)) if dy is not None]
    wanted = [x for x in leaves.values() if x is not None]
    return list(
        torch.autograd.grad(
            [y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True, materialize_grads=True
        )
    )  # fmt: skip
