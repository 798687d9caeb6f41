"""What is remembered between calls: which key tiles the next call visits.

A call visits the key tiles that its read mask lists, all of them with full weight, and writes the list of those worth
visiting again; `SkipState` holds the two masks and swaps them. Tiles only ever leave the list: until a reset the
density falls or stays. The direction of the traversal alternates, because a tile is judged by the maximum of the tiles
before it. (LiteAttention, arXiv 2511.11062.)
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.dtypes import dtype_name

from . import masks
from .config import BLOCK_M, BLOCK_N

__all__ = ["SkipKey", "SkipState"]

TILE_SHAPE = BLOCK_M, BLOCK_N[0]


class SkipKey(NamedTuple):
    """What masks belong to: a call with another key starts again from full ones."""

    batch: int  # sequences, if packed
    seqlen_q: int  # the maximum, if packed
    seqlen_k: int
    heads: int  # of the queries: masks have their heads
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device | None  # None: just loaded, the first call decides
    block_m: int
    block_n: int
    causal: bool
    packed: bool

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, causal: bool, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    ) -> SkipKey:  # fmt: skip
        """The key of a call with these arguments, whose types and number of dimensions are checked."""
        for name, tensor in (("query", query), ("key", key)):
            arguments.tensor(name, tensor)
            if tensor.dim() != 4:
                raise ValueError(f"{name}: expected [B, S, H, D], got {list(tensor.shape)}")
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if offsets is not None:
                arguments.tensor(name, offsets)
        packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        packed = any(x is not None for x in packing)
        if packed and any(x is None for x in packing):
            raise ValueError(
                "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: expected all or none of them"
            )
        batch, seqlen_q, heads, head_dim = query.shape
        seqlen_k, heads_kv = key.shape[1:3]
        if packed:
            batch, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k  # type: ignore[union-attr, assignment]
        # fmt: off
        return cls(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, query.dtype, query.device,
                   *TILE_SHAPE, bool(causal), packed)
        # fmt: on

    @property
    def tiles_q(self) -> int:
        return -(-self.seqlen_q // self.block_m)

    @property
    def tiles_k(self) -> int:
        return -(-self.seqlen_k // self.block_n)


class TileLists(NamedTuple):
    """The token ranges of a call as tiles: int32 words [W] on the device of the masks; None: no ranges."""

    tokens: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    do: Tensor | None = None
    skip: Tensor | None = None
    extent: tuple[Any, ...] = ()  # what else the words depend on

    @classmethod
    def of(cls, do: Any, skip: Any, key: SkipKey, last: TileLists) -> TileLists:
        """From `must_do_list` and `must_skip_list`; `last` if it is of the same ranges, and nothing is copied again."""
        tokens = _flat("must_do_list", do), _flat("must_skip_list", skip)
        extent = key.seqlen_k, key.block_n, key.device
        if (last.tokens, last.extent) == (tokens, extent):
            return last
        words = []
        for name, flat, inward in zip(("must_do_list", "must_skip_list"), tokens, (False, True)):
            try:
                words.append(masks.tiles_of_tokens(flat, key.seqlen_k, key.block_n, inward))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
        if (words[0] & words[1]).any():
            raise ValueError(f"must_do_list, must_skip_list: {tokens} share tokens")
        moved = [word.to(key.device) if flat else None for word, flat in zip(words, tokens)]
        return cls(tokens, moved[0], moved[1], extent)


class SkipPass(NamedTuple):
    """One call: what to hand to the attention, and what `SkipState.finish` needs afterwards."""

    key: SkipKey
    mask: Tensor
    direction: int
    fresh: bool
    lengths: Tensor | None
    tokens: tuple[tuple[int, ...], tuple[int, ...]]


class SkipState:
    """The masks of one attention layer (of one branch, with classifier-free guidance) from call to call.

    alternate: directions are +1, -1, +1, ...; without it every call goes down (-1). The two buffers `[B, Hq, Mt, W]`
    are allocated when a call brings another `SkipKey` and stay where they are until the next one does, also through
    resets: a CUDA graph of an even number of calls, captured after a reset and a warm-up, can be replayed again and
    again, and goes on from where the last replay or a reset left the masks. Nothing but `begin` with new token ranges
    waits for the device.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import LiteAttention, SkipState
        >>> attention, prompt = LiteAttention(threshold=-10.0), SkipState()
        >>> q, k, v = torch.ones(3, 1, 256, 2, 64)  # each [B, S, H, D]: two query tiles, four key tiles
        >>> k[:, 64:] = 0.0  # the scores of all keys but the first 64 are lower by 8, in log2 units by 11.5
        >>> out = attention(q, k, v, state=prompt)
        >>> prompt.written.shape, prompt.direction, prompt.density().item()
        (torch.Size([1, 2, 2, 1]), -1, 0.25)
        >>> other = prompt.fork()  # for another branch of guidance
        >>> other.reset()
        >>> other.density().item(), prompt.density().item()
        (1.0, 0.25)
    """

    def __init__(self, alternate: bool = True) -> None:
        self.alternate = alternate
        self.key: SkipKey | None = None
        self.step = 0  # calls since the last reset, counted by those whose thresholds depend on it
        self._masks: list[Tensor] = []
        self._next = 0  # which of the two the next call reads
        self._called = False
        self._lengths: Tensor | None = None
        self._tokens = TileLists().tokens

    @property
    def direction(self) -> int:
        """Direction of the next call: +1 from the first key tile to the last, -1 from the last to the first."""
        return -1 if self._next or not self.alternate else 1

    @property
    def read(self) -> Tensor | None:
        """What the last call visited, int32 `[B, Hq, Mt, W]`; None before the first call. A buffer, not a copy."""
        return self._masks[1 - self._next] if self._called else None

    @property
    def written(self) -> Tensor | None:
        """What the last call wrote and the next one visits; None before the first call. A buffer, not a copy."""
        return self._masks[self._next] if self._called else None

    def begin(
        self, key: SkipKey, lists: TileLists | None = None, lengths: Tensor | None = None
    ) -> SkipPass:
        """What the next call visits. Changes nothing that a call which then fails would have to undo.

        lengths: int64 `[2, N]` of packed queries and keys on the device; a sequence whose lengths changed starts from a
        full mask. The lists are applied when they differ from those of the call before, and only then the device is
        waited for: a `must_skip` that leaves a query tile without any key tile is a ValueError.
        """
        lists = TileLists() if lists is None else lists
        if self.key is not None and self.key == key._replace(device=None):
            self._masks = [mask.to(key.device) for mask in self._masks]
            self._lengths = None if self._lengths is None else self._lengths.to(key.device)
            self.key = key
        fresh = key != self.key
        applied = TileLists().tokens if fresh else self._tokens
        mask = full_mask(key) if fresh else self._masks[self._next]
        if not fresh and lengths is not None and self._lengths is not None:
            changed = (lengths != self._lengths).any(0).view(-1, 1, 1, 1)
            start = masks.full(1, 1, 1, key.tiles_k, key.device)
            start = start if lists.skip is None else start & ~lists.skip
            mask = torch.where(changed, start, mask)
        if lists.tokens != applied:
            if lists.do is not None:
                mask = mask | lists.do
            if lists.skip is not None:
                mask = without(lists.skip, mask, key, lengths)
        direction = (1 if self.alternate else -1) if fresh else self.direction
        return SkipPass(key, mask, direction, fresh, lengths, lists.tokens)

    def finish(self, call: SkipPass, written: Tensor) -> None:
        """Takes the mask that the call wrote; the next call reads it."""
        # Buffers made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            if call.fresh:
                shape = call.mask.shape
                self._masks = [call.mask.new_empty(shape), call.mask.new_empty(shape)]
                self._next, self.key, self._lengths = 0, call.key, None
            if call.lengths is not None:
                if self._lengths is None:
                    self._lengths = torch.empty_like(call.lengths)
                self._lengths.copy_(call.lengths)
            source, target = self._masks[self._next], self._masks[1 - self._next]
            if call.mask is not source:
                source.copy_(call.mask)
            target.copy_(written)
        self._next = 1 - self._next
        self._called = True
        self._tokens = call.tokens

    def reset(self, batch: int | Iterable[int] | None = None) -> None:
        """Every tile is listed again: of all rows of the batch, or of the given ones (sequences, if packed).

        Without `batch` also the directions and the steps start again. Ranges that were skipped on request are listed
        again, until a call names them again.
        """
        if batch is None:
            self.step, self._next, self._called = 0, 0, False
        if self.key is None:
            return
        mask = self._masks[self._next]
        full = masks.full(1, 1, 1, self.key.tiles_k, mask.device)[0]
        if batch is None:
            mask.copy_(full)
        else:
            rows = [batch] if isinstance(batch, int) else list(batch)
            for row in rows:
                if isinstance(row, bool) or not isinstance(row, int):
                    raise TypeError(f"batch: expected ints, got {row!r}")
                if not 0 <= row < self.key.batch:
                    raise ValueError(f"batch: expected rows below {self.key.batch}, got {row}")
            for row in rows:
                mask[row].copy_(full)
        self._tokens = TileLists().tokens

    def fork(self) -> SkipState:
        """An independent copy, with its own buffers: for another branch of guidance, or to try a call and drop it."""
        other = SkipState(self.alternate)
        with torch.inference_mode(False):
            for name, value in vars(self).items():
                copy = value.clone() if isinstance(value, Tensor) else value
                setattr(other, name, copy)
            other._masks = [mask.clone() for mask in self._masks]
        return other

    def density(self) -> Tensor:
        """Share of the tiles that the next call visits, in [0, 1]: float32 scalar on the device.

        1 before the first call. Tiles that no query sees (causal, packed) do not count.
        """
        return self._share(None)

    def density_per_head(self) -> Tensor:
        """The same for every row of the batch and head: float32 `[B, Hq]`, a scalar 1 before the first call."""
        return self._share(-1)

    def _share(self, dims: int | None) -> Tensor:
        if self.key is None:
            return torch.ones(())
        reach = _reach(self.key, self._lengths, self._masks[0].device)
        listed = masks.count(self._masks[self._next] & reach)
        visible = masks.count(reach).expand_as(listed)
        listed, visible = (x.sum() if dims is None else x.sum(dims) for x in (listed, visible))
        return (listed.double() / visible.clamp(min=1)).float()

    def to_ranges(self, read: bool = False) -> Tensor | None:
        """`written` (or `read`) as LiteAttention's list, int16 `[B, Hq, Mt, Nt + 2]`, or None before the first call.

        Its order is the direction of the call that wrote it: the last one (or the one before).
        """
        mask = self.read if read else self.written
        if mask is None or self.key is None:
            return None
        descending = not self.alternate or bool(self._next) == read
        return masks.to_ranges(mask, self.key.tiles_k, descending)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the masks, and ints, bools and strings: what `load_state_dict` continues from, bit by bit."""
        key = None
        if self.key is not None:
            key = self.key._replace(device=None)._asdict() | {"dtype": dtype_name(self.key.dtype)}
        return {
            "alternate": self.alternate,
            "direction": self.direction,
            "step": self.step,
            "called": self._called,
            "key": key,
            "lengths": None if self._lengths is None else self._lengths.clone(),
            "mask": self._masks[self._next].clone() if self._masks else None,
            "read": self._masks[1 - self._next].clone() if self._called else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, a result of `state_dict`, on the device of the next call.

        ValueError if it is no such result, or if this state has masks of another key.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(f"state: expected the entries of state_dict(), {sorted(missing)} miss")
        if state["alternate"] != self.alternate:
            raise ValueError(f"state: expected alternate={self.alternate}, got the other one")
        key = _loaded_key(state)
        if self.key is not None and key is not None and key != self.key._replace(device=None):
            raise ValueError(f"state: expected masks of {self.key}, got those of {key}")
        self.reset()
        self.step = state["step"]
        if key is None:
            return
        with torch.inference_mode(False):
            if self.key is None:
                self._masks = [state["mask"].clone(), state["mask"].clone()]
                self.key = key
            self._next = int(self.alternate and state["direction"] < 0)
            self._masks[self._next].copy_(state["mask"])
            if state["read"] is not None:
                self._masks[1 - self._next].copy_(state["read"])
            if state["lengths"] is not None:
                self._lengths = state["lengths"].to(self._masks[0].device, copy=True)
        self._called = state["called"]


def full_mask(key: SkipKey) -> Tensor:
    with torch.inference_mode(False):
        return masks.full(key.batch, key.heads, key.tiles_q, key.tiles_k, key.device)


def _reach(key: SkipKey, lengths: Tensor | None, device: torch.device | None) -> Tensor:
    """The tiles of which some query sees some key: mask [B or 1, 1, Mt, W]."""
    if lengths is None:
        sizes = (key.seqlen_q, key.seqlen_k)
        lengths = torch.stack([torch.full((1,), size, device=device) for size in sizes])
    length_q, length_k = lengths[:, :, None, None]
    rows = torch.arange(key.tiles_q, device=device)[:, None] * key.block_m
    keys = torch.arange(key.tiles_k, device=device) * key.block_n
    seen = (rows < length_q) & (keys < length_k)
    if key.causal:
        last = torch.minimum(rows + key.block_m, length_q) - 1
        seen = seen & (keys <= last + length_k - length_q)
    return masks.pack(seen).unsqueeze(1)


def without(skip: Tensor, mask: Tensor, key: SkipKey, lengths: Tensor | None) -> Tensor:
    """The mask less `skip`. ValueError if that leaves a query tile without visible tiles. Waits for the device."""
    reach, left = _reach(key, lengths, mask.device), mask & ~skip
    if ((masks.count(mask & reach) > 0) & (masks.count(left & reach) == 0)).any():
        raise ValueError("must_skip_list: it leaves a query tile without any key tile")
    return left


def _flat(name: str, ranges: Any) -> tuple[int, ...]:
    if ranges is None:
        return ()
    if isinstance(ranges, Tensor):
        if ranges.device.type != "cpu":
            raise ValueError(f"{name}: expected ints or a tensor on the CPU, got {ranges.device}")
        ranges = ranges.tolist()
    if isinstance(ranges, str) or not isinstance(ranges, Iterable):
        raise TypeError(f"{name}: expected flat token ranges, got {type(ranges).__name__}")
    return tuple(ranges)


def check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _loaded_key(state: dict[str, Any]) -> SkipKey | None:
    """The key of a saved state, checked against its masks."""
    if state["key"] is None:
        return None
    try:
        key = SkipKey(**(state["key"] | {"dtype": getattr(torch, state["key"]["dtype"])}))
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"state: expected a key of {SkipKey._fields}, got {error}") from None
    shape = (key.batch, key.heads, key.tiles_q, masks.words(key.tiles_k))
    for name in ("mask", "read"):
        mask = state[name]
        if mask is None and name == "read":
            continue
        if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.shape != shape:
            raise ValueError(f"state: expected {name!r} to be int32 {list(shape)}")
    return key


