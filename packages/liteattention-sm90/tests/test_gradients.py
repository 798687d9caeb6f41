"""Gradients on a GPU, through the public function, beside the oracle and beside those of the host package."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_gradients import CALLS, LISTS, WIDE, per_row, problem
from torch import Tensor, nn

from cula_testing.lite.gradients import MAX_GRADIENT_ERROR, Backward, Problem, assert_gradients
from liteattention_sm89 import LiteAttention, choice, lite_attention, masks
from liteattention_sm90 import launch

pytestmark = pytest.mark.gpu
LENGTHS = (1000, 700), (0, 5), (1, 1500), (640, 0), (129, 128)
LARGER = [
    replace(LISTS, rows=1000, keys=1333, heads=8, heads_k=2, batch=2, listed=0.3, dlse=True),
    replace(WIDE, rows=1500, keys=1500, heads=4, causal=True, dlse=True),
    replace(WIDE, rows=1500, keys=700, causal=True),
    replace(WIDE, rows=777, keys=5000, heads=4, heads_k=4, listed=0.2, views=True),
    replace(WIDE, rows=2000, keys=4097, heads=2, listed=0.1, block_n=128),
    replace(WIDE, rows=1100, keys=1100, heads=6, heads_k=2, listed=0.5, causal=True, dlse=True),
    replace(LISTS, lengths=LENGTHS, heads=6, heads_k=2, listed=0.4, dlse=True),
    replace(WIDE, lengths=LENGTHS, heads=4, causal=True, views=True, index_dtype="int64"),
]
# What a gradient of one kernel may differ by from that of another, when each may from the oracle's.
MAX_DIFFERENCE = 2 * MAX_GRADIENT_ERROR


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """The oracle's results lie on the device."""
    yield
    problem.cache_clear()
    gc.collect()


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[str]]:
    """The dtypes of the calls of this package's backward: whether it served."""
    calls: list[str] = []
    backward = launch.backward

    def noted(q: Tensor, *given: Any, **more: Any) -> None:
        calls.append(str(q.dtype))
        backward(q, *given, **more)

    monkeypatch.setattr(launch, "backward", noted)
    choice._chosen.cache_clear()
    yield calls
    choice._chosen.cache_clear()


def attend(call: Backward, p: Problem, kernel: str) -> tuple[Tensor, ...]:
    """The gradients of a package's kernels, through a forward pass over the listed tiles, or over all with a
    grad_mask; deterministic if the call asks for "order"."""
    x = p.inputs
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    lists: dict[str, Any] = {"threshold": None}
    if x.read is not None:
        lists = {"threshold": -math.inf, "grad_mask" if call.fewer else "read_mask": x.read}
    if x.starts_q is not None:
        lists |= {
            "cu_seqlens_q": x.starts_q, "cu_seqlens_k": x.starts_k, "max_seqlen_q": x.most[0],
            "max_seqlen_k": x.most[1],
        }  # fmt: skip
    lists["deterministic"] = "order" in call.how
    with choice.forced(kernel):
        out, lse, _ = lite_attention(*leaves, **lists, causal=call.causal, block_n=call.block_n)
        results, given = ([out], [p.dout]) if p.dlse is None else ([out, lse], [p.dout, p.dlse])
        return torch.autograd.grad(results, leaves, given)


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error, size = (got.double() - want.double()).norm(), want.double().norm()
        assert error <= MAX_DIFFERENCE * size, f"{name}: {error / size}"


ORDER = [replace(call, how=("order",)) for call in CALLS + LARGER]


@pytest.mark.parametrize("call", CALLS + LARGER + ORDER, ids=str)
def test_numbers(cuda, launched, call):
    p = problem(call, str(cuda))
    found = attend(call, p, "sm90")
    assert len(launched) == 1
    assert_gradients(found, p)
    assert_near(found, attend(call, p, "sm89"))
    assert len(launched) == 1


@pytest.mark.parametrize("call", LARGER[:4], ids=str)
def test_what_does_not_depend_on_time(cuda, call):
    """Gradients of k and v are added up in one order."""
    p = problem(call, str(cuda))
    first = attend(call, p, "sm90")
    for _ in range(50):
        again = attend(call, p, "sm90")
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        difference, size = (again[0] - first[0]).float().norm(), first[0].float().norm()
        assert difference <= MAX_GRADIENT_ERROR * size


