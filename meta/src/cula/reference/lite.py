"""Skip-list softmax attention: exact attention over the key tiles of a mask, and the mask for the next call.

A key tile survives if for any row of the query tile its best score exceeds or nearly reaches the running maximum.
Sources: LiteAttention, arXiv 2511.11062; FlashAttention for the tile walk, arXiv 2205.14135.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cula.reference._common import compute_dtype

_LOG2E = math.log2(math.e)


def tile_grid(
    query_tokens: int, key_tokens: int, block_m: int = 128, block_n: int = 128
) -> tuple[int, int]:
    """Number of query tiles and key tiles, the last two dimensions of a mask."""
    return -(-query_tokens // block_m), -(-key_tokens // block_n)


def lite_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_mask: Tensor | None = None,
    *,
    threshold: float = -10.0,
    threshold_mode: str = "max",
    direction: int = 1,
    scale: float | None = None,
    must_do: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Non-causal attention over the key tiles that `read_mask` lists; differentiable in q, k and v.

    q `[B, Sq, Hq, D]`; k `[B, Sk, Hkv, D]`; v `[B, Sk, Hkv, DV]`; Hq a multiple of Hkv, query head h reads key head
    `h // (Hq // Hkv)`. read_mask bool `[B, Hq, Mt, Nt]` over tiles of block_m queries and block_n keys, None for all;
    must_do bool, broadcastable to it: tiles that are kept whenever they are visited. scale defaults to `D ** -0.5`.

    The listed tiles are visited in ascending order (direction 1) or descending order (direction -1). With scores in
    log2 units, `q k scale log2(e)`, a visited tile is kept for the next call if it is the first one, or if for any row
    `(tile's row maximum) - (row maximum of the tiles before) > threshold`; a NaN difference does not keep it. The
    threshold is usually negative, and more negative keeps more; with threshold_mode "length" it is
    `min(0, threshold - log2(Sk))`, so that 2**threshold limits all dropped keys of a row together and not each of them.
    Every listed tile enters the output, kept or not.

    Returns `(out, lse, write_mask)`: out `[B, Sq, Hq, DV]` in q's dtype; lse `[B, Hq, Sq]`, natural log, fp32 (fp64 for
    fp64 input); write_mask a subset of read_mask. A query tile that lists nothing gives out 0, lse -inf and an empty
    row.
    """
    dtype, (batch, rows, heads, head_dim) = compute_dtype(q, k, v), q.shape
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // k.shape[2]
    query = q.to(dtype).transpose(1, 2) * scale
    key, value = (x.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    query_tiles, key_tiles = tile_grid(rows, k.shape[1], block_m, block_n)
    shape = (batch, heads, query_tiles, key_tiles)
    read = torch.ones(shape, dtype=torch.bool, device=q.device) if read_mask is None else read_mask
    forced = torch.zeros((), dtype=torch.bool, device=q.device) if must_do is None else must_do
    forced = forced.expand(shape)
    if threshold_mode == "length":
        threshold = min(0.0, threshold - math.log2(max(k.shape[1], 1)))

    outs, lses, kept = (
        [query.new_zeros(batch, heads, 0, v.shape[-1])],
        [query.new_zeros(batch, heads, 0)],
        [],
    )
    for m in range(query_tiles):
        scores = query[:, :, m * block_m : (m + 1) * block_m] @ key.transpose(-1, -2)
        listed = read[:, :, m]
        kept.append(
            _kept_tiles(
                scores.detach() * _LOG2E, listed, forced[:, :, m], threshold, direction, block_n
            )
        )
        out, lse = _masked_attention(scores, value, listed, block_n)
        outs.append(out)
        lses.append(lse)
    write_mask = torch.stack(kept, dim=2) if kept else read.clone()
    return (
        torch.cat(outs, dim=2).transpose(1, 2).to(q.dtype).contiguous(),
        torch.cat(lses, dim=2),
        write_mask,
    )


def _kept_tiles(
    scores: Tensor, listed: Tensor, forced: Tensor, threshold: float, direction: int, block_n: int
) -> Tensor:
    """Tiles of one query tile's next list: scores `[B, H, rows, Sk]` in log2 units, listed and forced `[B, H, Nt]`."""
    tiles = listed.shape[-1]
    padded = F.pad(scores, (0, tiles * block_n - scores.shape[-1]), value=-math.inf)
    tile_max = (
        padded.unflatten(-1, (tiles, block_n)).amax(-1).masked_fill(~listed[:, :, None], -math.inf)
    )
    visited, forced = listed, forced
    if direction < 0:
        tile_max, visited, forced = tile_max.flip(-1), visited.flip(-1), forced.flip(-1)
    running = F.pad(tile_max.cummax(-1).values, (1, 0), value=-math.inf)[..., :-1]
    near = (tile_max - running > threshold).any(-2)
    first = visited.cumsum(-1) == 1
    keep = visited & (first | near | forced)
    return keep.flip(-1) if direction < 0 else keep


def _masked_attention(
    scores: Tensor, value: Tensor, listed: Tensor, block_n: int
) -> tuple[Tensor, Tensor]:
    """Softmax attention and log-sum-exp over the keys of the listed tiles; zero and -inf where none is listed."""
    columns = listed.repeat_interleave(block_n, dim=-1)[..., : scores.shape[-1]][:, :, None]
    empty = ~listed.any(-1)[:, :, None, None]
    # an empty row keeps finite scores through the softmax, so that its gradient is zero and not NaN
    scores = scores.masked_fill(~columns, -math.inf).masked_fill(empty, 0)
    out = (scores.softmax(-1) @ value).masked_fill(empty, 0)
    return out, scores.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
