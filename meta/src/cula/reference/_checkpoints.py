"""Keep the states that a sequence passes through after every n tokens, without reading a length on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula.reference._chunks import Chunks, PackedChunks


def checkpoint_writer(
    chunks: Chunks,
    buffer: Tensor | None,
    every: int | None,
    state_v_first: bool,
    live: Tensor | None = None,
) -> Callable[[int, Tensor], None]:
    """A function of a chunk and the states `[B, HV, K, V]` after it, which stores those that are due.

    buffer `[B, T // every, HV, K, V]` (V, K with `state_v_first`); `every` is a multiple of the chunk. A sequence that
    starts at token a puts its i-th state into row `a // every + i`, and rows of different sequences never meet:
    the next sequence starts no earlier than the tokens that the row counts. live `[N]`: sequences that may write.
    """
    if buffer is None or every is None or buffer.shape[1] == 0:
        return lambda chunk, state: None
    target = buffer.detach()
    length = chunks.token[:, -1] + 1 - chunks.start
    # [NC, B], or [NC, 1] where all rows of a batch are alike.
    due = (chunks.valid[:, -1] & (length % every == 0))[:, None]
    if live is not None:
        due = due & (live[chunks.sequence][:, None] if isinstance(chunks, PackedChunks) else live)
    row = (chunks.start // every + length // every - 1).clamp(0, buffer.shape[1] - 1)

    def write(chunk: int, state: Tensor) -> None:
        here = row[chunk : chunk + 1]
        state = (state.mT if state_v_first else state).detach().to(target.dtype)
        kept = target.index_select(1, here)
        now = due[chunk][:, None, None, None, None]
        target.index_copy_(1, here, torch.where(now, state[:, None], kept))

    return write