@pytest.mark.parametrize("call", [replace(call, how=("order",)) for call in LARGER], ids=str)
def test_the_same_bits_every_time(cuda, call):
    """Of one forward pass, with other work on the card by turns, and the numbers are right."""
    p = problem(call, str(cuda))
    x, lse, dlse = p.inputs, per_row(p.lse), per_row(p.dlse)
    how = {"scale": call.dim**-0.5, "causal": call.causal, "block_n": call.block_n}
    found = []
    other = torch.randn(2048, 2048, device=cuda)
    side = torch.cuda.Stream()
    for number in range(21):
        gradients = [torch.full_like(t, math.nan) for t in (x.q, x.k, x.v)]
        side.wait_stream(torch.cuda.current_stream())
        if number % 2:
            with torch.cuda.stream(side):
                other @ other  # takes multiprocessors away
        launch.backward(
            x.q, x.k, x.v, p.out, lse, p.dout, dlse, x.read, x.starts_q, x.starts_k, *x.most, *gradients, **how,
            deterministic=True, ordered_from=1 if number % 3 == 0 else None,
        )  # fmt: skip
        found.append(tuple(gradients))
    torch.cuda.synchronize()
    assert_gradients(found[0], p)
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def many(cuda: torch.device, tokens: int, heads: int = 4, dim: int = 64) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator(cuda).manual_seed(0)
    made = [
        torch.randn(2, tokens, heads, dim, generator=generator, device=cuda).bfloat16()
        for _ in range(4)
    ]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def test_gradients_that_are_views(cuda):
    """dout of out.sum() has strides of zero, or some of them; inputs may be transposed."""
    plain = many(cuda, 300)[:3]
    by_head = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in plain]
    weights = torch.randn(2, 300, 64, device=cuda).bfloat16()
    for loss in (
        lambda out, lse: out.sum(),
        lambda out, lse: (out.sum(2) * weights).sum(),
        lambda out, lse: lse.mT.contiguous().sin().sum() + out[..., 1:].float().sum(),
    ):
        found = []
        for kernel, leaves in (("sm89", plain), ("sm90", plain), ("sm90", by_head)):
            leaves = [t.detach().requires_grad_() for t in leaves]
            with choice.forced(kernel):
                out, lse, _ = lite_attention(*leaves)
                found.append(torch.autograd.grad(loss(out, lse), leaves))
        # A gradient of a sum of outputs is small beside its terms.
        for other in found[1:]:
            for got, want in zip(other, found[0]):
                assert (got - want).float().norm() <= 1e-2 * want.float().norm() + 1e-2


def test_what_is_refused_raises_with_the_reason(cuda):
    q, k, v, dout = many(cuda, 200, dim=192)
    with choice.forced("sm89"):
        out, _, _ = lite_attention(q, k, v, deterministic=True)
    with choice.forced("sm90"):
        with pytest.raises(RuntimeError, match="=sm90: the head dimension must be a multiple of 8"):
            out.backward(dout)


def test_what_is_refused_goes_to_the_host_package(cuda, launched):
    """Where nobody asks by name."""
    q, k, v, dout = many(cuda, 200, dim=192)
    with choice.forced("sm89"):
        out, _, _ = lite_attention(q, k, v, deterministic=True)
    results = []
    for kernel in (None, "sm89"):
        with choice.forced(kernel):
            results.append(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    assert not launched and all(map(torch.equal, *results))


def test_nothing_to_do(cuda, launched):
    leaves = [torch.randn(2, n, 2, 64, device=cuda).bfloat16() for n in (0, 130, 130)]
    leaves = [t.requires_grad_() for t in leaves]
    with choice.forced("sm90"):
        found = torch.autograd.grad(lite_attention(*leaves)[0].sum(), leaves)
    assert not launched and not any(t.any() for t in found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_holds_forward_and_backward(cuda, deterministic):
    q, k, v, dout = many(cuda, 640)
    generator = torch.Generator(cuda).manual_seed(1)

    def some(share: float) -> Tensor:
        return masks.pack(torch.rand(2, 4, 5, 10, generator=generator, device=cuda) < share)

    mask, kept = some(0.8), some(0.6)

    def call() -> tuple[Tensor, ...]:
        lists = {"threshold": -3.0, "grad_mask": kept}
        out, _, _ = lite_attention(q, k, v, mask, **lists, deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), dout)

    with choice.forced("sm90"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for step in range(3):
            with torch.no_grad():
                q.normal_(), dout.normal_()
                mask.copy_(some(0.9 - 0.2 * step))
            graph.replay()
            assert_near(tuple(t.clone() for t in captured), call())


def test_a_module_swaps_kernels_while_it_trains(cuda):
    """One step with each package's kernels, and the lists of one go on to the other."""
    runs = []
    for kernels in (("sm89", "sm89", "sm89"), ("sm90", "sm89", "sm90"), ("sm90", "sm90", "sm90")):
        torch.manual_seed(0)
        x = torch.randn(1, 300, 64)
        # Tokens look for their like, which is in their tile.
        x += 8 * nn.functional.one_hot(torch.arange(300) // 64, 64)
        x, lite = x.to(cuda), LiteAttention(threshold=-1.0)
        layer = nn.Linear(64, 3 * 2 * 64)
        layer.weight.data[:256] = torch.eye(64).repeat(4, 1)  # of q and k
        layer = layer.to(cuda)
        optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
        losses, slopes = [], []
        for kernel in kernels:
            optimizer.zero_grad()
            q, k, v = layer(x).view(1, 300, 3, 2, 64).bfloat16().unbind(2)
            with choice.forced(kernel):
                out = lite(q, k, v)
                loss = out.float().square().mean()
                loss.backward()
            slopes.append(layer.weight.grad.clone())
            optimizer.step()
            losses.append(loss.item())
        assert lite.density() < 1
        runs.append((losses, slopes[0]))
    for losses, slope in runs[1:]:
        torch.testing.assert_close(losses, runs[0][0], rtol=1e-2, atol=1e-4)
        assert (slope - runs[0][1]).norm() < 2e-2 * runs[0][1].norm()
