"""Inputs for the modules and their states, and ways to look at the masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liteattention_sm89 import masks
from liteattention_sm89.module import LiteAttention, SkipState

BLOCK_M, BLOCK_N = LiteAttention.get_tile_shape(64, torch.bfloat16)
LOG2 = math.log(2)


def qkv(
    batch: int = 1,
    queries: int = 300,
    keys: int | None = None,
    heads: int = 2,
    heads_kv: int | None = None,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that look like the queries of their place: tiles near the diagonal matter, the more the larger the dim."""
    keys = queries if keys is None else keys
    heads_kv = heads if heads_kv is None else heads_kv
    q = 2 * torch.randn(batch, queries, heads, dim, dtype=dtype)
    near = torch.arange(keys) * queries // keys
    k = q[:, near, :: heads // heads_kv] + 0.6 * torch.randn(
        batch, keys, heads_kv, dim, dtype=dtype
    )
    return q, k, torch.randn(batch, keys, heads_kv, dim, dtype=dtype)


def ladder(*levels: float) -> dict:
    """Arguments whose scores are, in log2 units, one level per key tile."""
    keys = torch.tensor(levels).repeat_interleave(BLOCK_N)
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, len(keys), 1, 8)
    q[..., 0], k[..., 0] = 1, keys[:, None]
    return {"query": q, "key": k, "value": torch.randn(*k.shape), "scale": LOG2}


def drift(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x + 0.1 * torch.randn_like(x) for x in (q, k, v))


def drift_chain(calls: int, **shape) -> list[tuple]:
    chain = [qkv(dim=64, **shape)]
    while len(chain) < calls:
        chain.append(drift(*chain[-1]))
    return chain


def run(lite: LiteAttention, inputs: list[tuple], **arguments) -> list[Tensor]:
    return [lite(*x, **arguments) for x in inputs]


def stand_out(q: Tensor, k: Tensor) -> None:
    """Makes the keys of some tiles matter to every query."""
    q[..., 0], k[..., 0] = 6, 10 * (torch.arange(k.shape[1]) // BLOCK_N % 3)[:, None]


def packed(lengths_q: list[int], lengths_k: list[int], **extra) -> tuple[tuple, dict]:
    q = torch.randn(1, sum(lengths_q), 2, 32) * 2
    k, v = torch.randn(1, sum(lengths_k), 1, 32), torch.randn(1, sum(lengths_k), 1, 32)
    stand_out(q, k)
    starts = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0) for x in (lengths_q, lengths_k)]
    return (q, k, v), {
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[1],
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    } | extra


def listed(lite: LiteAttention) -> list[int]:
    """Tiles that the next call of a single query tile visits."""
    mask = lite.write_mask
    assert mask is not None and mask.shape[:3] == (1, 1, 1)
    return masks.unpack(mask, lite.state.key.tiles_k)[0, 0, 0].nonzero().flatten().tolist()


def snapshot(state: SkipState) -> dict:
    return {
        name: x.clone() if isinstance(x, Tensor) else x for name, x in state.state_dict().items()
    }


def same(a: dict, b: dict) -> bool:
    return all(
        torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name]
        for name in a
    )
