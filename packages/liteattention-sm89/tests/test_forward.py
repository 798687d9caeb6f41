"""The kernel on a GPU, through the public function."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cula_testing.comparing import relative_rmse
from cula_testing.lite import DENSE, LISTED, Call, Subject, make_inputs
from cula_testing.tensors import unsynchronised
from liteattention_sm89 import launch, lite_attention, masks, reference

pytestmark = pytest.mark.gpu
SUBJECT = Subject(launch.forward, reference.lite_attention)

LARGER = [
    Call(1000, 1333, listed=0.6, heads=8, heads_k=2, batch=2),
    Call(2000, 4097, listed=0.3, threshold=-2.0, direction=-1, views=True),
    Call(1500, 1500, listed=0.9, causal=True, threshold=-4.0, heads=4),
    Call(777, 5000, listed=0.5, dim=64, block_n=128, threshold=-1.0, batch=3),
    Call(900, 1000, listed=0.7, dim=256, heads=3, heads_k=3),
    Call(listed=0.7, lengths=((1000, 700), (0, 5), (1, 2000), (640, 0), (129, 128))),
]


def attend(call: Call, device: torch.device) -> tuple:
    """Inputs, and the results on the CPU."""
    x = make_inputs(call)
    y = x.to(device)
    direction = call.direction
    if call.on_device:
        direction = torch.tensor([direction], dtype=torch.int32, device=device)
    packed = {} if call.lengths is None else {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]}
    results = lite_attention(
        y.q, y.k, y.v, y.read, direction=direction, causal=call.causal,
        threshold=None if call.listed is None else call.threshold, must_do=y.held,
        block_n=call.block_n, cu_seqlens_q=y.starts_q, cu_seqlens_k=y.starts_k,
        out=torch.full_like(y.q, math.nan), **packed,
    )  # fmt: skip
    return x, [None if t is None else t.cpu() for t in results]


@pytest.mark.parametrize("call", DENSE + LISTED + LARGER, ids=str)
def test_numbers(cuda, call):
    x, results = attend(call, cuda)
    SUBJECT.assert_right(call, x, *results)


def many(cuda: torch.device, keys: int = 8192) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(cuda).manual_seed(0)
    shape = (2, keys, 8, 128)
    return tuple(torch.randn(shape, generator=generator, device=cuda).bfloat16() for _ in range(3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threshold", [None, -math.inf])
def test_long_sequences(cuda, causal, threshold):
    q, k, v = many(cuda)
    out, _, mask = lite_attention(q, k, v, threshold=threshold, causal=causal)
    exact = scaled_dot_product_attention(
        *(t.transpose(1, 2).float() for t in (q, k, v)), is_causal=causal
    ).transpose(1, 2)
    assert relative_rmse(out, exact) < 5e-3
    if mask is not None and not causal:
        assert masks.density(mask, 8192 // 64) == 1


def test_repeated_calls_give_the_same_bits(cuda):
    q, k, v = many(cuda, 2048)
    first = lite_attention(q, k, v, threshold=-4.0)
    for _ in range(1000):
        again = lite_attention(q, k, v, threshold=-4.0)
        assert all(map(torch.equal, first, again))


def test_a_graph_alternates_the_direction(cuda):
    """The direction and the list live on the device: replays are the calls of a loop."""
    q, k, v = many(cuda, 2048)
    # Every other tile matters to nobody, and of the others a way down needs few.
    levels = torch.arange(32, device=cuda)
    k *= torch.where(levels % 2 == 0, 2 + levels / 2, 0.01).repeat_interleave(64)[:, None, None]
    mask = masks.full(2, 8, 16, 32, device=cuda)
    direction = torch.ones(1, dtype=torch.int32, device=cuda)

    def step() -> Tensor:
        out, _, kept = lite_attention(q, k, v, mask, threshold=-2.0, direction=direction)
        mask.copy_(kept)
        direction.neg_()
        return out

    step()
    mask.copy_(masks.full(2, 8, 16, 32, device=cuda))
    direction.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    mask.copy_(masks.full(2, 8, 16, 32, device=cuda))
    direction.fill_(1)
    own = mask.clone()
    for i in range(5):
        graph.replay()
        expected, _, own = lite_attention(q, k, v, own, threshold=-2.0, direction=1 - i % 2 * 2)
        assert torch.equal(out, expected) and torch.equal(mask, own)
    assert masks.density(mask, 32) < 0.5


def test_nothing_synchronises(cuda):
    q, k, v = many(cuda, 1024)
    mask = lite_attention(q, k, v)[2]
    torch.cuda.synchronize()
    with unsynchronised():
        lite_attention(q, k, v, mask, direction=-1)
