"""Scores of 8-bit integers on a GPU: the launcher's kernels one by one, and the public functions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lite_int8 import (
    MAX_LSE_ROUNDING_ERROR,
    MAX_OUTPUT_ERROR,
    MAX_ROUNDING_ERROR,
    assert_right,
    double,
    exact_inputs,
    largest,
    launched,
    with_offsets,
)

from cula_testing.comparing import relative_rmse
from cula_testing.lite import Call, Inputs, empty_on, make_inputs
from liteattention_sm89 import (
    LiteAttention,
    SeqParallelLiteAttention,
    launch,
    lite_attention,
    masks,
    merge,
    reference,
)

pytestmark = pytest.mark.gpu

# Few kernels, many sizes: D = 128 with and without a list, packed tiles of 128 keys, the widest heads.
LISTED = Call(1000, 1333, listed=0.6, heads=4, heads_k=2, batch=2, threshold=-2.0)
DENSE = Call(700, 900, heads=4, heads_k=2, batch=2)
PACKED = Call(
    dim=64, causal=True, listed=0.7, block_n=128, threshold=-2.0, dtype="float16",
    lengths=((1000, 700), (0, 5), (1, 2000), (640, 0), (129, 192)),
)  # fmt: skip
WIDEST = Call(300, 520, dim=256, listed=0.7, threshold=-2.0, direction=-1)
CALLS = [
    LISTED,
    replace(LISTED, rows=2000, keys=2000, batch=1, threshold=0.0, direction=-1, views=True),
    replace(LISTED, rows=1, keys=1, threshold=-math.inf),
    replace(LISTED, rows=129, keys=65, listed=1.0, threshold=math.inf),
    replace(LISTED, listed=0.0),
    DENSE,
    replace(DENSE, rows=130, keys=2000, views=True),
    PACKED,
    WIDEST,
]


def public(call: Call, x: Inputs, **changes) -> tuple:
    packed = {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]} if call.lengths else {}
    known = {
        "threshold": None if call.listed is None else call.threshold, "direction": call.direction,
        "causal": call.causal, "must_do": x.held, "block_n": call.block_n, "use_int8": True,
        "cu_seqlens_q": x.starts_q, "cu_seqlens_k": x.starts_k,
    }  # fmt: skip
    return lite_attention(x.q, x.k, x.v, x.read, **known | packed | changes)


def of_reference(call: Call, x: Inputs, use_int8: bool) -> tuple:
    """In fp64 on the device."""
    x = double(x)
    packed = {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]} if call.lengths else {}
    return reference.lite_attention(
        x.q, x.k, x.v, x.read, threshold=call.threshold, direction=call.direction, causal=call.causal,
        must_do=x.held, block_n=call.block_n, cu_seqlens_q=x.starts_q, cu_seqlens_k=x.starts_k,
        use_int8=use_int8, **packed,
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers(cuda, call):
    x = with_offsets(make_inputs(call), 3.0).to(cuda)
    empty = empty_on(cuda)
    got = launched(call, x, empty, kernel_for=launch.compile_forward)
    assert_right(call, x, got)
    # The public function does the same.
    out, lse, write = public(call, x, out=empty(x.q.shape, x.q.dtype))
    assert torch.equal(out, got.out) and torch.equal(lse.view(got.lse.shape), got.lse)
    assert write is got.write is None or torch.equal(write, got.write)


@pytest.mark.parametrize("call", [LISTED, DENSE, PACKED, WIDEST], ids=str)
def test_beside_the_reference(cuda, call):
    """Where values lie half way between integers it may round the other way. Beside exact attention more is lost, by
    single rows much more: that is bounded by the root of the mean square."""
    x = with_offsets(make_inputs(call), 3.0).to(cuda)
    out, lse, _ = public(call, x)
    for use_int8, error, measure, lse_error in (
        (True, MAX_OUTPUT_ERROR, largest, 1e-2),
        (False, MAX_ROUNDING_ERROR, lambda x: x.square().mean().sqrt(), 5e-3),
    ):
        wanted = of_reference(call, x, use_int8)
        seen = torch.isfinite(wanted[1])
        assert torch.equal(seen, torch.isfinite(lse))
        assert relative_rmse(out, wanted[0]) < error
        assert measure((lse - wanted[1])[seen]) < lse_error


def test_integers_are_not_rounded(cuda):
    call = replace(LISTED, keys=1332, threshold=-0.5)
    x = exact_inputs(call).to(cuda)
    out, lse, write = public(call, x, scale=1e-4)
    d = double(x)
    wanted = reference.lite_attention(d.q, d.k, d.v, d.read, threshold=-0.5, scale=1e-4)
    assert relative_rmse(out, wanted[0]) < MAX_OUTPUT_ERROR and largest(lse - wanted[1]) < 1e-3
    assert (write != wanted[2]).sum() <= 2


def test_lists_over_calls(cuda):
    """Directions in turns; every list is right, a subset of the one before, and in the end much shorter."""
    call = replace(LISTED, listed=1.0, batch=1, keys=2000)
    x = make_inputs(call)
    x.q[..., 0] = 8
    x.k[..., 0] = 8 * (torch.arange(call.keys) // 64 % 4)[:, None]
    x, densities = x.to(cuda), []
    for step in range(4):
        call = replace(call, direction=1 - step % 2 * 2)
        got = launched(call, x, empty_on(cuda), kernel_for=launch.compile_forward)
        assert_right(call, x, got)
        write = public(call, x)[2]
        assert torch.equal(write, got.write) and not (write & ~x.read).any()
        densities.append(masks.density(write, -(-call.keys // 64)).item())
        x = replace(x, read=write)
    assert 0 < densities[-1] <= densities[0] < 0.6


def test_a_graph_alternates_the_direction(cuda):
    """The workspace of the integers is the graph's own; replays are the calls of a loop."""
    call = replace(LISTED, listed=1.0, batch=1)
    x = make_inputs(call).to(cuda)
    mask, whole = x.read.clone(), x.read
    direction = torch.ones(1, dtype=torch.int32, device=cuda)

    def step() -> torch.Tensor:
        out, _, kept = lite_attention(
            x.q, x.k, x.v, mask, threshold=-1.0, direction=direction, use_int8=True
        )
        mask.copy_(kept)
        direction.neg_()
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    mask.copy_(whole)
    direction.fill_(1)
    own = whole
    for i in range(5):
        x.q.normal_()
        graph.replay()
        expected, _, own = lite_attention(
            x.q, x.k, x.v, own, threshold=-1.0, direction=1 - i % 2 * 2, use_int8=True
        )
        assert torch.equal(out, expected) and torch.equal(mask, own)


