"""What the tests of this package share; the plugin is that of all packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cula_testing.loading import pytest_addoption
from cula_testing.tensors import normals

__all__ = ["pytest_addoption"]

sys.path.insert(0, str(Path(__file__).parent))


def _make_inputs(
    batch: int,
    tokens: int,
    heads: int,
    heads_v: int,
    dim_k: int,
    dim_v: int,
    *,
    pool: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k, v, state and decay by name; the same numbers on every device, for every dtype and layout."""
    generator = torch.Generator().manual_seed(seed)

    normal = normals(generator)
    pool = batch if pool is None else pool
    q, k = normal(batch, tokens, heads, dim_k), normal(batch, tokens, heads, dim_k)
    v, state = normal(batch, tokens, heads_v, dim_v), normal(pool, heads_v, dim_k, dim_v)
    decay = torch.rand(heads_v, generator=generator, dtype=torch.float32)
    if state_v_first:
        state = state.transpose(2, 3).contiguous()
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    tensors |= {"state": state.to(state_dtype), "decay": decay}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., dict[str, Tensor]]:
    return _make_inputs


def _shared_bytes(config: object) -> int:
    """Shared memory of a tile: every token's k, v and q in fp32 unless the threads read them directly, and one partial
    output per warp where the rows of a column spread over warps."""
    problem = config.problem
    outputs = problem.mode != "commit"
    staged = 0 if config.direct else problem.head_dim_k * (1 + outputs) + config.tile_v
    partial = config.threads // 32 * config.tile_v if outputs and not problem.state_v_first else 0
    return 4 * problem.tokens * (staged + partial)


@pytest.fixture(scope="session")
def shared_bytes() -> Callable[[object], int]:
    return _shared_bytes
