"""Calls for the launchers, and their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """A call of the launcher. listed: share of the tiles on the list, None for dense attention. lengths: of packed
    sequences, pairs of queries and keys; else rows and keys of `batch` sequences. held: some tiles must stay."""

    rows: int = 200
    keys: int = 300
    batch: int = 1
    heads: int = 2
    heads_k: int = 1
    dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    listed: float | None = None
    threshold: float = -6.0
    direction: int = 1
    block_n: int = 64
    held: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None
    index_dtype: str = "int32"
    on_device: bool = False
    views: bool = False

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.keys}" if self.lengths is None else f"packed{len(self.lengths)}"
        words = [f"{shape}-H{self.heads}-{self.heads_k}-D{self.dim}", self.dtype]
        words += [name for name in ("causal", "held", "on_device", "views") if getattr(self, name)]
        if self.listed is not None:
            words.append(f"listed{self.listed}-{self.threshold}-{self.direction}-by{self.block_n}")
        return "-".join(words)


DENSE = [
    Call(),
    Call(1, 1, dim=64, heads=1),
    Call(129, 64, dim=64, dtype="float16"),
    Call(128, 65, dim=96, batch=2, views=True),
    Call(130, 200, dim=192, heads=1),
    Call(64, 257, dim=256, heads=1),
    Call(63, 63, dim=8, heads=1),
    Call(200, 130, dim=80, causal=True),
    Call(130, 300, dim=128, causal=True, heads=4, heads_k=2),
    Call(300, 100, dim=64, causal=True),
    Call(dim=64, lengths=((100, 70), (0, 5), (1, 200), (130, 130)), index_dtype="int64"),
    Call(dim=64, causal=True, lengths=((70, 100), (200, 64), (64, 64))),
]
LISTED = [
    Call(200, 600, listed=0.6),
    Call(200, 600, listed=0.6, direction=-1, threshold=-2.0, views=True),
    Call(130, 500, listed=0.5, block_n=128, threshold=-1.0, dim=64),
    Call(130, 500, listed=0.8, block_n=128, threshold=0.0, dim=64, direction=-1),
    Call(300, 300, listed=0.9, threshold=0.0, causal=True, direction=-1, batch=2, dim=64),
    Call(300, 200, listed=0.8, threshold=-4.0, causal=True, block_n=128, dim=96),
    Call(64, 2200, listed=0.4, threshold=-1.0, dim=64, heads=1, held=True),
    Call(64, 2200, listed=0.4, threshold=math.inf, dim=64, heads=1, direction=-1, held=True),
    Call(64, 4400, listed=0.9, threshold=-0.5, dim=64, heads=1),
    Call(20, 4700, listed=1.0, threshold=-0.5, dim=64, heads=1, direction=-1, block_n=128),
    Call(200, 300, listed=0.9, threshold=-math.inf, dim=80, dtype="float16", heads=4, heads_k=2),
    Call(100, 300, listed=0.7, threshold=-2.0, dim=192, heads=1, on_device=True, direction=-1),
    Call(100, 300, listed=0.7, threshold=-2.0, dim=256, heads=1, on_device=True),
    Call(dim=64, listed=0.7, threshold=-1.0, lengths=((100, 170), (0, 5), (200, 300), (7, 0))),
    Call(dim=64, listed=0.7, causal=True, direction=-1, lengths=((200, 300), (129, 64), (64, 129))),
    Call(130, 200, listed=0.0, dim=64),
]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    read: Tensor | None
    held: Tensor | None
    starts_q: Tensor | None
    starts_k: Tensor | None
    most: tuple[int, int]

    def to(self, device: torch.device | str) -> Inputs:
        there = {n: t.to(device) for n, t in vars(self).items() if isinstance(t, Tensor)}
        return Inputs(**vars(self) | there)


def make_inputs(call: Call, seed: int = 0) -> Inputs:
    """Random q, k and v, a few keys of which stand out, so that lists change."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, call.dtype)
    if call.lengths is None:
        batch, rows, keys, sequences = call.batch, call.rows, call.keys, call.batch
        most = (rows, keys)
        starts_q = starts_k = None
    else:
        batch, sequences = 1, len(call.lengths)
        rows, keys = (sum(pair[i] for pair in call.lengths) for i in range(2))
        most = max(pair[0] for pair in call.lengths), max(pair[1] for pair in call.lengths)
        starts_q, starts_k = (
            torch.tensor([0, *(pair[i] for pair in call.lengths)])
            .cumsum(0)
            .to(getattr(torch, call.index_dtype))
            for i in range(2)
        )

    def normal(tokens: int, heads: int) -> Tensor:
        whole = torch.full((batch, tokens + 3, heads + 1, call.dim + 8), math.nan, dtype=dtype)
        values = torch.randn(batch, tokens, heads, call.dim, generator=generator).to(dtype)
        view = whole[:, 2 : 2 + tokens, :heads, : call.dim]
        return view.copy_(values) if call.views else values

    q, k, v = normal(rows, call.heads), normal(keys, call.heads_k), normal(keys, call.heads_k)
    k[:, ::97] *= 2
    read = held = None
    if call.listed is not None:
        tiles = -(-most[0] // 128), -(-most[1] // call.block_n)
        bits = torch.rand(sequences, call.heads, *tiles, generator=generator) < call.listed
        read = packed_bits(bits)
        if call.held:
            held = packed_bits(torch.rand(1, call.heads, 1, tiles[1], generator=generator) < 0.3)
    return Inputs(q, k, v, read, held, starts_q, starts_k, most)


def packed_bits(bits: Tensor) -> Tensor:
    """bool [..., tiles] as int32 words of 32 tiles, the first tile in the lowest bit."""
    places = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (places.long() << torch.arange(32)).sum(-1).to(torch.int32)


def unpacked_bits(words: Tensor, tiles: int) -> Tensor:
    """The same back: bool [..., tiles]."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(-2)[..., :tiles].bool()


def without_unlisted(call: Call, x: Inputs) -> Inputs:
    """The same with NaN in every key and value of tiles that no query tile lists."""
    tiles = -(-call.keys // call.block_n)
    assert x.read is not None
    unlisted = ~unpacked_bits(x.read, tiles).any(2).any(1)  # [B, Nt]
    columns = unlisted.repeat_interleave(call.block_n, 1)[:, : call.keys]
    assert columns.any()
    k, v = (t.masked_fill(columns[:, :, None, None], math.nan) for t in (x.k, x.v))
    return replace(x, k=k, v=v)
