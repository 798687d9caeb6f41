"""What models have around their operators, over the ranks of a real process group."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sequences_over_ranks import random_batch

from cula.distributed import ContextParallel
from cula.kda import chunk_kda, fused_recurrent_kda
from cula.lightning import chunk_lightning_attn

RANKS = 3


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def normal(seed: int, *shape: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


# ---- what runs on the ranks ------------------------------------------------------------------------------------------


def convolved(x: Any, weight: Any, bias: Any, cu_seqlens: list[int]) -> torch.Tensor:
    """`[T, D]`, one token after another."""
    rows, width = [], weight.shape[1]
    for begin, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        for t in range(begin, end):
            row = bias
            for back in range(min(width, t - begin + 1)):
                row = row + weight[:, width - 1 - back] * x[t - back]
            rows.append(row)
    return torch.stack(rows) if rows else x


def random_convolutions(seeds: list[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        cu_seqlens, bounds, zigzag = random_batch(rng, RANKS)
        layout = "zigzag" if zigzag else "contiguous"
        offsets = torch.tensor(cu_seqlens)
        cp = ContextParallel(dist.group.WORLD, cu_seqlens=offsets, bounds=bounds, layout=layout)
        convolution(seed, cp, cu_seqlens, rng.randint(1, 6))


def convolution(seed: int, cp: ContextParallel, cu_seqlens: list[int], width: int) -> None:
    """Forward and backward, in each rank's part of whole sequences."""
    leaves = [normal(seed, *shape) for shape in ((cu_seqlens[-1], 3), (3, width), (3,))]
    d_y = normal(seed + 1, cu_seqlens[-1], 3)
    x, weight, bias = (t.clone().requires_grad_() for t in leaves)
    wanted = convolved(x, weight, bias, cu_seqlens)
    grads = torch.autograd.grad(wanted, (x, weight, bias), d_y)
    own = [cp.shard(leaves[0], 0)[None].clone(), *(t.clone() for t in leaves[1:])]
    x, weight, bias = (t.requires_grad_() for t in own)
    y = cp.causal_conv1d(x, weight, bias)
    close(y[0], cp.shard(wanted.detach(), 0))
    got = torch.autograd.grad(y, (x, weight, bias), cp.shard(d_y, 0)[None])
    close(got[0][0], cp.shard(grads[0], 0))
    for mine, whole in zip(got[1:], grads[1:], strict=True):
        total = mine.contiguous()
        dist.all_reduce(total)
        close(total, whole)


def dense_convolution(layout: str) -> None:
    """Rows of a batch are sequences, whose parts come from bounds; the activation, and no bias."""
    bounds = [0, 1, 1, 9] if layout == "contiguous" else [0, 1, 4, 4, 5, 7, 9]
    x, weight = normal(2, 2, 9, 3), normal(3, 3, 4)
    cp = ContextParallel(dist.group.WORLD, bounds=bounds, layout=layout)
    y = cp.causal_conv1d(cp.shard(x), weight, activation="silu")
    zeros = torch.zeros(3, dtype=torch.float64)
    whole = torch.stack([convolved(row, weight, zeros, [0, 9]) for row in x])
    close(y, cp.shard(whole * whole.sigmoid()))


def halos() -> None:
    """The tokens in front; gradients come back though a rank reads no halo; x is not written."""
    rank = dist.get_rank()
    cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 2, 9]), bounds=[0, 3, 4, 9])
    x = torch.arange(1.0, 10)[None, :, None]
    own = cp.shard(x).clone().requires_grad_()
    before = own.detach().clone()
    same, halo = cp.halo(own, 3)
    assert torch.equal(same, before)
    want = [[[0, 0, 0], [0, 0, 0]], [[0, 0, 3]], [[0, 3, 4]]][rank]
    assert halo[..., 0].tolist() == want
    (same.sum() if rank == 1 else same.sum() + halo.sum()).backward()
    assert own.grad.flatten().tolist() == [[1, 1, 2], [2], [1] * 5][rank]
    assert torch.equal(own.detach(), before)
    assert cp.halo(own, 0)[1].shape == (len(want), 0, 1)
    weight = torch.ones(1, 5, requires_grad=True)
    with torch.inference_mode():  # what it keeps must serve training
        cp.causal_conv1d(own, weight)
    cp.causal_conv1d(own, weight).sum().backward()