def encoded(state: dict[str, Any]) -> Tensor:
    """A `state_dict` as uint8 `[n]`: eight bytes for the length of a JSON header, the header, and its tensors."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    layout = {name: [dtype_name(x.dtype), list(x.shape)] for name, x in tensors.items()}
    plain = {name: x for name, x in state.items() if name not in tensors}
    header = json.dumps({"state": plain, "tensors": layout}).encode()
    head = bytearray(struct.pack("<Q", len(header)) + header)
    parts = [x.detach().cpu().flatten().view(torch.uint8) for x in tensors.values()]
    return torch.cat((torch.frombuffer(head, dtype=torch.uint8), *parts))


def decoded(data: Tensor) -> dict[str, Any]:
    """The `state_dict` that was `encoded`. ValueError if the data is no such thing."""
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError("state: expected the uint8 tensor of a saved skip state")
    data = data.cpu()
    try:
        (size,) = struct.unpack("<Q", bytes(data[:8].tolist()))
        header = json.loads(bytes(data[8 : 8 + size].tolist()))
        state, place = header["state"], 8 + size
        for name, (dtype, shape) in header["tensors"].items():
            kind = getattr(torch, dtype)
            end = place + math.prod(shape) * kind.itemsize
            state[name] = data[place:end].clone().view(kind).view(shape)
            place = end
    except (struct.error, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise ValueError(f"state: expected a saved skip state, got {error}") from None
    return state
