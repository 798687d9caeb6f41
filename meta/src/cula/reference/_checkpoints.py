"""Keep the states that a sequence passes through after every n tokens, without reading a length on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula.reference._chunks import Chunks, PackedChunks
from cula_core.reference.lightning_decode import store_live


def checkpoint_writer(
    chunks: Chunks,
    buffer: Tensor | None,
    every: int | None,
    state_v_first: bool,
    live: Tensor | None = None,
    rows: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Callable[[int, Tensor], None]:
    """A function of a chunk and the states `[B, HV, K, V]` after it, which stores those that are due.

    buffer `[B, T // every, HV, K, V]` (V, K with `state_v_first`); `every` is a multiple of the chunk. A sequence that
    starts at token a puts its i-th state into row `a // every + i`, and rows of different sequences never meet:
    the next sequence starts no earlier than the tokens that the row counts. With rows `[N]` the buffer is
    `[rows, HV, K, V]`, and they are the sequences' first ones; negative: none. With offsets `[N]` a sequence has one
    state, after so many tokens, in row n or that of rows. live `[N]`: sequences that may write.
    """
    if buffer is None or buffer.numel() == 0:
        return lambda chunk, state: None
    # Of a sequence up to the end of each chunk, [NC].
    length = chunks.token[:, -1] + 1 - chunks.start
    whole = chunks.valid[:, -1]
    per_row = buffer.shape[1] if buffer.dim() == 5 else 0
    # Which sequence each state after a chunk is of, and the row of its batch, [NC, B].
    if isinstance(chunks, PackedChunks):
        sequence = chunks.sequence[:, None]
        begin = torch.zeros_like(sequence)
    else:
        vector = offsets if rows is None else rows
        count = len(buffer) if vector is None else len(vector)
        sequence = torch.arange(count, device=length.device).expand(len(length), -1)
        begin = sequence * per_row
    if offsets is not None:
        due, first = length[:, None] == offsets[sequence], sequence
        number = torch.zeros_like(length)
    else:
        assert every is not None
        due, number = (length % every == 0)[:, None].expand_as(sequence), length // every - 1
        first = chunks.start[:, None] // every + begin
    if rows is not None:
        first = rows[sequence]
        due = due & (first >= 0)
    due = due & whole[:, None]
    if live is not None:
        due = due & live[sequence]
    target = buffer.detach()
    target = target.flatten(0, 1) if target.dim() == 5 else target
    place = (first + number[:, None]).clamp(0, len(target) - 1)

    def write(chunk: int, state: Tensor) -> None:
        state = (state.mT if state_v_first else state).detach().to(target.dtype)
        # What is not due writes what the row of the first one that is holds then, or leaves a row as it is.
        store_live(target, state, place[chunk], due[chunk])

    return write
