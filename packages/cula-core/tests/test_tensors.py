"""Alignment, layouts of states, and calls that need no dispatcher."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula_core import tensors
from cula_testing.tensors import int32, misplaced, spaced, turned


def states(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 2, 3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "how, good",
    [
        (torch.clone, True),
        (misplaced, False),
        (lambda x: spaced(x, 8), True),
        (lambda x: spaced(x, 2), False),
    ],
    ids=["dense", "odd address", "rows of 16 bytes", "odd rows"],
)
def test_a_tensor_is_copied_where_vectors_cannot_address_it(how, good):
    x = how(torch.arange(64, dtype=torch.bfloat16).view(2, 4, 8))
    assert tensors.is_aligned(x) is good
    ready = tensors.aligned(x)
    assert (ready is x) is good and torch.equal(ready, x) and tensors.is_aligned(ready)
    assert good or ready.is_contiguous()


@pytest.mark.parametrize("offsets, longest", [((0,), 0), ((0, 3), 3), ((0, 3, 3, 10), 7)])
def test_the_longest_sequence(offsets, longest):
    assert tensors.longest_sequence(torch.tensor(offsets)) == longest


def test_states_are_taken_as_they_lie():
    x = states(2)
    assert tensors.as_stored(None) == (None, False)
    as_it_is, is_turned = tensors.as_stored(x)
    assert as_it_is is x and not is_turned
    other, is_turned = tensors.as_stored(turned(x))
    assert is_turned and other.is_contiguous() and torch.equal(other.mT, x)


@pytest.mark.parametrize("v_first, matrix", [(False, (3, 4)), (True, (4, 3))])
def test_new_states(v_first, matrix):
    q, v = torch.zeros(1, 5, 1, 3, dtype=torch.bfloat16), torch.zeros(1, 5, 2, 4)
    made = tensors.new_states(7, q, v, v_first, None)
    assert made.shape == (7, 2, *matrix) and made.dtype == torch.float32
    assert tensors.new_states(7, q.double(), v, v_first, None).dtype == torch.float64
    assert tensors.new_states(7, q.double(), v, v_first, made).dtype == torch.float32


def test_states_are_gathered_by_their_indices():
    x, target = states(4), torch.full((3, 2, 3, 4), float("nan"))
    assert tensors.gather_states(x, int32(2, -1, 0), target) is target
    assert torch.equal(target[[0, 2]], x[[2, 0]]) and not target[1].any()
    assert torch.equal(tensors.gather_states(x, None, target), x[:3])
    for nothing in (None, x[:0]):
        assert not tensors.gather_states(nothing, int32(-1, -1, -1), target.fill_(1.0)).any()


def test_only_a_real_cuda_tensor_is_a_plain_call():
    assert not tensors.is_plain_cuda_call(torch.zeros(1))
    assert not tensors.is_plain_cuda_call(torch.nn.Parameter(torch.zeros(1)))
    with FakeTensorMode():
        assert not tensors.is_plain_cuda_call(torch.empty(1, device="cuda"))
