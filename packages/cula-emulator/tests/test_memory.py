"""What a kernel must not rely on shows: fresh memory is NaN, rows have gaps."""

from __future__ import annotations

import pytest
import torch

from cula_emulator.memory import loose_strides, poisoned_memory


def test_strides_leave_gaps_but_in_the_last_dimensions():
    assert loose_strides((2, 3, 4, 5), 0) == (60, 20, 5, 1)
    assert loose_strides((2, 3, 4, 5), 8) == (8 + 3 * (8 + 4 * 13), 8 + 4 * 13, 13, 1)
    assert loose_strides((2, 3, 4, 5), 8, dense=2) == (8 + 3 * 28, 28, 5, 1)
    assert loose_strides((), 8) == ()


@pytest.mark.parametrize("before", [False, True])
def test_fresh_memory_is_poisoned_and_torch_left_as_it_was(before):
    settings = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(before)
    try:
        with pytest.raises(KeyError), poisoned_memory():
            assert torch.empty(7).isnan().all()
            assert (torch.empty(7, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled() == before
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(settings[0], warn_only=settings[1])
