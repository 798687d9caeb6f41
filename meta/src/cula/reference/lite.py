"""Skip-list softmax attention: exact attention over the key tiles of a mask, and the mask for the next call.

A key tile survives if for any row of the query tile its best score exceeds or nearly reaches the running maximum.
Sources: LiteAttention, arXiv 2511.11062; FlashAttention for the tile walk, arXiv 2205.14135.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cula_core.reference.common import work_dtype

_LOG2E = math.log2(math.e)
_WORD = 32  # tiles


def tile_grid(
    query_tokens: int, key_tokens: int, block_m: int = 128, block_n: int = 128
) -> tuple[int, int]:
    """Number of query tiles and key tiles, the last two dimensions of a mask."""
    return -(-query_tokens // block_m), -(-key_tokens // block_n)


def pack_tiles(tiles: Tensor) -> Tensor:
    """bool `[..., Nt]` to int32 words `[..., ceil(Nt / 32)]`: bit n % 32 of word n // 32 is tile n."""
    count = -(-tiles.shape[-1] // _WORD)
    padded = F.pad(tiles, (0, count * _WORD - tiles.shape[-1])).unflatten(-1, (count, _WORD))
    # Bit 31 weighs -2^31, so no sum of a word's weights leaves the range of int32.
    return (padded * _weights(tiles.device)).sum(-1, dtype=torch.int32)


def unpack_tiles(words: Tensor, tiles: int) -> Tensor:
    """int32 words `[..., W]` to bool `[..., tiles]`, the inverse of `pack_tiles`."""
    bits = (words.unsqueeze(-1) & _weights(words.device)) != 0
    return bits.flatten(-2)[..., :tiles].contiguous()


def _weights(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.int32, device=device) << torch.arange(
        _WORD, dtype=torch.int32, device=device
    )


def lite_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_mask: Tensor | None = None,
    *,
    threshold: float | None = -10.0,
    threshold_mode: str = "max",
    direction: int | Tensor = 1,
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
    grad_mask: Tensor | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention over the key tiles that `read_mask` lists; differentiable in q, k and v.

    Arguments and results are those of `cula.lite.lite_attention`, taken as checked, with v of any width. Lengths of
    packed sequences and a direction on the device are read back to the host. `deterministic` changes nothing.

    Scores are in log2 units, `q k scale log2(e)`, where tiles are judged. A NaN difference of scores does not keep a
    tile. A row that sees no key has out 0 and lse -inf, and passes on no gradient. Raises ValueError for `use_int8` and
    `grad_mask`.

    Example:
        >>> import torch
        >>> from cula.reference import lite_attention
        >>> q, k, v = torch.randn(3, 1, 300, 2, 16)  # each [B, S, H, D]
        >>> out, lse, _ = lite_attention(q, k, v, threshold=None)  # dense attention
        >>> swapped = (x.transpose(1, 2) for x in (q, k, v))
        >>> expected = torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)
        >>> torch.allclose(out, expected, atol=1e-4)
        True
    """
    for name, value in (("use_int8", use_int8 or None), ("grad_mask", grad_mask)):
        if value is not None:
            raise ValueError(
                f"{name}: expected {'False' if name == 'use_int8' else 'None'} for the reference implementation; the "
                "kernels of liteattention-sm89 serve it, on CUDA devices: pip install --find-links dist 'cula[sm89]'"
            )
    dtype, (heads, head_dim) = work_dtype(q, k, v), q.shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // k.shape[2]
    query = q.to(dtype).transpose(1, 2) * scale
    key, value = (x.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    sequences = _sequences(q, k, cu_seqlens_q, cu_seqlens_k)
    packed = cu_seqlens_q is not None
    longest = [max(s[i].stop - s[i].start for s in sequences) for i in (1, 2)]
    rows, keys = (
        most if given is None else given
        for most, given in zip(longest, (max_seqlen_q, max_seqlen_k), strict=True)
    )
    shape = (
        len(sequences) if packed else q.shape[0],
        heads,
        *tile_grid(rows, keys, block_m, block_n),
    )
    read, forced = _tiles(read_mask, shape, True, q), _tiles(must_do, shape, False, q)
    dense = threshold is None
    if threshold is None:
        threshold = -math.inf
    elif threshold_mode == "length":
        threshold = min(0.0, threshold - math.log2(max(keys, 1)))
    step = int(direction) if isinstance(direction, Tensor) else direction

    outs, lses, write = [], [], torch.zeros_like(read)
    for number, (where, from_rows, from_keys) in enumerate(sequences):
        masks = slice(number, number + 1) if packed else where
        own = (query[where, :, from_rows], key[where, :, from_keys], value[where, :, from_keys])
        result = _one_sequence(
            *own, read[masks], forced[masks], threshold, step, causal, block_m, block_n
        )
        outs.append(result[0])
        lses.append(result[1])
        grid = result[2].shape[2:]
        write[masks, :, : grid[0], : grid[1]] = result[2]
    attended = torch.cat(outs, dim=2).transpose(1, 2).to(q.dtype).contiguous()
    lse = torch.cat(lses, dim=2)
    if out is not None:
        attended = out.copy_(attended)
    if dense:
        return attended, lse[0] if packed else lse, None
    as_bool = read_mask is not None and read_mask.dtype == torch.bool
    return attended, lse[0] if packed else lse, write if as_bool else pack_tiles(write)


def _sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> list[tuple[slice, slice, slice]]:
    """Where the sequences are: of the batch, of the queries, of the keys. A dense batch counts as one."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [(slice(0, q.shape[0]), slice(0, q.shape[1]), slice(0, k.shape[1]))]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [
        (slice(0, 1), slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2]))
        for n in range(len(starts_q) - 1)
    ]


