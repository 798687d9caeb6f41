"""Pictures of skipped tiles."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import pytest
import torch
from module_helpers import (
    BLOCK_M,
    BLOCK_N,
    packed,
    qkv,
)
from torch import Tensor, nn

from liteattention_sm89 import masks
from liteattention_sm89.module import LiteAttention


def pixels(path: Path) -> Tensor:
    """A PNG of 8-bit colours without filters."""
    data, chunks = path.read_bytes(), {}
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place = 8
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        (check,) = struct.unpack(">I", data[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + size
    width, height, *rest = struct.unpack(">2I5B", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0] and b"IEND" in chunks
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    lines = lines.view(height, 1 + 3 * width)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("do_softmax", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_pictures_show_the_kept_tiles(tmp_path, causal, do_softmax):
    lite, (q, k, v) = LiteAttention(threshold=-3.0), qkv(2, 300, 450, 4, 2, 64)
    lite(q, k, v, causal=causal)
    lite(q, k, v, causal=causal)
    paths = lite.visualize_skips(
        q, k, torch.tensor([0, 3]), save_path=tmp_path, name_prefix="step", do_softmax=do_softmax
    )
    folders = [tmp_path / f"batch_{b}" / f"head_{h}" for b in (0, 1) for h in (0, 3)]
    assert paths == [folder / "step.png" for folder in folders]
    for path, (b, h) in zip(paths, ((0, 0), (0, 3), (1, 0), (1, 3))):
        image = pixels(path).int()
        assert image.shape == (300, 450, 3)
        kept = masks.unpack(lite.write_mask, 8)[b, h]
        kept = kept.repeat_interleave(BLOCK_M, 0)[:300].repeat_interleave(BLOCK_N, 1)[:, :450]
        grey = (image[..., 0] == image[..., 1]) & (image[..., 1] == image[..., 2])
        # Kept pixels without any weight are black; what is not kept is never that dark.
        assert torch.equal(grey & (image[..., 0] >= 50), ~kept)


def test_pictures_are_coarse(tmp_path):
    lite, (q, k, v) = LiteAttention(threshold=-math.inf), qkv(1, 300, 450, 1)
    lite(q, k, v)
    (path,) = lite.visualize_skips(q, k, [0], save_path=tmp_path, max_res=50)
    assert path.name == "visualization.png"
    image = pixels(path)
    assert image.shape == (50, 50, 3)
    probabilities = (q[0, :, 0] @ k[0, :, 0].mT / 4).softmax(-1)
    peak = nn.functional.adaptive_max_pool2d(probabilities[None], 50)[0]
    red = (2 * (peak.log2() / 20 + 1).clamp(0, 1)).clamp(max=1) * 255
    assert (image[..., 0] - red).abs().max() <= 1


def test_pictures_that_cannot_be_drawn(tmp_path):
    lite, (q, k, v) = LiteAttention(), qkv()
    with pytest.raises(RuntimeError, match="nothing to show before the first call"):
        lite.visualize_skips(q, k, [0], save_path=tmp_path)
    lite(q, k, v)
    with pytest.raises(ValueError, match="query, key: expected those of the last call"):
        lite.visualize_skips(q[:, 1:], k, [0], save_path=tmp_path)
    with pytest.raises(ValueError, match="heads_list: expected heads below 2, got 2"):
        lite.visualize_skips(q, k, [0, 2], save_path=tmp_path)
    with pytest.raises(ValueError, match="max_res"):
        lite.visualize_skips(q, k, [0], save_path=tmp_path, max_res=0)
    inputs, packing = packed([100, 50], [80, 120])
    lite(*inputs, **packing)
    with pytest.raises(ValueError, match="packed"):
        lite.visualize_skips(*inputs[:2], [0], save_path=tmp_path)
    assert not list(tmp_path.iterdir())