def refused_convolutions() -> None:
    cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 9]))
    x, weight = torch.zeros(1, 3, 2), torch.zeros(2, 4)
    for match, given, context in (
        (r"^weight: expected \[D, width\] with D as in x", {"weight": torch.zeros(3, 4)}, cp),
        (r"^bias: expected \[D\]", {"bias": torch.zeros(3)}, cp),
        (r"^x: expected \[B, T, D\]", {"x": x[0]}, cp),
        ("^x: expected T = 3 as cp_context says, got T = 2", {"x": x[:, :2]}, cp),
        ("^activation: expected None, 'silu'", {"activation": "gelu"}, cp),
        ("^weight: expected a width of at least 1", {"weight": weight[:, :0]}, cp),
        (
            "^x: expected a context with cu_seqlens or bounds",
            {},
            ContextParallel(dist.group.WORLD),
        ),
    ):
        with pytest.raises(ValueError, match=match):
            context.causal_conv1d(**{"x": x, "weight": weight, **given})
    with pytest.raises(ValueError, match="^x, size: expected .* 0 or more"):
        cp.halo(x, -1)
    with pytest.raises(TypeError, match="^x: expected a floating dtype, got torch.int64"):
        cp.halo(x.long(), 1)


class Layer(torch.nn.Module):
    """KDA behind a short convolution, and Lightning behind that; passes no context on to the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(normal(5, 12, 4) * 0.5)

    def forward(self, x: torch.Tensor, convolve: Any) -> torch.Tensor:
        q, k, v = convolve(x, self.weight).unflatten(2, (2, 6)).split(2, -1)
        o, _ = chunk_kda(q, k, v, -q.abs(), v[..., 0].sigmoid(), use_qk_l2norm_in_kernel=True)
        return chunk_lightning_attn(o, k, v, 1, 2)[0]


def a_model_that_passes_nothing_on() -> None:
    """Forward, backward inside and outside, nested contexts, and a recomputed forward."""
    from cula._ranks import context_of

    x, layer = normal(4, 1, 14, 12), Layer()

    def alone(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(
            torch.nn.functional.pad(x.mT, (3, 0)), weight[:, None], groups=12
        ).mT.contiguous()

    whole = layer(x, alone)
    whole.square().sum().backward()
    expected = layer.weight.grad
    cp = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 14]), bounds=[0, 3, 9, 14])
    other = ContextParallel(dist.group.WORLD, cu_seqlens=torch.tensor([0, 1]))
    for inside, again in ((False, False), (True, False), (True, True)):
        layer.weight.grad = None
        with other, cp:
            if again:
                y = torch.utils.checkpoint.checkpoint(
                    layer, cp.shard(x), cp.causal_conv1d, use_reentrant=False,
                    context_fn=lambda: (contextlib.nullcontext(), cp),
                )  # fmt: skip
            else:
                y = layer(cp.shard(x), cp.causal_conv1d)
            close(y, cp.shard(whole.detach()))
            if inside and not again:
                y.square().sum().backward()
        assert context_of(None) is None
        if again or not inside:
            y.square().sum().backward()
        total = layer.weight.grad.contiguous()
        dist.all_reduce(total)
        close(total, expected)
    with cp:
        q = cp.shard(x).unflatten(2, (2, 6))
        once, _ = chunk_lightning_attn(q, q, q, 1, 2, cp_context=False)
        with pytest.raises(NotImplementedError, match="^fused_recurrent_kda: expected no context"):
            fused_recurrent_kda(q, q, q, q, q[..., 0])
    assert torch.equal(once, chunk_lightning_attn(q, q, q, 1, 2)[0])


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_short_convolutions_over_random_batches(world):
    world(random_convolutions, list(range(12)))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_short_convolution_of_a_dense_batch(world, layout):
    world(dense_convolution, layout)


def test_tokens_in_front(world):
    world(halos)


def test_arguments_of_convolutions_that_do_not_fit_are_refused(world):
    world(refused_convolutions)


def test_a_model_that_passes_nothing_on(world):
    world(a_model_that_passes_nothing_on)
