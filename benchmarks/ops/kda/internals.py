"""What the benchmarks use of the KDA packages beyond their public functions; no other file here imports that.

A package is named by its import name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from cula_core.delta_rule import plan as planning
from cula_core.delta_rule.config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    MIN_SEGMENT_CHUNKS,
    TRIANGLE,
    workspace_bytes,
)

# The package that serves each compute capability.
PACKAGES = {(9, 0): "cula_cp_sm90", (10, 0): "cula_kda_sm100", (10, 3): "cula_kda_sm100"}
KERNELS = ("prepare", "scan", "merge", "recurrence")


def package() -> str | None:
    """The package that serves this machine's GPU, or None; without a GPU one whose reference serves the CPU."""
    on_gpu = torch.cuda.is_available()
    return PACKAGES.get(torch.cuda.get_device_capability() if on_gpu else (9, 0))


@dataclass(frozen=True)
class Sizes:
    """Facts of the kernels of a package.

    chunk, head_dim: tokens of a chunk, and channels of a head. v_tiles: tiles that the columns of v are divided into.
    block_bytes: bytes that the kernel prepare writes per chunk and value head. query_bytes: those of them that only
    outputs need, and states do not. min_segment: tokens of the shortest segment that a sequence is cut into.
    """

    chunk: int
    head_dim: int
    v_tiles: int
    block_bytes: int
    query_bytes: int
    min_segment: int


def _target(name: str) -> Any:
    return import_module(f"{name}.arch").TARGET


def sizes(name: str) -> Sizes:
    """The sizes of a package's kernels."""
    return Sizes(
        chunk=CHUNK,
        head_dim=HEAD_DIM,
        v_tiles=_target(name).v_tiles,
        block_bytes=BLOCK_BYTES,
        query_bytes=2 * (CHUNK * HEAD_DIM + TRIANGLE),
        min_segment=MIN_SEGMENT_CHUNKS * CHUNK,
    )


def plan(
    name: str,
    batch: int,
    tokens: int,
    value_heads: int,
    sequences: int | None,
    multiprocessors: int,
    longest: int | None = None,
) -> Any:
    """How a package spreads a call over a card: `tiles` of v per CTA, `segments`, `segment_tokens` and `split`."""
    shape = (batch, tokens, value_heads, sequences)
    workspace = workspace_bytes(*shape)
    return planning.plan(_target(name), *shape, multiprocessors, workspace, longest=longest)


def pace_us(chain_us: float, memory_us: float) -> float:
    """The planner's time of a scan from the times that its longest chain and the memory take."""
    return planning._pace_us(chain_us, memory_us)


def planner_costs(name: str) -> Any:
    """The costs that a package's planner counts with: start_us, chain_us, block_us and others."""
    return _target(name).costs


def kernel_of(config: Any) -> str:
    """The name of the kernel that a configuration is compiled to: one of KERNELS, or `factors`."""
    name = type(config).__name__.removesuffix("Config").lower()
    return "scan" if name == "recurrence" and config.scan else name


def launching_only(kernels: Collection[str]) -> AbstractContextManager[Any]:
    """Inside this context calls launch the named kernels and leave the others out."""
    from cula_core.delta_rule import launch

    kernels_of = launch.kernels_of

    def chosen(target: Any, device: torch.device) -> Callable[[Any], Callable[..., None]]:
        compiled = kernels_of(target, device)
        return lambda config: (
            compiled(config) if kernel_of(config) in kernels else lambda *arguments: None
        )

    return mock.patch.object(launch, "kernels_of", chosen)


def cut_into(parts: int) -> AbstractContextManager[Any]:
    """Inside this context a call that may cut sequences cuts the longest one into `parts` segments."""
    return mock.patch.object(planning.CostModel, "parts_of", lambda *shape: parts)
