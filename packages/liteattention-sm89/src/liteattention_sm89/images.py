"""Pictures of attention maps and of the tiles that a mask lists, written as PNG with the standard library."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import masks
from .state import SkipKey, SkipState, check_int


def draw(
    state: SkipState, query: Tensor, key: Tensor, heads_list: Iterable[int] | Tensor, scale: float | None,
    folder: Path, max_res: int, name: str, do_softmax: bool,
) -> list[Path]:  # fmt: skip
    """What `LiteAttention.visualize_skips` describes, of a state."""
    skip_key, mask = state.key, state.written
    if skip_key is None or mask is None:
        raise RuntimeError("visualize_skips: there is nothing to show before the first call")
    if skip_key.packed:
        raise ValueError("visualize_skips: packed sequences cannot be shown")
    if SkipKey.of(query, key, skip_key.causal) != skip_key:
        raise ValueError(f"query, key: expected those of the last call, {skip_key}")
    check_int("max_res", max_res, 1)
    heads = heads_list.tolist() if isinstance(heads_list, Tensor) else list(heads_list)
    for head in heads:
        if not 0 <= head < skip_key.heads:
            raise ValueError(f"heads_list: expected heads below {skip_key.heads}, got {head}")
    scale = skip_key.head_dim**-0.5 if scale is None else scale
    paths = []
    for b in range(skip_key.batch):
        for h in heads:
            rows = query[b, :, h].float() * scale
            keys = key[b, :, h * skip_key.heads_kv // skip_key.heads].float()
            level = _coarse_map(rows, keys, max_res, skip_key.causal, do_softmax)
            kept = masks.unpack(mask[b, h], skip_key.tiles_k)
            path = folder / f"batch_{b}" / f"head_{h}" / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_png(path, _coloured(level, _per_cell(kept, level, skip_key)))
            paths.append(path)
    return paths


def _coarse_map(query: Tensor, key: Tensor, max_res: int, causal: bool, do_softmax: bool) -> Tensor:
    """Levels in [0, 1], at most max_res a side: the maximum over every cell of the scores or probabilities."""
    rows, keys = query.shape[0], key.shape[0]
    height, width = min(max_res, rows), min(max_res, keys)
    tokens = torch.arange(keys, device=key.device)
    lines = []
    for i in range(height):
        first, last = i * rows // height, -(-(i + 1) * rows // height)
        scores = query[first:last] @ key.mT
        if causal:
            horizon = torch.arange(first, last, device=key.device) + keys - rows
            scores = scores.masked_fill(tokens > horizon[:, None], -math.inf)
        if do_softmax:
            scores = scores.softmax(-1).nan_to_num(0)
        lines.append(F.adaptive_max_pool1d(scores.amax(0, keepdim=True), width)[0])
    level = torch.stack(lines)
    if do_softmax:
        return (level.log2() / 20 + 1).clamp(0, 1)
    low, high = level.masked_fill(level == -math.inf, math.inf).amin(), level.amax()
    return ((level - low) / (high - low).clamp(min=1e-30)).nan_to_num(0).clamp(0, 1)


def _per_cell(kept: Tensor, level: Tensor, key: SkipKey) -> Tensor:
    """Which cells of the map belong to a kept tile, by the first token of the cell: bool like `level`."""
    height, width = level.shape
    rows = torch.arange(height, device=kept.device) * key.seqlen_q // height // key.block_m
    columns = torch.arange(width, device=kept.device) * key.seqlen_k // width // key.block_n
    return kept[rows][:, columns]


def _coloured(level: Tensor, kept: Tensor) -> Tensor:
    """uint8 [height, width, 3]: black over red to yellow where kept, half as bright a grey elsewhere."""
    red, green = (2 * level).clamp(max=1), (2 * level - 1).clamp(min=0)
    colour = torch.stack((red, green, 0.4 * red * (1 - green)), -1)
    grey = (0.2 + 0.5 * level).unsqueeze(-1)
    return (torch.where(kept.unsqueeze(-1), colour, grey) * 255).round().to(torch.uint8).cpu()


def _write_png(path: Path, pixels: Tensor) -> None:
    height, width, _ = pixels.shape
    # Every line starts with the number of its filter, 0 for none.
    lines = F.pad(pixels.flatten(1), (1, 0)).flatten().tolist()

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(lines)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b""))
