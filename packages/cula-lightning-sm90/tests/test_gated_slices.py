"""Calls of the gated delta rule over slices of sequences: all of them give what whole sequences give."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cula_lightning_sm90
from cula_core.reference.gated_delta_rule import gated_delta_rule
from cula_emulator.memory import poisoned_memory
from cula_lightning_sm90.gated import launch, ops, slices
from cula_lightning_sm90.gated.config import PLACES, UNCUT
from cula_lightning_sm90.gated.plan import Plan, Walk
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel
from cula_testing.slices import BOUNDS, LENGTHS, assert_folds, over_ranks
from cula_testing.tensors import int32, normals

MAX_ERROR = 3e-3
# Log decays per token of heads: one forgets within every chunk, one hardly anything.
RATES = (-2.0, -0.005)
NORM = {"use_qk_l2norm_in_kernel": True}


@functools.cache
def problem() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens by name, of two heads of values and states that share keys, and initial states."""
    generator = torch.Generator().manual_seed(0)
    normal, tokens = normals(generator), sum(LENGTHS)
    q, k, v = (normal(1, tokens, heads, 128).bfloat16() for heads in (1, 1, 2))
    uniform = torch.rand(1, tokens, 2, generator=generator)
    beta = torch.rand(1, tokens, 2, generator=generator)
    g = torch.tensor(RATES) * (0.5 + uniform)
    initial = 0.5 * normal(len(LENGTHS), 2, 128, 128).float()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}, initial


def forced(machines: int, segment: int) -> Any:
    """A planner that cuts slices after so many chunks."""

    def planner(longest: int, usual: int, total: int, *_: Any) -> Plan:
        share = -(-total // machines)
        return Plan(Walk(2, machines, share, PLACES), 2, 1 << 20, segment, Walk(1, machines, share))

    return planner


@dataclass
class Known:
    """The call of a rank where every sequence begins."""

    o: Tensor
    final: Tensor
    maps: list[tuple[Tensor, None]]

    def finish(self, _: Tensor) -> tuple[Tensor, Tensor]:
        return self.o, self.final


def begin(**given: Any) -> Any:
    begun = cula_lightning_sm90.begin_chunk_gated_delta_rule(**given, **NORM)
    parts = given.pop("slices")
    assert (begun is None) == (not any(part.comes_on for part in parts))
    if begun is not None:
        return begun
    o, final = cula_lightning_sm90.chunk_gated_delta_rule(**given, **NORM, output_final_state=True)
    return Known(o, final, [(final[n], None) for n, part in enumerate(parts) if part.goes_on])


def assert_right(
    patch: pytest.MonkeyPatch, bounds: tuple[int, ...], device: torch.device, **options: Any
) -> None:
    tokens, initial = problem()
    patch.setattr(slices, "begin", functools.partial(slices.begin, **options))
    cut = over_ranks(
        begin, {name: x.to(device) for name, x in tokens.items()}, initial.to(device), bounds
    )
    cu_seqlens = int32(0, *LENGTHS).cumsum(0)
    want = gated_delta_rule(**tokens, initial_state=initial, cu_seqlens=cu_seqlens, **NORM)
    for found, expected in zip(cut, (want.out, want.states), strict=True):
        for head in range(2):
            dim = 2 if found is cut[0] else 1
            assert relative_rmse(found.select(dim, head), expected.select(dim, head)) <= MAX_ERROR


@pytest.mark.emulated(seeds=1)
@pytest.mark.parametrize("segment", [UNCUT, 1, 2])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_slices_over_ranks(emulated, monkeypatch, bounds, segment):
    def kernels(config):
        return emulated_kernel(emulated, launch.unit(config))

    monkeypatch.setattr(ops, "require_hopper", lambda _: None)
    with poisoned_memory():
        assert_right(
            monkeypatch, bounds, torch.device("cpu"), kernels=kernels, multiprocessors=4,
            planner=forced(2 if segment == 1 else 3, segment),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("segment", [UNCUT, 1, 2, None])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_slices_over_ranks_on_a_gpu(cuda, monkeypatch, bounds, segment):
    """None: cut as the plan says."""
    options = {} if segment is None else {"planner": forced(5, segment)}
    torch.full((1 << 26,), float("nan"), device=cuda)
    assert_right(monkeypatch, bounds, cuda, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("back", [False, True])
def test_maps_are_folded_on_a_gpu(cuda, back):
    assert_folds(cula_lightning_sm90.fold_slices, back, cuda)
