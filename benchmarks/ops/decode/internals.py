"""What the benchmarks use of cula_lightning_decode beyond its public functions; no other file here imports that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.ops.part_of_card import planned_for
from benchmarks.ops.tiles import arch_here
from cula_core import tensors
from cula_lightning_decode.config import Config, Problem
from cula_lightning_decode.plan import candidates, select

__all__ = ["Config", "Problem", "candidates", "compiled_here", "multiprocessors", "select"]


def compiled_here(config: Config) -> Callable[..., Any]:
    """The kernel of a configuration, compiled for the GPU of this machine."""
    from cula_lightning_decode import launch

    return launch.compile(config, arch_here())


def multiprocessors(count: int) -> AbstractContextManager[None]:
    """Inside the block the package chooses tiles as for a card of `count` multiprocessors."""
    from cula_lightning_decode import launch

    return planned_for(count, tensors, launch)
