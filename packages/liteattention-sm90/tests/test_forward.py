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
LENGTHS = (1000, 700), (0, 5), (1, 1500), (640, 0), (129, 128)
LARGER = [
    Call(1000, 1333, listed=0.6, heads=8, heads_k=2, batch=2),
    Call(2000, 4097, listed=0.3, threshold=-2.0, direction=-1, views=True),
    Call(1500, 1500, listed=0.9, causal=True, threshold=-4.0, heads=4),
    Call(777, 5000, listed=0.5, dim=64, block_n=128, threshold=-1.0, batch=3),
    Call(lengths=LENGTHS, heads=8, heads_k=2, causal=True, views=True),
    Call(lengths=LENGTHS, heads=6, listed=0.5, threshold=-2.0, index_dtype="int64"),
    Call(lengths=((300, 400),) * 40, heads=20, listed=0.5, causal=True, direction=-1, dim=64),
]
SERVED = [c for c in DENSE + LISTED + LARGER if c.dim <= 128]


def attend(call: Call, x: Inputs, kernel: str) -> list:
    """The results of a package's kernels, on the CPU. x: on the GPU."""
    direction = call.direction
    if call.on_device:
        direction = torch.tensor([direction], dtype=torch.int32, device=x.q.device)
    packed = {}
    if x.starts_q is not None:
        packed = {
            "cu_seqlens_q": x.starts_q, "cu_seqlens_k": x.starts_k, "max_seqlen_q": x.most[0],
            "max_seqlen_k": x.most[1],
        }  # fmt: skip
    with choice.forced(kernel):
        results = lite_attention(
            x.q, x.k, x.v, x.read, direction=direction, causal=call.causal,
            threshold=None if call.listed is None else call.threshold, must_do=x.held,
            block_n=call.block_n, out=torch.full_like(x.q, math.nan), **packed,
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


@pytest.mark.parametrize("listed", [None, 0.7])
@pytest.mark.parametrize("dim", [64, 128])
def test_sequences_do_not_meet(cuda, listed, dim):
    """NaN in all of one reaches no other."""
    call = Call(dim=dim, lengths=((100, 170), (130, 200), (70, 65)), heads=4, listed=listed)
    x = make_inputs(call).to(cuda)
    want = attend(call, x, "sm90")
    rows, keys = (slice(*starts[1:3].tolist()) for starts in (x.starts_q, x.starts_k))
    q, k, v = (t.clone() for t in (x.q, x.k, x.v))
    q[:, rows], k[:, keys], v[:, keys] = math.nan, math.nan, math.nan
    found = attend(call, replace(x, q=q, k=k, v=v), "sm90")
    for own in (slice(0, rows.start), slice(rows.stop, None)):
        for got, expected in zip(found[:2], want[:2]):  # [1, T, H, D] and [H, T]
            assert torch.equal(got[:, own], expected[:, own])
    assert listed is None or torch.equal(found[2][::2], want[2][::2])


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
