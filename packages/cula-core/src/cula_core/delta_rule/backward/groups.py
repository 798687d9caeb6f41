"""Divides a backward pass into groups of value heads, whose memory between the kernels is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...environment import bytes_of
from ..config import BLOCK_BYTES, CHUNK
from .config import (
    FACTORS,
    ROW_BYTES,
    SCRATCH_LIMIT,
    STATE_BYTES,
    V_TILES,
    block_bytes,
    heads_at_once,
)
from .walks import Kept, Walked, blocks_of, slots_of

Call = TypeVar("Call", bound=Walked)
Found = TypeVar("Found")

# Tensors of a call that are divided: heads are the second dimension of some, the third of all others but parameters.
_PARAMETERS, _KEYS = ("A_log", "dt_bias"), ("q", "k")
_SECOND = ("initial_state", "dht", "blocks", "factors")
_TENSORS = frozenset((*_KEYS, "v", "g", "beta", "do", *_PARAMETERS, *_SECOND))


def in_groups(
    call: Call,
    found: Found,
    scratch: int | None = None,
    groups: int = 1,
    walks_keep: bool = True,
) -> Iterator[tuple[Call, Found, Kept]]:
    """Yields groups of value heads, which are independent: the part of a call and of its results that belongs to them,
    and memory for what lies between their kernels. All groups use the same memory, one after the other.

    The call has tensors as the kernels read them; found: memory of the gradients of its first fields. scratch: bytes of
    memory that are not exceeded as long as the value heads of one head of q and k fit; None: what SCRATCH_LIMIT of the
    environment says, and else as `heads_at_once` does. groups: how many there are at least where neither says anything.
    walks_keep: whether there is memory for states and rows; without it all heads are one group where neither says
    anything.
    """
    if scratch is None:
        scratch = bytes_of(SCRATCH_LIMIT, None)
    heads = call.v.shape[2]
    shared = heads // call.q.shape[2]
    slots = slots_of(call)
    if walks_keep:
        together = heads_at_once(slots, heads, scratch, shared, groups)
    elif scratch is None:
        together = heads
    else:
        together = heads_at_once(slots, heads, scratch, shared, size=block_bytes)
    memory = _memory(call, slots, together, walks_keep)
    for start in range(0, heads, together):
        count = min(together, heads - start)
        kept = memory if count == together else Kept(*(_of_heads(x, count) for x in memory))
        own: tuple[Any, Any] = call, found
        if count < heads:
            own = _parts(call, found, slice(start, start + count), shared)
        if blocks_of(own[0]) is not None:
            kept = kept._replace(blocks=own[0].blocks, factors=own[0].factors)
        yield *own, kept


def _memory(call: Walked, slots: int, heads: int, walks_keep: bool) -> Kept:
    operand = getattr(torch, call.operand)

    def empty(*inner: int, dtype: torch.dtype = operand) -> Tensor:
        return call.v.new_empty((slots, heads, *inner), dtype=dtype)

    def kept(size: int) -> Tensor:
        return empty(V_TILES, size // 2 // V_TILES if walks_keep else 0)

    first = empty(0), empty(0)
    if blocks_of(call) is None:
        first = empty(BLOCK_BYTES // 2), empty(FACTORS, CHUNK, dtype=torch.float32)
    return Kept(*first, kept(STATE_BYTES), kept(ROW_BYTES), kept(STATE_BYTES), kept(ROW_BYTES))


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Returns the beginning of memory of more heads as memory of so many."""
    return x.flatten(0, 1)[: x.shape[0] * heads].unflatten(0, (x.shape[0], heads))


def _parts(call: Any, found: Any, heads: slice, shared: int) -> tuple[Any, Any]:
    """Returns the part of a call and of its results that belongs to some value heads.

    shared: value heads that share a head of q and k.
    """
    keys = slice(heads.start // shared, heads.stop // shared)

    def part(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if name in _PARAMETERS:
            return x.view(call.v.shape[2], -1)[heads].flatten()
        if name in _SECOND:
            return x[:, heads]
        return x[:, :, keys if name in _KEYS else heads]

    own = {name: part(name, getattr(call, name)) for name in call._fields if name in _TENSORS}
    return call._replace(**own), found._make(map(part, call._fields, found))
