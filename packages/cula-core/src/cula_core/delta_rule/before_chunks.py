"""The state before each chunk of 64 tokens, as flash-linear-attention returns it: `return_intermediate_states`.

The kernels keep the state after every chunk, one row further than the chunk's own. What the first chunk of a sequence
begins with then takes the place of what the last chunk of the sequence before has left there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import CHUNK, chunk_slots


class ChunkRows(NamedTuple):
    """The rows that the chunks of a call have.

    starts: `[N + 1]` int64, the first row of every sequence, then the number of rows with a chunk. total: of rows.
    exact: whether every row has a chunk; if only the device knows the lengths of sequences there are up to N more.
    """

    starts: Tensor
    total: int
    exact: bool

    @property
    def behind(self) -> Tensor:
        """The row of the state after the first chunk of every sequence. There must be one row more than `total`."""
        return self.starts[:-1] + 1

    def begin(self, rows: Tensor, initial: Tensor | None, has_initial_state: Tensor | None) -> None:
        """Puts the states that sequences begin with before their first chunks, and zero where no chunk is.

        rows: `[total + 1, HV, ..]`, written. initial: `[N, HV, ..]`, or None for zero.
        """
        nowhere = self.total
        first, end = self.starts[:-1], self.starts[1:]
        if not self.exact:
            spare = self.starts[-1] + torch.arange(len(first), device=rows.device)
            rows.index_fill_(0, spare.clamp(max=nowhere), 0)
        first = torch.where(end > first, first, nowhere)
        if initial is None:
            rows.index_fill_(0, first, 0)
        else:
            if has_initial_state is not None:
                initial = torch.where(has_initial_state[:, None, None, None], initial, 0)
            rows.index_copy_(0, first, initial)


def chunk_rows(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> ChunkRows:
    """Returns the rows of a call's chunks, exactly as many as there are if the host knows all lengths."""
    batch, tokens = q.shape[:2]
    if cu_seqlens is None:
        each = -(-tokens // CHUNK)
        starts = torch.arange(batch + 1, device=q.device) * each
        return ChunkRows(starts, batch * each, True)
    starts = torch.nn.functional.pad(_chunks(cu_seqlens).cumsum(0), (1, 0))
    if cu_seqlens_cpu is None:
        return ChunkRows(starts, chunk_slots(batch, tokens, len(starts) - 1), False)
    return ChunkRows(starts, int(_chunks(cu_seqlens_cpu).sum()), True)


def _chunks(cu_seqlens: Tensor) -> Tensor:
    """Returns the number of chunks of every sequence."""
    return (cu_seqlens.diff() + CHUNK - 1) // CHUNK
