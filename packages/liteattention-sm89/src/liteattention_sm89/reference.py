"""Skip-list softmax attention in plain torch: the oracle of the kernels and the implementation on a CPU.

    S = log2(e) * scale * q k^T          P = softmax over the visible keys of the listed tiles          out = P v
    keep tile n  <=>  first one visited, or must_do(n), or max(S_r over tile n) - max(S_r over the tiles visited before)
                      > threshold for some row r of the query tile

Every listed tile enters the output; what is kept is the list for the next call. What the keys and values of a tile hold
matters only where the tile is listed. Sources: LiteAttention, arXiv 2511.11062; FlashAttention for the tiles, arXiv
2205.14135.

Runs on any device, one query tile at a time: the scores take [B, H, block_m, Sk] unless autograd saves them all. Only
cu_seqlens is read back to the host. Arguments are taken as checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import KEY_GROUP, QUERY_GROUP
from .masks import pack, unpack

_LOG2E = math.log2(math.e)


def lite_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_mask: Tensor | None = None,
    *,
    threshold: float = -10.0,
    direction: int = 1,
    scale: float | None = None,
    causal: bool = False,
    must_do: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 64,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    use_int8: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the key tiles that `read_mask` lists, and the list for the next call.

    q: [B, Sq, Hq, D]. k: [B, Sk, Hkv, D]. v: [B, Sk, Hkv, DV]. Query head h reads key head h // (Hq // Hkv).
    read_mask: int32 [B, Hq, Mt, W], bit n % 32 of word n // 32 lists key tile n for a query tile; None lists all.
    Mt = ceil(Sq / block_m), W = ceil(Nt / 32), Nt = ceil(Sk / block_n). must_do: int32 words that broadcast to it,
    whose tiles are kept whenever they are visited. scale: D ** -0.5 by default.

    direction: 1 visits the listed tiles in ascending order, -1 in descending order. threshold: log2 units, usually
    negative, and more negative keeps more: -inf keeps all, 0 the tiles that raise the maximum of some row, +inf the
    first one only. A row that sees no key of a tile does not keep it. None of these changes the output.

    causal: key j is visible to query i if j <= i + Sk - Sq. Tiles that no row of the query tile sees are not listed,
    whatever the mask says.

    Packed: q is [1, Tq, Hq, D], k and v are [1, Tk, Hkv, ...], cu_seqlens_q and cu_seqlens_k are int [N + 1], and the
    masks have N in the place of B. Tiles are counted from the start of each sequence; Mt and Nt are those of
    max_seqlen_q and max_seqlen_k (the longest sequence by default), and a sequence lists none beyond its own end.

    use_int8: scores are products of q and k rounded to 8 bits: 16 queries of a head, or 64 keys less their mean over
    all tokens, have one scale, largest magnitude / 127. lse includes what the mean adds to the scores.

    Returns (out, lse, write_mask). out: [B, Sq, Hq, DV] in q's dtype. lse: [B, Hq, Sq], packed [Hq, Tq], natural log.
    The arithmetic and lse are fp32, or fp64 when q is fp64. write_mask: int32 [B, Hq, Mt, W], a subset of read_mask.
    out and lse are differentiable in q, k and v, which gives the gradient of exactly what ran. A row that sees no key
    has out 0 and lse -inf, and passes on no gradient.
    """
    problems = _problems(q, k, cu_seqlens_q, cu_seqlens_k)
    shape = _mask_shape(q, problems, block_m, block_n, max_seqlen_q, max_seqlen_k)
    read, forced = _bits(read_mask, shape, True, q.device), _bits(must_do, shape, False, q.device)
    shift = None
    dtype = q.dtype
    if use_int8:
        q, k, shift = _rounded(q, k, problems, _scale(q, scale))
    query, key, value = _work_tensors(q, k, v, scale)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf)
    write = torch.zeros(shape, dtype=torch.bool, device=q.device)
    for tile in _query_tiles(read, problems, block_m, block_n, causal):
        scores = _scores(query, key, tile)
        write[tile.place] = _kept(
            scores.detach() * _LOG2E, tile.listed, forced[tile.place], threshold, direction, block_n
        )
        # Blind rows keep finite scores through the softmax, so that their gradient is zero and not NaN.
        blind = ~tile.visible.any(-1)
        scores = scores.masked_fill(blind[..., None], 0)
        mixed = scores.softmax(-1) @ _listed_only(value, tile)
        out[:, :, tile.rows] = mixed.masked_fill(blind[..., None], 0)
        lse[:, :, tile.rows] = scores.logsumexp(-1).masked_fill(blind, -math.inf)
    out = out.transpose(1, 2).contiguous().to(dtype)
    if shift is not None:
        lse = lse + shift
    return out, lse if cu_seqlens_q is None else lse[0], pack(write)