@pytest.mark.parametrize("call", [LISTED, DENSE], ids=str)
def test_repeated_calls_give_the_same_bits(cuda, call):
    x = make_inputs(call).to(cuda)
    first = public(call, x)
    for _ in range(20):
        again = public(call, x)
        assert all(one is other or torch.equal(one, other) for one, other in zip(first, again))


def test_nothing_synchronises(cuda):
    x = make_inputs(LISTED).to(cuda)
    public(LISTED, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        public(LISTED, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_scales_that_are_not_positive(cuda, scale):
    x = with_offsets(make_inputs(DENSE), 2.0).to(cuda)
    out, lse, _ = public(DENSE, x, scale=scale)
    d = double(x)
    wanted, wanted_lse, _ = reference.lite_attention(d.q, d.k, d.v, scale=scale)
    assert relative_rmse(out, wanted) < MAX_ROUNDING_ERROR
    assert largest(lse - wanted_lse) < MAX_LSE_ROUNDING_ERROR


def test_calls_without_keys(cuda):
    x = make_inputs(replace(DENSE, keys=0)).to(cuda)
    for threshold in (None, -3.0):
        out, lse, _ = lite_attention(x.q, x.k, x.v, threshold=threshold, use_int8=True)
        assert not out.any() and (lse == -math.inf).all()


def test_a_module(cuda):
    call = replace(LISTED, listed=None, batch=1)
    lite = LiteAttention(threshold=-2.0, use_int8=True)
    mask = None
    for step in range(4):
        x = with_offsets(make_inputs(call, step // 2), 1.0).to(cuda)
        direction = 1 - step % 2 * 2
        expected = lite_attention(
            x.q, x.k, x.v, mask, threshold=-2.0, direction=direction, use_int8=True
        )
        out, lse = lite(x.q, x.k, x.v, return_softmax_lse=True)
        mask = expected[2]
        assert all(map(torch.equal, (out, lse, lite.write_mask), expected))
    lite.enable_skip_optimization(False)
    assert torch.equal(lite(x.q, x.k, x.v), public(call, x)[0])
    leaf = x.q.clone().requires_grad_()
    with pytest.raises(ValueError, match="use_int8: expected False where a gradient is wanted"):
        lite(leaf, x.k, x.v)


def test_parts_of_the_keys_merge(cuda):
    """Means differ from part to part, and lse makes up for it."""
    call = replace(DENSE, keys=1000, batch=1)
    x = make_inputs(call)
    x.k[:, :500] += 3 * torch.randn(128).bfloat16()
    x = x.to(cuda)
    parts = SeqParallelLiteAttention(2, enable_skipping=False, use_int8=True)
    pieces = (t.split(500, 1) for t in (x.k, x.v))
    found = [parts(x.q, *kv, i, return_softmax_lse=True) for i, kv in enumerate(zip(*pieces))]
    out, lse = merge(*zip(*found))
    wanted, wanted_lse, _ = of_reference(call, x, False)
    assert relative_rmse(out, wanted) < MAX_ROUNDING_ERROR
    assert largest(lse - wanted_lse) < MAX_LSE_ROUNDING_ERROR
