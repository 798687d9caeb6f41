"""Maps of slices, folded by one kernel, against the same in fp64."""

from __future__ import annotations

import pytest
import torch
from delta_rule_targets import BLACKWELL, HOPPER

from cula_core.delta_rule import launch
from cula_core.delta_rule.config import FoldConfig
from cula_core.delta_rule.fold import behind, fold, joined
from cula_testing.comparing import relative_rmse
from cula_testing.compiled import emulated_kernel
from cula_testing.slices import assert_folds


@pytest.fixture(params=[(HOPPER, "sm_90a"), (BLACKWELL, "sm_100a")], ids=["sm_90a", "sm_100a"])
def kernels(emulated, request):
    target, arch = request.param
    return lambda config: emulated_kernel(emulated, launch.unit(target, config, arch))


def no_kernels(config: FoldConfig):
    raise AssertionError(config)


def segments_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps of segments [count, 2, 256, 128], A^T above M^T, and a state [2, 128, 128]."""
    rng = torch.Generator().manual_seed(count)
    maps = torch.randn(count + 1, 2, 256, 128, generator=rng) / 12
    return maps[1:], maps[0, :, :128].mT


def in_turn(segments: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The state behind segments, in fp64."""
    for own in segments.double():
        added, matrix = own.mT.split(128, -1)
        state = matrix @ state.double() + added
    return state


@pytest.mark.parametrize("back", [False, True])
def test_states_behind_chains(kernels, back):
    assert_folds(lambda *of: fold(kernels, *of), back)


def test_no_heads_are_no_launch():
    """Where ranks are more than heads, some fold none."""
    chain, none = ((0, 0), (1, 0)), torch.empty(2, 0, 128, 128)
    (state,) = fold(no_kernels, none, none, [chain], False)
    assert state.shape == (0, 128, 128)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_joined_maps_do_what_each_does_in_turn(kernels, count):
    segments, state = segments_of(count)
    before = segments.clone()
    added, matrix = joined(kernels, segments).double().mT.split(128, -1)
    assert relative_rmse(matrix @ state.double() + added, in_turn(segments, state)) < 2e-6
    assert relative_rmse(added, in_turn(segments, 0 * state)) < 2e-6
    assert torch.equal(segments, before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_state_behind_segments(kernels, count):
    segments, state = segments_of(count)
    segments[0, :, 128:] = torch.nan  # is not read where A of the first one is a state
    start = segments[0, :, :128].mT
    assert relative_rmse(behind(kernels, segments).mT, in_turn(segments[1:], start)) < 2e-6
    segments, state = segments_of(count)
    found = behind(kernels, segments, state).mT
    assert relative_rmse(found, in_turn(segments, state)) < 2e-6


def test_one_segment_needs_no_kernel():
    segments, _ = segments_of(1)
    assert torch.equal(joined(no_kernels, segments), segments[0])
    assert torch.equal(behind(no_kernels, segments), segments[0, :, :128])
