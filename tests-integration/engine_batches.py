"""What the tests of engines' calls share: batches with padding, and what a call is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

H, HV = 2, 4
BLOCKS, DRAFTS, CHUNK = 16, 3, 64
PATTERN = 9.0

Memory = dict[str, Tensor]
# What an engine calls, given its memory, how many of the token rows there are, and an implementation; returns what is
# in no memory of the engine: "o" by token, and states.
Call = Callable[[Memory, int, str], Memory]


class Batch(NamedTuple):
    """Packed sequences in `rows` rows of tokens, and their slots, or one for each token of a draft.

    null: a slot of padding beside negative ones.
    """

    rows: int
    lengths: tuple[int, ...]
    slots: tuple[Any, ...]
    null: int = 0
    begins: tuple[bool, ...] = ()
    accepted: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    @property
    def live(self) -> int:
        return sum(self.lengths)

    def ends(self) -> Tensor:
        return torch.tensor((0, *self.lengths)).cumsum(0, dtype=torch.int32)

    def tokens(self, *shape: int, dtype: torch.dtype = torch.bfloat16, spare: int = 0) -> Tensor:
        """Random numbers of `[rows + spare, *shape]`, NaN where no sequence has a token, or none but padding."""
        x = torch.randn(self.rows + spare, *shape)
        first = torch.tensor(self.slots).view(len(self.slots), -1)[:, 0]
        padding = (first < 0) | (first == self.null)
        x[: self.live][padding.repeat_interleave(torch.tensor(self.lengths))] = float("nan")
        x[self.live :] = float("nan")
        return x.to(dtype)

    def heads(self, count: int, dim: int, norms: float = 1.0) -> Tensor:
        """Tokens `[rows, count, dim]` of these norms, contiguous."""
        return (normalize(self.tokens(count, dim).float(), dim=-1) * norms).bfloat16()

    def table(self) -> Tensor:
        """vLLM's table of blocks, whose first columns are the slots."""
        slots = torch.tensor(self.slots, dtype=torch.int32).view(len(self.slots), -1)
        return torch.cat((slots, torch.full((len(slots), 5), BLOCKS - 1, dtype=torch.int32)), 1)


class Site(NamedTuple):
    """A call of an engine. operands: memory for a batch, with heads of a dimension and pools of a dtype.

    reads: states are only read.
    """

    operands: Callable[[Batch, int, torch.dtype], Memory]
    call: Call
    batches: tuple[Batch, Batch]
    pools: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    reads: bool = False


# The second batch has other sequences, and more padding.
PREFILLS = (
    Batch(320, (70, 0, 131, 64, 0, 1), (4, 2, 7, 1, 5, 8), begins=(True, True, False, True, False, True),
          chunks=(1, -1, 2, -1, -1, -1)),
    Batch(320, (129, 2, 70, 0, 0, 0), (3, 6, 8, -1, 0, 0), begins=(False, True, True, True, True, True),
          chunks=(2, -1, 1, -1, -1, -1)),
)  # fmt: skip
ROWS = (
    Batch(6, (1,) * 6, (3, 0, 5, 1, 7, 2)),
    Batch(6, (1,) * 6, (6, 4, 0, 0, 0, 0)),
)


def split(x: Tensor, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[1, L, keys, dim]` and v `[1, L, HV, dim]` in the rows of a fused projection."""
    widths = (keys * dim, keys * dim, HV * dim)
    q, k, v = x[None, :, : sum(widths)].split(widths, -1)
    return q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, dim))  # type: ignore[return-value]


def fused(batch: Batch, keys: int, dim: int) -> Tensor:
    """Rows of q, k, v and a gate for the output. Norms of q and k are far from 1."""
    x = batch.tokens((2 * keys + 2 * HV) * dim)
    x[:, : keys * dim] *= 0.1
    x[:, keys * dim : 2 * keys * dim] *= 10
    return x
