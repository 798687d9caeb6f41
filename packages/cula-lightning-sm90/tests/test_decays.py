"""Gradients of decays where little is forgotten: what 16 bits round away does not add up over long sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90 import backward, decays, ops
from cula_lightning_sm90.call import Call
from cula_testing.tensors import int32, one_thread

DIM = 16
RATES = torch.tensor([0.0, 0.001, 0.003, 0.01, 0.03, 0.06])
STEP = 2.0**-9  # of bfloat16


def of_gate(tokens: int, noise: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """Gradients [T, HV] of a gate of zeros beside RATES, in fp64.

    noise: of what the passes find by rounded states, relative: the products with them, and every element of those kept.
    """
    generator = torch.Generator().manual_seed(tokens)
    heads = len(RATES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v, do = (normal(1, tokens, heads, DIM) for _ in range(4))

    def run(calls: Sequence[Call]) -> None:
        for call in calls:
            ops._run_on_cpu(call)
            if call.dots is not None:
                of_state = call.dots[:, :, :, 0]
                call.dots.add_((noise * of_state * normal(*of_state.shape)).unsqueeze(3))
            if call.checkpoints is not None:
                call.checkpoints.mul_(1 + noise * normal(*call.checkpoints.shape))

    gate = torch.zeros(1, tokens, heads, dtype=torch.float64)
    with one_thread():
        found = backward.gradients(
            backward.Where(run, decays.on_cpu), do, None, q, k, v, gate, RATES, None, None, cu_seqlens, 0.25, -1,
            False, False, False, None, 0, True,
        )  # fmt: skip
    return found[3][0]


def errors(tokens: int, monkeypatch: pytest.MonkeyPatch, every: int) -> tuple[float, float]:
    """The error of a token's gradient, relative to those of its head, and that of the sum over tokens, relative to the
    sum of magnitudes: roots of mean squares over heads."""
    monkeypatch.setattr(decays, "EVERY", 1 << 30)  # the oracle needs no sums that are known
    want = of_gate(tokens, 0.0)
    monkeypatch.setattr(decays, "EVERY", every)
    error = of_gate(tokens, STEP) - want
    by_token = error.norm(dim=0) / want.norm(dim=0)
    of_sum = error.sum(0) / want.abs().sum(0)
    return tuple(x.square().mean().sqrt().item() for x in (by_token, of_sum))


def test_errors_do_not_grow_with_the_length(monkeypatch):
    """Sixteen times the tokens: those of a token stay, and those of a sum over tokens partly cancel."""
    every = decays.EVERY
    short, long = (errors(tokens, monkeypatch, every) for tokens in (1024, 16384))
    assert long[0] <= 1.5 * short[0] and long[1] <= short[1], (short, long)


def test_tokens_behind_the_last_sequence_have_no_gradient(monkeypatch):
    """Though rows of states belong to them, which no pass writes."""
    monkeypatch.setattr(decays, "EVERY", 64)
    cu_seqlens = int32(0, 70, 200)
    with poisoned_memory():
        found = of_gate(400, 0.0, cu_seqlens)
    assert not found[200:].any()
    monkeypatch.setattr(decays, "EVERY", 1 << 30)
    torch.testing.assert_close(found, of_gate(400, 0.0, cu_seqlens))
