"""Cut dense or packed tokens into chunks, and carry a state from chunk to chunk.

Everything is derived from shapes and device tensors: `cu_seqlens` is never read by the host. A packed batch gets as
many chunks as any packing of its shape can need; the surplus ones hold no valid token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cula.varlen import capacity, chunk_indices

CHUNK = 64
"""Chunk length in tokens, also the spacing of the intermediate states that `chunk_kda` returns."""

_GROUP_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Chunks:
    """How the T tokens of a dense batch fall into NC chunks of `size` rows; every row of `[B, T]` is cut alike."""

    size: int
    token: Tensor  # [NC, size] token held by each chunk row, clamped into range
    valid: Tensor  # [NC, size] whether that row holds a token at all
    start: Tensor  # [NC] token at which the chunk's sequence starts

    def groups(self, elements_per_chunk: int) -> Iterator[slice]:
        """Runs of chunks small enough for the state-independent work of a whole run to stay in cache."""
        count = self.token.shape[0]
        step = max(1, _GROUP_ELEMENTS // max(1, elements_per_chunk))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def gather(self, x: Tensor, group: slice) -> Tensor:
        """`[B, T, H, D]` -> `[chunks, B, H, size, D]`; rows without a token are zero."""
        rows = x.index_select(1, self.token[group].reshape(-1))
        rows = rows.unflatten(1, (-1, self.size)).permute(1, 0, 3, 2, 4)
        return torch.where(self.valid[group, None, None, :, None], rows, 0).contiguous()

    def scatter(self, o: Tensor, rows: Tensor, group: slice) -> Tensor:
        """Put `[chunks, B, H, size, D]` at its tokens in `[B, T + 1, H, D]`; the last token takes the empty rows."""
        target = torch.where(self.valid[group], self.token[group], o.shape[1] - 1).reshape(-1)
        return o.index_copy_(1, target, rows.permute(1, 0, 3, 2, 4).flatten(1, 2))

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The state that walks through the chunks, and the place where `leave` keeps final states."""
        return initial, initial

    def enter(self, chunk: int, state: Tensor, initial: Tensor) -> Tensor:
        """The state a chunk starts from."""
        return state

    def leave(self, chunk: int, state: Tensor, final: Tensor) -> Tensor:
        """The final states, if this chunk were the last."""
        return state

    def end(self, final: Tensor) -> Tensor:
        """The final states `[N, HV, K, V]`, after the last chunk."""
        return final


@dataclass(frozen=True)
class PackedChunks(Chunks):
    """Chunks of N sequences packed into one batch row; a sequence without tokens keeps its initial state."""

    sequence: Tensor  # [NC] sequence the chunk belongs to, clamped into range
    first: Tensor  # [NC] whether it is that sequence's first chunk
    slot: Tensor  # [NC] where its outgoing state is kept: its sequence, or a spare row for surplus chunks

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor]:
        spare = initial.new_zeros(1, *initial.shape[1:])
        return spare, torch.cat([initial, spare])

    def enter(self, chunk: int, state: Tensor, initial: Tensor) -> Tensor:
        fresh = initial.index_select(0, self.sequence[chunk : chunk + 1])
        return torch.where(self.first[chunk], fresh, state)

    def leave(self, chunk: int, state: Tensor, final: Tensor) -> Tensor:
        return final.index_copy_(0, self.slot[chunk : chunk + 1], state)

    def end(self, final: Tensor) -> Tensor:
        return final[:-1]


def dense_chunks(tokens: int, device: torch.device, size: int = CHUNK) -> Chunks:
    """Chunks of a batch whose rows all have the same number of tokens."""
    count = -(-tokens // size)
    token = torch.arange(count * size, device=device).view(count, size)
    start = torch.zeros_like(token[:, 0])
    return Chunks(size, token.clamp(max=max(tokens - 1, 0)), token < tokens, start)


def packed_chunks(tokens: int, cu_seqlens: Tensor, size: int = CHUNK) -> PackedChunks:
    """Chunks of sequences packed one behind the other; each sequence starts a chunk of its own."""
    bounds = cu_seqlens.to(torch.int64)
    sequences = bounds.shape[0] - 1
    owner, local = chunk_indices(bounds, size, capacity(tokens, sequences, size)).unbind(1)
    used, owner = owner >= 0, owner.clamp(min=0)
    token = (bounds[owner] + local * size)[:, None] + torch.arange(size, device=bounds.device)
    return PackedChunks(
        size=size,
        token=token.clamp(0, max(tokens - 1, 0)),
        valid=used[:, None] & (token < bounds[owner + 1][:, None]),
        start=bounds[owner],
        sequence=owner,
        first=local == 0,
        slot=torch.where(used, owner, sequences),
    )


def chunks_of(tokens: int, device: torch.device, cu_seqlens: Tensor | None) -> Chunks:
    """Chunks of a dense batch, or of a packed one when `cu_seqlens` is given."""
    return dense_chunks(tokens, device) if cu_seqlens is None else packed_chunks(tokens, cu_seqlens)