def _tiles(mask: Tensor | None, shape: tuple[int, ...], default: bool, q: Tensor) -> Tensor:
    """A mask in either form as bool of a shape."""
    if mask is None:
        return torch.full(shape, default, dtype=torch.bool, device=q.device)
    if mask.dtype == torch.int32:
        words = mask.expand(*mask.shape[:-1], -(-shape[3] // _WORD))
        mask = unpack_tiles(words, shape[3])
    return mask.expand(shape)


def _one_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    read: Tensor,
    forced: Tensor,
    threshold: float,
    direction: int,
    causal: bool,
    block_m: int,
    block_n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention `[B, H, S, D]` of sequences of one length, log-sum-exp, and the tiles that are kept."""
    rows, keys = query.shape[2], key.shape[2]
    query_tiles, key_tiles = tile_grid(rows, keys, block_m, block_n)
    outs = [query.new_zeros(*query.shape[:2], 0, value.shape[-1])]
    lses = [query.new_zeros(*query.shape[:2], 0)]
    kept = [read.new_zeros(*query.shape[:2], 0, key_tiles)]
    for m in range(query_tiles):
        tile = slice(m * block_m, min((m + 1) * block_m, rows))
        scores = query[:, :, tile] @ key.transpose(-1, -2)
        listed = read[:, :, m, :key_tiles]
        if causal:
            last = torch.arange(tile.start, tile.stop, device=query.device) + keys - rows
            hidden = torch.arange(keys, device=query.device) > last[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
            # Tiles that no row sees are not visited.
            first_keys = torch.arange(0, keys, block_n, device=query.device)
            listed = listed & (first_keys <= tile.stop - 1 + keys - rows)
        judged = scores.detach() * _LOG2E
        must_stay = forced[:, :, m, :key_tiles]
        kept.append(
            _kept_tiles(judged, listed, must_stay, threshold, direction, block_n)[:, :, None]
        )
        out, lse = _masked_attention(scores, value, listed, block_n)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2), torch.cat(kept, dim=2)


def _kept_tiles(
    scores: Tensor, listed: Tensor, forced: Tensor, threshold: float, direction: int, block_n: int
) -> Tensor:
    """Tiles of one query tile's next list: scores `[B, H, rows, Sk]` in log2 units, listed and forced `[B, H, Nt]`."""
    tiles = listed.shape[-1]
    padded = F.pad(scores, (0, tiles * block_n - scores.shape[-1]), value=-math.inf)
    tile_max = (
        padded.unflatten(-1, (tiles, block_n)).amax(-1).masked_fill(~listed[:, :, None], -math.inf)
    )
    visited = listed
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
    """Softmax attention and log-sum-exp over the keys of the listed tiles; zero and -inf where a row sees none.

    scores: -inf where a row does not see a key.
    """
    columns = listed.repeat_interleave(block_n, dim=-1)[..., : scores.shape[-1]][:, :, None]
    scores = scores.masked_fill(~columns, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    # A blind row keeps finite scores through the softmax, so that its gradient is zero and not NaN.
    scores = scores.masked_fill(blind, 0)
    out = (scores.softmax(-1) @ value).masked_fill(blind, 0)
    return out, scores.logsumexp(-1).masked_fill(blind[..., 0], -math.inf)
