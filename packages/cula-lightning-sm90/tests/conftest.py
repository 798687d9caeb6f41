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
    states: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k, v, g, decay and state by name; the same numbers on every device, for every dtype and layout.

    g: [B, T, HV] in (-1, 0]. decay: [HV] fp32 in [0, 1). state: `states` matrices, by default one per row of the batch.
    """
    generator = torch.Generator().manual_seed(seed)

    normal = normals(generator)
    states = batch if states is None else states
    q, k = normal(batch, tokens, heads, dim_k), normal(batch, tokens, heads, dim_k)
    v, state = normal(batch, tokens, heads_v, dim_v), normal(states, heads_v, dim_k, dim_v)
    g = -torch.rand(batch, tokens, heads_v, generator=generator, dtype=torch.float64)
    decay = torch.rand(heads_v, generator=generator, dtype=torch.float32)
    if state_v_first:
        state = state.transpose(2, 3).contiguous()
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g.to(gate_dtype)}
    tensors |= {"decay": decay, "state": state.to(state_dtype)}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., dict[str, Tensor]]:
    return _make_inputs
