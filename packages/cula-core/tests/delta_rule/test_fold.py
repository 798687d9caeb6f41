"""States behind slices on several GPUs, folded by one kernel, against the same in fp64."""

from __future__ import annotations

import pytest
import torch
from delta_rule_targets import BLACKWELL, HOPPER

from cula_core.delta_rule import launch
from cula_core.delta_rule.config import FoldConfig
from cula_core.delta_rule.fold import fold
from cula_testing.compiled import emulated_kernel
from cula_testing.slices import assert_folds


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("target, arch", [(HOPPER, "sm_90a"), (BLACKWELL, "sm_100a")])
def test_states_behind_chains(emulated, target, arch, back):
    def kernels(config: FoldConfig):
        return emulated_kernel(emulated, launch.unit(target, config, arch))

    assert_folds(lambda *of: fold(kernels, *of), back)


def test_no_heads_are_no_launch():
    """Where ranks are more than heads, some fold none."""

    def kernels(config: FoldConfig):
        raise AssertionError(config)

    chain = ((0, 0), (1, 0))
    (state,) = fold(
        kernels, torch.empty(2, 0, 128, 128), torch.empty(2, 0, 128, 128), [chain], False
    )
    assert state.shape == (0, 128, 128)
