"""Tiny transformers of diffusers with random weights, and attention to compare theirs with."""

from __future__ import annotations

import copy
import functools
import math
import os
import warnings
from importlib.util import find_spec

import pytest
import torch
from module_helpers import BLOCK_M, BLOCK_N
from torch import Tensor, nn
from torch.nn import functional

from liteattention_sm89 import masks
from liteattention_sm89.diffusers import apply_lite_attention

if not find_spec("diffusers") and not os.environ.get("CI"):
    pytest.skip("needs the extra `diffusers`", allow_module_level=True)

from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    MochiTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models import attention_dispatch  # noqa: F401

ALL = -math.inf
HEADS = {"num_attention_heads": 2}
VIDEO = {"in_channels": 4, "out_channels": 4} | HEADS
KINDS = {
    "wan": (
        WanTransformer3DModel,
        dict(attention_head_dim=24, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2,
             rope_max_seq_len=32, qk_norm="rms_norm_across_heads", **VIDEO),
    ),
    "flux": (
        FluxTransformer2DModel,
        dict(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
             joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **HEADS),
    ),
    "hunyuan": (
        HunyuanVideoTransformer3DModel,
        dict(attention_head_dim=10, num_layers=1, num_single_layers=1, num_refiner_layers=1,
             patch_size=1, guidance_embeds=False, text_embed_dim=16, pooled_projection_dim=8,
             rope_axes_dim=(2, 4, 4), **VIDEO),
    ),
    "cogvideox": (
        CogVideoXTransformer3DModel,
        dict(attention_head_dim=16, time_embed_dim=8, text_embed_dim=8, num_layers=2,
             sample_width=20, sample_height=18, sample_frames=13, max_text_seq_length=8, **VIDEO),
    ),
    "mochi": (
        MochiTransformer3DModel,
        dict(attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4,
             time_embed_dim=8, text_embed_dim=16, max_sequence_length=24, **HEADS),
    ),
}  # fmt: skip
LAYERS = {
    "wan": ["blocks.0.attn1", "blocks.1.attn1"],
    "flux": ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"],
    "hunyuan": ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"],
    "cogvideox": ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"],
    "mochi": ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"],
}


@functools.cache
def pristine(kind: str) -> nn.Module:
    torch.manual_seed(7)
    build, config = KINDS[kind]
    model = build(**config).eval()
    for name, weight in model.named_parameters():
        if "norm_q" in name and "attn2" not in name:
            weight.data.mul_(2)  # scores far enough apart for tiles to be dropped
    return model


def model_of(kind: str) -> nn.Module:
    return copy.deepcopy(pristine(kind))


def inputs_of(kind: str, batch: int = 1) -> dict:
    """Frames that differ from each other more than their pixels do: tiles of other frames can be dropped."""
    frames = 2 * torch.randn(batch, 4, 5, 1, 1) + 0.3 * torch.randn(batch, 4, 5, 18, 20)
    step = torch.full((batch,), 500)
    if kind == "flux":
        return {
            "hidden_states": frames[..., ::2, ::2].flatten(2).transpose(1, 2),
            "encoder_hidden_states": torch.randn(batch, 48, 32),
            "pooled_projections": torch.randn(batch, 32),
            "timestep": step / 1000,
            "img_ids": torch.cartesian_prod(
                torch.arange(5.0), torch.arange(9.0), torch.arange(10.0)
            ),
            "txt_ids": torch.zeros(48, 3),
        }
    size = {"wan": 16, "hunyuan": 16, "cogvideox": 8, "mochi": 16}[kind]
    text = torch.randn(batch, size if kind == "cogvideox" else 24, size)
    inputs = {"hidden_states": frames, "timestep": step, "encoder_hidden_states": text}
    if kind == "hunyuan":
        inputs["hidden_states"] = frames[..., ::2, ::2]
        inputs["pooled_projections"] = torch.randn(batch, 8)
    if kind in ("hunyuan", "mochi"):
        valid = torch.tensor([13, 20])[:batch, None]
        inputs["encoder_attention_mask"] = torch.arange(24) < valid
    if kind == "cogvideox":
        inputs |= {"hidden_states": frames.transpose(1, 2), "encoder_hidden_states": text[:, :8]}
    return inputs


@torch.no_grad()
def run(model: nn.Module, inputs: dict) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CPU autocast", category=UserWarning)
        return model(**inputs, return_dict=False)[0]


def later(inputs: dict) -> dict:
    moved = inputs["hidden_states"] + 0.02 * torch.randn_like(inputs["hidden_states"])
    return inputs | {"hidden_states": moved}


def wrapped(kind: str, threshold: float | None = -1.0, **options):
    model = model_of(kind)
    return model, apply_lite_attention(model, threshold, **{"min_tokens": 64} | options)


def expanded(words: Tensor, queries: int, keys: int) -> Tensor:
    """A mask of tiles as one of tokens, [B, H, Sq, Sk]."""
    tiles = masks.unpack(words, -(-keys // BLOCK_N))
    rows = tiles.repeat_interleave(BLOCK_M, 2)[:, :, :queries]
    return rows.repeat_interleave(BLOCK_N, 3)[..., :keys]


class PlainAttention:
    """scaled_dot_product_attention as a softmax in float64. Self-attentions take the next mask of a list."""

    def __init__(self, lists: list[Tensor]) -> None:
        self.lists = list(lists)

    def __call__(self, query, key, value, attn_mask=None, **_):
        scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        if query.shape[2] == key.shape[2] >= 64:
            words = self.lists.pop(0)
            if attn_mask is not None:
                words = words[::2]  # every other sequence holds the padding
            allowed = expanded(words, query.shape[2], key.shape[2])
            scores = scores.masked_fill(~allowed, -math.inf)
        return (scores.softmax(-1) @ value.double()).to(query.dtype)


class Attention(nn.Module):
    def __init__(self, processor) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, *args, **kwargs):
        return self.processor(self, *args, **kwargs)


class Direct:
    def __call__(self, attn, query, key, value, **kwargs):
        return functional.scaled_dot_product_attention(query, key, value, **kwargs)


def direct(threshold: float = ALL, **options):
    attention = Attention(Direct())
    return attention, apply_lite_attention(attention, threshold, **{"min_tokens": 0} | options)


def heads(batch=1, queries=200, keys=None, heads=2, heads_kv=None, dim=16) -> tuple[Tensor, ...]:
    q = torch.randn(batch, heads, queries, dim)
    k, v = torch.randn(2, batch, heads_kv or heads, keys or queries, dim)
    return q, k, v
