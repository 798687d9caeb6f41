"""The kernel that finds the largest gradients of outputs, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch

from cula_core.delta_rule.backward.config import PeaksConfig
from cula_core.delta_rule.config import chunk_slots
from cula_cp_sm90.backward.launch import unit
from cula_testing.compiled import emulated_kernel

HEADS, DIM = 3, 128
LENGTHS = (70, 0, 1, 64, 130)


def gradients(batch: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers whose largest of a head may be anywhere, in rows that lie apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, HEADS, 2 * DIM, generator=generator) ** 5
    return x.to(dtype)[..., :DIM]


def largest(emulated, do: torch.Tensor, before: torch.Tensor, cu_seqlens=None) -> torch.Tensor:
    """Returns what the kernel makes of what was there before, [N, HV]."""
    index = None if cu_seqlens is None else str(cu_seqlens.dtype).removeprefix("torch.")
    config = PeaksConfig(str(do.dtype).removeprefix("torch."), index)
    peaks = before.view(torch.int32)
    slots = chunk_slots(*do.shape[:2], None if cu_seqlens is None else len(before))
    emulated_kernel(emulated, unit(config, "sm_90a"))(do, cu_seqlens, peaks, slots)
    return peaks.view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_of_a_dense_batch(emulated, tokens, dtype):
    do = gradients(2, tokens, dtype)
    found = largest(emulated, do, torch.zeros(2, HEADS))
    assert torch.equal(found, do.float().abs().amax((1, 3)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_of_packed_sequences(emulated, dtype):
    """Tokens behind the last sequence are nobody's, and what was larger before stays."""
    cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0).to(dtype)
    do = gradients(1, sum(LENGTHS) + 5, torch.bfloat16)
    do[:, sum(LENGTHS) :] = math.inf
    before = torch.zeros(len(LENGTHS), HEADS)
    before[1, 1] = before[2, 2] = 1e30
    found = largest(emulated, do, before.clone(), cu_seqlens)
    for n, part in enumerate(do[0].split([*LENGTHS, 5])[:-1]):
        want = part.float().abs().amax((0, 2)) if len(part) else torch.zeros(HEADS)
        assert torch.equal(found[n], torch.maximum(want, before[n])), n


def test_a_nan_is_larger_than_infinity(emulated):
    do = gradients(1, 65, torch.bfloat16)
    do[0, 64, 0, 127], do[0, 3, 1, 0], do[0, 5, 1, 8] = -math.inf, math.nan, math.inf
    found = largest(emulated, do, torch.zeros(1, HEADS))[0]
    assert found[0] == math.inf and found[1].isnan() and found[2].isfinite()
