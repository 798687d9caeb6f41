"""What the benchmarks use of the KDA packages beyond their public functions; no other file here imports that.

A package is named by its import name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cula_core import tensors
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


def cost_model(
    name: str, value_heads: int, multiprocessors: int, maps: tuple[int, int] = (0, 0)
) -> Any:
    """What a package plans by; maps: halves that a scan gives for other cards, of cut and of whole sequences."""
    target = _target(name)
    return planning.CostModel(target.costs, target.v_tiles, value_heads, multiprocessors, maps)


def plan(
    name: str,
    batch: int,
    tokens: int,
    value_heads: int,
    sequences: int | None,
    multiprocessors: int,
    longest: int | None = None,
    beside: str = "off",
) -> Any:
    """How a package spreads a call over a card: `tiles` of v per CTA, `segments`, `segment_tokens` and `split`.

    beside: whether both kernels run at the same time, "auto", "on" or "off"; `beside` of the plan is None where they
    do not.
    """
    shape = (batch, tokens, value_heads, sequences)
    workspace = workspace_bytes(*shape)
    return planning.plan(
        _target(name), *shape, multiprocessors, workspace, longest=longest, beside=beside
    )


def multiprocessors() -> int | None:
    """How many multiprocessors this machine's GPU has, or None without a GPU."""
    on_gpu = torch.cuda.is_available()
    return tensors.multiprocessors(torch.device("cuda")) if on_gpu else None


def may_run_beside(bounded: bool, gate_dtype: torch.dtype) -> bool:
    """Whether there are kernels for such gates that run beside each other, in a call for inference."""
    from cula_core.delta_rule import launch

    call: Any = SimpleNamespace(bounded=bounded, g=SimpleNamespace(dtype=gate_dtype), Aqk=None)
    return launch._may_run_beside(call, None)


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


def scheduled(beside: str) -> AbstractContextManager[list[Any]]:
    """`launch.scheduled`: kernels of calls inside run beside each other ("on"), one after the other ("off"), or as the
    planner decides ("auto")."""
    from cula_core.delta_rule import launch

    return launch.scheduled(beside)


@contextmanager
def launching_only(kernels: Collection[str]) -> Iterator[None]:
    """Inside this context calls launch the named kernels and leave the others out.

    Kernels run one after the other: of two that run beside each other, neither can be left out.
    """
    from cula_core.delta_rule import launch

    kernels_of = launch.kernels_of

    def chosen(target: Any, device: torch.device) -> Callable[[Any], Callable[..., None]]:
        compiled = kernels_of(target, device)
        return lambda config: (
            compiled(config) if kernel_of(config) in kernels else lambda *arguments: None
        )

    with scheduled("off"), mock.patch.object(launch, "kernels_of", chosen):
        yield


@contextmanager
def cut_into(parts: int) -> Iterator[None]:
    """Inside this context a call that may cut sequences cuts the longest one into `parts` segments.

    Kernels run one after the other; beside each other they would keep sequences whole.
    """
    with (
        scheduled("off"),
        mock.patch.object(planning.CostModel, "parts_of", lambda *shape: parts),
    ):
        yield
