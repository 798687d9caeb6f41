"""What the benchmarks use of cula_lightning_decode beyond its public functions; no other file here imports that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from cula_core import tensors
from cula_lightning_decode.config import Config, Problem
from cula_lightning_decode.plan import candidates, select

__all__ = ["Config", "Problem", "candidates", "compiled_here", "multiprocessors", "select"]


def compiled_here(config: Config) -> Callable[..., Any]:
    """The kernel of a configuration, compiled for the GPU of this machine."""
    from cula_lightning_decode import launch

    major, minor = torch.cuda.get_device_capability()
    return launch.compile(config, f"sm_{major}{minor}" + "a" * (major >= 9))


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Inside the block the package chooses tiles as for a card of `count` multiprocessors."""
    from cula_lightning_decode import launch

    launch.kernel_for.cache_clear()
    try:
        with mock.patch.object(tensors, "multiprocessors", lambda device: count):
            yield
    finally:
        launch.kernel_for.cache_clear()
