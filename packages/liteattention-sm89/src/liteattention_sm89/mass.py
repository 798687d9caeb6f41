"""Masks by tile mass: which tiles an approximate backward computes after an exact forward (the rule of BackLite).

    mass(m, n) = sum over the rows of query tile m and the keys of key tile n of exp(scale * q k^T - lse)
    of every key tile n the smallest masses, together less than a share `drop` of all that it has, leave

A gradient over the tiles that stay is an approximation: the terms of the others are taken as zero, while lse, and with
it every probability, stays that of the forward. The error of dv is bounded: over the keys of a tile, its norms add up
to less than `drop` times the mass of the tile times the largest norm of a row of dout. dk is bounded alike, dq only
summed over all queries: one query may lose every tile. The terms of dq and dk nearly cancel where few keys hold all the
probability of a row, so that their relative errors may be many times that of dv. The gradient over the read mask of a
forward is exact.

Plain torch on any device. Only shapes are read on the host, so that a call does not wait for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cula_core import arguments
from cula_core.dtypes import dtype_name

from . import masks
from .check import check_attention, check_number
from .config import BLOCK_M, BLOCK_N

__all__ = ["mask_by_mass", "tile_mass"]

# Scores that are held at once, as far as one tile of a group of heads is not more.
_SCORES = 2**24
# Shares of a column are counted in parts of this size: sums of integers are the same in every order.
_WHOLE = 2**40


@torch.no_grad()
def tile_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N[0],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """The softmax probability on every tile, summed over its rows: float32 `[B, Hq, Mt, Nt]`, packed `[N, Hq, Mt, Nt]`.

    q, k and the keywords are those of the `lite_attention` call that returned lse, float32 (or float64) `[B, Hq, Sq]`,
    packed `[Hq, Tq]`. Rows with lse -inf count as 0. After a dense call the masses of a query tile add up to the number
    of its rows that see a key. After a call over a list the tiles on the list do; the others hold what their scores
    come to against that lse, which has no bound, and NaN where their keys have it: give the list to `mask_by_mass`.

    The scores are computed anew, about 2^24 at a time: bfloat16 and float16 products with float32 sums, float64
    throughout for float64. Packed sequences cost as if each had max_seqlen_k keys.

    Raises TypeError or ValueError if an argument does not fit, as `lite_attention` does.
    """
    extent = check_attention(
        q=q, k=k, v=k, read_mask=None, threshold=None, threshold_mode="max", direction=1, scale=scale, causal=causal,
        must_do=None, block_m=block_m, block_n=block_n, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, use_int8=False, grad_mask=None, deterministic=False,
        out=None,
    )  # fmt: skip
    _check_lse(lse, q, cu_seqlens_q is not None)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    tiles = -(-extent.queries // block_m), -(-extent.keys // block_n)
    if not (q.numel() and k.numel() and extent.queries and extent.keys):
        return lse.new_zeros(extent.sequences, heads, *tiles, dtype=torch.float32)
    lse = lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    inputs = _Inputs(
        q=q.flatten(0, 1).unflatten(1, (-1, group)),
        k=k.flatten(0, 1),
        lse=lse.transpose(-1, -2).reshape(-1, heads // group, group),
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        causal=causal,
        block_m=block_m,
        block_n=block_n,
    )
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _masses(inputs, _whole_sequences(q, k, block_m), tiles[1])
    starts = cu_seqlens_q.long()
    firsts = F.pad(((starts.diff() + block_m - 1) // block_m).cumsum(0), (1, 0))
    groups = _packed_tiles(q.shape[1], starts, cu_seqlens_k.long(), firsts, block_m)
    mass = _masses(inputs, groups, tiles[1])[:, :, 0]
    place = firsts[:-1, None] + torch.arange(tiles[0], device=q.device)
    missing = place >= firsts[1:, None]
    mass = mass[place.clamp(max=mass.shape[0] - 1)].masked_fill_(missing[..., None, None], 0)
    return mass.transpose(1, 2).contiguous()


@torch.no_grad()
def mask_by_mass(mass: Tensor, drop: float, read_mask: Tensor | None = None) -> Tensor:
    """The tiles that hold most mass of every key tile: int32 words `[B, Hq, Mt, W]`, contiguous, for `grad_mask`.

    mass: float32 or float64 `[B, Hq, Mt, Nt]`, not negative, as `tile_mass` returns it. drop: 0 <= drop < 1; over the
    query tiles of a key tile, the smallest masses leave as long as their sum is below this share of all. Of equal
    masses the first query tile leaves first. Shares are rounded up to multiples of 2^-40. read_mask: int32 words
    `[B, Hq, Mt, W]` of a call over a list; only its tiles count, and only they can stay.

    Tiles without mass leave, also at drop = 0. A key tile with mass keeps at least one tile, a query tile may lose all.
    Where a mass is NaN the key tile keeps every tile that is not 0.

    The gradient over these tiles is an approximation, see the head of this file; it is exact at drop = 0, as far as no
    probability was rounded to 0. Raises TypeError or ValueError if an argument does not fit.
    """
    _check_mass(mass)
    check_number("drop", drop)
    if not 0 <= drop < 1:
        arguments.value_error("drop", "a share, 0 <= drop < 1", drop)
    if read_mask is not None:
        _check_read_mask(read_mask, mass)
        mass = torch.where(masks.unpack(read_mask, mass.shape[3]), mass, 0)
    share = mass / mass.sum(2, keepdim=True, dtype=torch.float64)
    parts = (share.nan_to_num(1.0) * _WHOLE).ceil().long()
    order = mass.sort(dim=2, stable=True).indices
    gone = parts.gather(2, order).cumsum(2) < math.ceil(drop * _WHOLE)
    gone = torch.empty_like(gone).scatter(2, order, gone)
    return masks.pack((mass != 0) & ~gone)


class _Inputs(NamedTuple):
    q: Tensor  # [tokens, Hkv, Hq // Hkv, D]
    k: Tensor  # [tokens, Hkv, D]
    lse: Tensor  # [tokens, Hkv, Hq // Hkv], in the dtype of the arithmetic
    scale: float
    causal: bool
    block_m: int
    block_n: int


class _Groups(NamedTuple):
    """G groups of `tiles` query tiles that follow each other in a sequence; the tensors are int64 [G]."""

    tiles: int
    start: Tensor  # of the sequence in q
    start_k: Tensor  # and in k
    length: Tensor  # rows of the sequence
    length_k: Tensor
    row: Tensor  # of the sequence, where the first tile starts
    known: tuple[int, int] | None  # length and length_k, if the same in all groups; row is 0 then


class _Rows(NamedTuple):
    """Query tiles of some pairs (x) of a group and a key head."""

    q: Tensor  # [x, rows, Hq // Hkv, D]
    lse: Tensor  # [x, rows, Hq // Hkv]
    last: Tensor  # [x, rows]: the last key that a row sees, below 0 for none
    end: int  # no row sees a key from here on
    clear: int  # every row with a key sees all keys before this one


def _whole_sequences(q: Tensor, k: Tensor, block_m: int) -> _Groups:
    (batch, rows), keys = q.shape[:2], k.shape[1]
    index = torch.arange(batch, device=q.device)
    lengths = torch.full_like(index, rows), torch.full_like(index, keys)
    tiles = -(-rows // block_m)
    return _Groups(
        tiles, index * rows, index * keys, *lengths, torch.zeros_like(index), (rows, keys)
    )


def _packed_tiles(
    tokens: int, starts: Tensor, starts_k: Tensor, firsts: Tensor, block_m: int
) -> _Groups:
    """A group for every query tile of packed sequences, and empty ones: as many as the number of tokens allows.

    firsts: int64 [N + 1], the tiles before each sequence.
    """
    sequences = starts.shape[0] - 1
    short = min(tokens, sequences)
    group = torch.arange(short + (tokens - short) // block_m, device=starts.device)
    n = torch.searchsorted(firsts[1:].contiguous(), group, right=True).clamp(max=sequences - 1)
    row = (group - firsts[n]) * block_m
    lengths = starts.diff()[n], starts_k.diff()[n]
    return _Groups(1, starts[n], starts_k[n], *lengths, row, None)


def _masses(inputs: _Inputs, groups: _Groups, key_tiles: int) -> Tensor:
    """float32 [G, Hq, tiles, key_tiles]."""
    block_m, block_n = inputs.block_m, inputs.block_n
    _, heads_k, share, _ = inputs.q.shape
    pairs = groups.start.shape[0] * heads_k
    mass = inputs.q.new_zeros(pairs, share, groups.tiles, key_tiles, dtype=torch.float32)
    room = max(_SCORES // (share * block_m * block_n), 1)
    width = min(key_tiles, room)
    step = min(groups.tiles, room // width)
    many = room // (width * step)
    for x in range(0, pairs, many):
        pair = torch.arange(x, min(x + many, pairs), device=mass.device)
        group, head = pair // heads_k, (pair % heads_k)[:, None]
        start, length = groups.start_k[group][:, None], inputs.k.shape[0]
        for m in range(0, groups.tiles, step):
            place = slice(m, min(m + step, groups.tiles))
            rows = _rows(inputs, groups, group, head, place, key_tiles)
            for n in range(0, -(-rows.end // block_n), width):
                tokens = torch.arange(
                    n * block_n, min(n + width, key_tiles) * block_n, device=mass.device
                )
                key = inputs.k[(start + tokens).clamp(max=length - 1), head]
                found = _per_row(rows, key, tokens, n * block_n, inputs.scale, block_n)
                found = found.unflatten(1, (-1, block_m)).sum(2)
                mass[x : x + many, :, place, n : n + width] = found.transpose(1, 2)
    return mass.unflatten(0, (-1, heads_k)).flatten(1, 2)


def _rows(
    inputs: _Inputs, groups: _Groups, group: Tensor, head: Tensor, tiles: slice, key_tiles: int
) -> _Rows:
    first, stop = tiles.start * inputs.block_m, tiles.stop * inputs.block_m
    start, length, length_k, row = (
        x[group][:, None] for x in (groups.start, groups.length, groups.length_k, groups.row)
    )
    rows = row + torch.arange(first, stop, device=row.device)
    tokens = (start + rows).clamp(max=inputs.q.shape[0] - 1)
    last = length_k - length + rows if inputs.causal else length_k - 1
    last = torch.where(rows < length, last, -1)
    if groups.known is None:
        end, clear = key_tiles * inputs.block_n, 0
    elif inputs.causal:
        more = groups.known[1] - groups.known[0]
        end, clear = min(max(stop + more, 0), groups.known[1]), max(first + 1 + more, 0)
    else:
        end = clear = groups.known[1]
    return _Rows(inputs.q[tokens, head], inputs.lse[tokens, head], last, end, clear)


def _per_row(
    rows: _Rows, key: Tensor, tokens: Tensor, first: int, scale: float, block_n: int
) -> Tensor:
    """The mass on the tiles of the keys [x, tokens, D] for every row: [x, rows, Hq // Hkv, tiles]."""
    query, last = rows.q.flatten(1, 2), rows.last[:, :, None, None]
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        scores = torch.bmm(query, key.mT, out_dtype=torch.float32)
    else:
        scores = query.to(rows.lse.dtype) @ key.mT.to(rows.lse.dtype)
    scores = scores.unflatten(1, rows.lse.shape[1:])
    torch.add(-rows.lse[..., None], scores, alpha=scale, out=scores)
    hidden = max(rows.clear - first, 0)
    if hidden < tokens.shape[0]:
        scores[..., hidden:].masked_fill_(tokens[hidden:] > last, -math.inf)
    mass = scores.exp_().unflatten(-1, (-1, block_n)).sum(-1)
    # Padding and rows without keys hold anything until here.
    return mass.masked_fill_((last < 0) | (rows.lse == -math.inf)[..., None], 0)


def _check_lse(lse: Tensor, q: Tensor, packed: bool) -> None:
    arguments.tensor("lse", lse)
    _check_floats("lse", lse)
    batch, tokens, heads, _ = q.shape
    shape = [heads, tokens] if packed else [batch, heads, tokens]
    if list(lse.shape) != shape:
        name = "[Hq, Tq]" if packed else "[B, Hq, Sq]"
        arguments.value_error("lse", f"{name} = {shape}", list(lse.shape))
    arguments.device("lse", lse, q)


def _check_mass(mass: Tensor) -> None:
    arguments.tensor("mass", mass)
    _check_floats("mass", mass)
    if mass.dim() != 4:
        arguments.value_error("mass", "4 dimensions [B, Hq, Mt, Nt]", list(mass.shape))


def _check_read_mask(read_mask: Tensor, mass: Tensor) -> None:
    arguments.tensor("read_mask", read_mask)
    if read_mask.dtype != torch.int32:
        arguments.type_error("read_mask", "int32 words of 32 tiles", dtype_name(read_mask.dtype))
    shape = [*mass.shape[:3], masks.words(mass.shape[3])]
    if list(read_mask.shape) != shape:
        arguments.value_error("read_mask", f"[B, Hq, Mt, W] = {shape}", list(read_mask.shape))
    arguments.device("read_mask", read_mask, mass, "mass")


def _check_floats(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        arguments.type_error(name, "float32 or float64", dtype_name(tensor.dtype))
