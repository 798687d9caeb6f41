"""Skip-list attention over head dimensions and lengths: dense, nothing skipped, and an eighth of the tiles; bf16."""

from __future__ import annotations

import dataclasses

from benchmarks.harness.registry import Setting
from benchmarks.ops.lite import lite_attention
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite.problem import setting

# Those that kernels are built for; others are padded to the next one.
DIMS = (64, 96, 128, 192, 256)
DIM, TOKENS = 128, 8192
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DENSITY = 1 / 8


def settings(quick: bool) -> list[Setting]:
    """Every head dimension at one length, then every length at one head dimension, each in three ways."""
    shapes = [(TOKENS, dim) for dim in DIMS]
    shapes += [(tokens, DIM) for tokens in LENGTHS if tokens != TOKENS]
    if quick:
        shapes = [(1024, DIM)]
    found = []
    for tokens, dim in shapes:
        found += [setting(kind, tokens, dim=dim) for kind in ("dense", "full")]
        found.append(setting("list", tokens, dim=dim, density=DENSITY))
    return found


NOTES = (
    lite_attention.NOTES[0],
    "One batch row of 16 heads: every head dimension that kernels are built for at 8192 tokens, and 1024 to 32768 "
    "tokens at a head dimension of 128.",
    *lite_attention.NOTES[1:2],
    *lite_attention.NOTES[3:5],
    "torch_flash and torch_cudnn are tried with every head dimension, and left out where they refuse it.",
    lite_attention.NOTES[-1],
)

OP = dataclasses.replace(
    lite_attention.OP,
    name="lite_sweeps",
    title="Skip-list attention over head dimensions and lengths, bf16",
    settings=settings,
    providers=(
        lite_providers.LITE,
        lite_providers.LITE_DENSE,
        *(
            dataclasses.replace(provider, supports=lite_providers.torch_runs(backend))
            for provider, backend in (
                (lite_providers.TORCH_FLASH, "FLASH_ATTENTION"),
                (lite_providers.TORCH_CUDNN, "CUDNN_ATTENTION"),
            )
        ),
    ),
    notes=NOTES,
)
