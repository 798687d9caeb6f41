"""The kernel on a GPU, through the public function, beside that of the host package."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cula_testing.lite import DENSE, LISTED, Call, Inputs, Subject, make_inputs
from liteattention_sm89 import choice, lite_attention, reference
from liteattention_sm90 import launch

pytestmark = pytest.mark.gpu
SUBJECT = Subject(launch.forward, reference.lite_attention)
LARGER = [
    Call(1000, 1333, listed=0.6, heads=8, heads_k=2, batch=2),
    Call(2000, 4097, listed=0.3, threshold=-2.0, direction=-1, views=True),
    Call(1500, 1500, listed=0.9, causal=True, threshold=-4.0, heads=4),
    Call(777, 5000, listed=0.5, dim=64, block_n=128, threshold=-1.0, batch=3),
]
SERVED = [c for c in DENSE + LISTED + LARGER if c.lengths is None and c.dim <= 128]


def attend(call: Call, x: Inputs, kernel: str) -> list:
    """The results of a package's kernels, on the CPU. x: on the GPU."""
    direction = call.direction
    if call.on_device:
        direction = torch.tensor([direction], dtype=torch.int32, device=x.q.device)
    with choice.forced(kernel):
        results = lite_attention(
            x.q, x.k, x.v, x.read, direction=direction, causal=call.causal,
            threshold=None if call.listed is None else call.threshold, must_do=x.held,
            block_n=call.block_n, out=torch.full_like(x.q, math.nan),
        )  # fmt: skip
    return [None if t is None else t.cpu() for t in results]


@pytest.mark.parametrize("call", SERVED, ids=str)
def test_numbers(cuda, call):
    x = make_inputs(call)
    SUBJECT.assert_right(call, x, *attend(call, x.to(cuda), "sm90"))


@pytest.mark.parametrize("call", [c for c in SERVED if c.listed is not None][::3], ids=str)
def test_the_same_bits_every_time(cuda, call):
    x = make_inputs(call).to(cuda)
    first = attend(call, x, "sm90")
    for _ in range(100):
        assert all(map(torch.equal, attend(call, x, "sm90"), first))


def test_kernels_may_change_between_calls(cuda):
    """A list passes from one package's kernel to the other's."""
    call = Call(1000, 3000, listed=1.0, threshold=-4.0)
    x = make_inputs(call)
    for step in range(6):
        call = replace(call, direction=1 - step % 2 * 2)
        found = attend(call, x.to(cuda), ("sm90", "sm89")[step % 2])
        SUBJECT.assert_right(call, x, *found)
        x = replace(x, read=found[2])


def test_what_is_refused_raises_with_the_reason(cuda):
    q = torch.randn(1, 200, 2, 192, device=cuda, dtype=torch.bfloat16)
    with choice.forced("sm90"), pytest.raises(RuntimeError, match="=sm90: the head dimension"):
        lite_attention(q, q, q)
