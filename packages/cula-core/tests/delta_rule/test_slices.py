"""What segments of a slice do to a state together."""

import pytest
import torch

from cula_core.delta_rule import slices


@pytest.mark.parametrize("count", range(1, 8))
def test_joined_maps_do_what_each_does_in_turn(count):
    rng = torch.Generator().manual_seed(count)
    maps = torch.randn(count, 2, 256, 128, generator=rng, dtype=torch.float64) / 12
    state = first = torch.randn(2, 128, 128, generator=rng, dtype=torch.float64)
    before = maps.clone()
    for own in maps:
        added, matrix = own.mT.split(128, -1)
        state = matrix @ state + added
    added, matrix = slices._joined(maps).mT.split(128, -1)
    torch.testing.assert_close(matrix @ first + added, state, rtol=0, atol=1e-12)
    assert state.abs().max() > 1 and torch.equal(maps, before)