@torch.no_grad()
def masked_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Tensor | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    dlse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    block_m: int = 128,
    block_n: int = 64,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of the attention over the listed tiles, without autograd and one query tile at a time.

        P = exp(scale * q k^T - lse)      dS = P * (dout v^T - rowsum(dout * out) + dlse)
        dq = scale * dS k                 dk = scale * dS^T q                 dv = P^T dout

    with P zero outside the listed tiles. Arguments as in `lite_attention`: `mask` is its read mask, of tiles of block_m
    queries and block_n keys, and dout, out, lse and dlse (the gradient of lse) have the shapes of its results.

    Without out and lse, or with those of a forward over the same tiles, the gradients are exact. With out and lse of a
    forward over more tiles they are an approximation: the terms of the tiles that are not listed are left out.
    """
    problems = _problems(q, k, cu_seqlens_q, cu_seqlens_k)
    shape = _mask_shape(q, problems, block_m, block_n, max_seqlen_q, max_seqlen_k)
    read = _bits(mask, shape, True, q.device)
    query, key, value = _work_tensors(q, k, v, scale)
    # Heads before tokens, as in the work tensors; packed rows of lse come without a batch.
    dout = dout.to(query.dtype).transpose(1, 2)
    out = None if out is None else out.to(query.dtype).transpose(1, 2)
    lse, dlse = (
        None if x is None else x.to(query.dtype).reshape(query.shape[:-1]) for x in (lse, dlse)
    )
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for tile in _query_tiles(read, problems, block_m, block_n, causal):
        scores = _scores(query, key, tile)
        row_lse = scores.logsumexp(-1) if lse is None else lse[:, :, tile.rows]
        blind = row_lse == -math.inf
        weights = torch.exp(scores - row_lse.masked_fill(blind, math.inf)[..., None])
        row_dout = dout[:, :, tile.rows].masked_fill(blind[..., None], 0)
        dweights = row_dout @ _listed_only(value, tile).mT
        product = weights * dweights if out is None else row_dout * out[:, :, tile.rows]
        delta = product.sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, :, tile.rows].masked_fill(blind, 0)
        dscores = weights * (dweights - delta[..., None])
        dq[:, :, tile.rows] = dscores @ _listed_only(key, tile)
        dk[:, :, tile.keys] += dscores.mT @ query[:, :, tile.rows]
        dv[:, :, tile.keys] += weights.mT @ row_dout
    # `query` carries the scale already, and so does dk.
    dq = dq * _scale(q, scale)
    dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in (dq, dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Problem(NamedTuple):
    """Sequences that are handled at once: all of a batch, or one packed sequence."""

    batch: slice  # of the masks
    rows: slice  # query tokens
    keys: slice  # key tokens


class _QueryTile(NamedTuple):
    """A query tile of all heads, and what it visits."""

    place: tuple[slice, slice, int, slice]  # its tiles in a mask [B, H, Mt, Nt]
    rows: slice  # query tokens
    keys: slice  # key tokens of the sequence
    listed: Tensor  # [B, H, Nt]
    columns: Tensor  # [B, H, 1, keys]: the key lies in a listed tile
    visible: Tensor  # [B, H, rows, keys]: ... and the row sees it


def _problems(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> list[_Problem]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [_Problem(slice(0, q.shape[0]), slice(0, q.shape[1]), slice(0, k.shape[1]))]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [
        _Problem(slice(n, n + 1), slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2]))
        for n in range(len(starts_q) - 1)
    ]


def _length(tokens: slice) -> int:
    return tokens.stop - tokens.start


def _mask_shape(
    q: Tensor,
    problems: list[_Problem],
    block_m: int,
    block_n: int,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, int, int, int]:
    """(B, Hq, Mt, Nt), with the number of sequences for B."""
    if max_seqlen_q is None:
        max_seqlen_q = max((_length(problem.rows) for problem in problems), default=0)
    if max_seqlen_k is None:
        max_seqlen_k = max((_length(problem.keys) for problem in problems), default=0)
    batch = problems[-1].batch.stop if problems else 0
    return batch, q.shape[2], -(-max_seqlen_q // block_m), -(-max_seqlen_k // block_n)


def _bits(
    mask: Tensor | None, shape: tuple[int, int, int, int], default: bool, device: torch.device
) -> Tensor:
    """The mask as bool of this shape; `default` everywhere for None."""
    if mask is None:
        return torch.full((), default, dtype=torch.bool, device=device).expand(shape)
    return unpack(mask, shape[-1]).expand(shape)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _work_tensors(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """scale * q, k and v as [B, Hq, tokens, dim] in the dtype of the arithmetic."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // k.shape[2]
    key, value = (x.to(dtype).transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    return q.to(dtype).transpose(1, 2) * _scale(q, scale), key, value


def _rounded(
    q: Tensor, k: Tensor, problems: list[_Problem], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q and centred k on their grids of 8-bit integers, and what the mean of k adds to every score of a row."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    query, key = q.to(dtype), k.to(dtype)
    shift = query.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    centred = torch.empty_like(key)
    for problem in problems:
        part = key[:, problem.keys]
        mean = part.sum(1, keepdim=True) / max(part.shape[1], 1)
        centred[:, problem.keys] = part - mean
        mean = mean.repeat_interleave(q.shape[2] // k.shape[2], 2)
        shift[..., problem.rows] = scale * (query[:, problem.rows] * mean).sum(-1).transpose(1, 2)
    key = centred
    found = []
    for x, rows in ((query, QUERY_GROUP), (key, KEY_GROUP)):
        y = torch.empty_like(x)
        for problem in problems:
            tokens = problem.rows if x is query else problem.keys
            part = x[:, tokens]
            padded = F.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % rows)).unflatten(1, (-1, rows))
            largest = padded.abs().amax((2, 4), keepdim=True).clamp(min=1e-15)
            grid = (padded * (127 / largest)).round() * (largest / 127)
            y[:, tokens] = grid.flatten(1, 2)[:, : part.shape[1]]
        found.append(y)
    return found[0], found[1], shift


def _query_tiles(
    read: Tensor, problems: list[_Problem], block_m: int, block_n: int, causal: bool
) -> Iterator[_QueryTile]:
    """The query tiles of every sequence in turn; read: bool [B, H, Mt, Nt]."""
    for batch, rows, keys in problems:
        length, length_k = _length(rows), _length(keys)
        tiles = -(-length_k // block_n)
        tokens = torch.arange(length_k, device=read.device)
        for m, first in enumerate(range(0, length, block_m)):
            last = min(first + block_m, length)
            place = (batch, slice(None), m, slice(tiles))
            listed = read[place]
            seen = torch.ones(last - first, length_k, dtype=torch.bool, device=read.device)
            if causal:
                horizon = torch.arange(first, last, device=read.device) + length_k - length
                seen = tokens <= horizon[:, None]
                # The last row sees the most, and of each tile the first key before all others.
                listed = listed & seen[-1, ::block_n]
            columns = listed.repeat_interleave(block_n, -1)[:, :, None, :length_k]
            tile_rows = slice(rows.start + first, rows.start + last)
            yield _QueryTile(place, tile_rows, keys, listed, columns, columns & seen)


def _listed_only(x: Tensor, tile: _QueryTile) -> Tensor:
    """Keys or values of the tile's sequence with zeros where no tile is listed: 0 * NaN would not be 0."""
    return x[:, :, tile.keys].masked_fill(~tile.columns.mT, 0)


def _scores(query: Tensor, key: Tensor, tile: _QueryTile) -> Tensor:
    """Natural log units, [B, H, rows, keys], -inf where invisible."""
    scores = query[:, :, tile.rows] @ _listed_only(key, tile).mT
    return scores.masked_fill(~tile.visible, -math.inf)


def _kept(
    scores: Tensor, listed: Tensor, forced: Tensor, threshold: float, direction: int, block_n: int
) -> Tensor:
    """Which listed tiles stay: scores [B, H, rows, keys] in log2 units, -inf where invisible; the rest [B, H, Nt]."""
    tiles = listed.shape[-1]
    padded = F.pad(scores, (0, tiles * block_n - scores.shape[-1]), value=-math.inf)
    peak = padded.unflatten(-1, (tiles, block_n)).amax(-1)
    if direction < 0:
        peak, listed, forced = peak.flip(-1), listed.flip(-1), forced.flip(-1)
    # An unlisted tile's peak is -inf, so that it does not move the running maximum.
    before = F.pad(peak.cummax(-1).values, (1, 0), value=-math.inf)[..., :-1]
    near = (peak - before > threshold).any(-2)
    first = listed.cumsum(-1) == 1
    kept = listed & (first | forced | near)
    return kept.flip(-1) if direction < 0 else kept
