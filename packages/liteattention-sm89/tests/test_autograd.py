"""Gradients of the public function: on a CPU, through the operator, and what the kernels of a GPU are handed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from as_cuda import AsCuda
from module_helpers import drift, qkv
from torch import Tensor, nn

from liteattention_sm89 import (
    LiteAttention,
    autograd,
    lite_attention,
    masks,
    ops,
    reference,
)
from liteattention_sm89.check import is_aligned

ATTEND = torch.ops.liteattention_sm89.attend.default
BACKWARD = torch.ops.liteattention_sm89.backward.default
PACKING = {
    "cu_seqlens_q": torch.tensor([0, 130, 130, 200], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 70, 200, 200], dtype=torch.int32),
    "max_seqlen_q": 140, "max_seqlen_k": 130,
}  # fmt: skip
FORWARD = (
    "q", "k", "v", "out", "lse", "read_mask", "must_do", "write_mask", "cu_seqlens_q", "cu_seqlens_k"
)  # fmt: skip
LAUNCHED = (
    "q", "k", "v", "out", "lse", "dout", "dlse", "mask", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k", "dq", "dk", "dv",
)  # fmt: skip
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
both = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


def tensors(batch: int = 2, dtype: torch.dtype = torch.float64, rows: int = 200) -> list[Tensor]:
    shapes = ((batch, rows, 4, 16), (batch, 200, 2, 16), (batch, 200, 2, 16))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def case(packed: bool, dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    """Leaves, the tiles of a forward pass, some tiles to get a gradient, and options."""
    shape = (3, 4, 2, 3) if packed else (2, 4, 2, 4)
    read, some = (masks.pack(torch.rand(shape) < share) for share in (0.8, 0.6))
    options: dict[str, Any] = {"scale": 0.3, "causal": True} | (PACKING if packed else {})
    return SimpleNamespace(
        leaves=tensors(1 if packed else 2, dtype), read=read, some=some, options=options
    )


def gradients(
    leaves: list[Tensor], out: Tensor, lse: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Of a loss over out and lse: the gradients of the leaves, of out and of lse."""
    weights = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=weights, dtype=torch.float64).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=weights, dtype=torch.float64).to(lse.dtype)
    loss = (out * dout).sum() + lse.masked_fill(lse == -math.inf, 0).mul(dlse).sum()
    return list(torch.autograd.grad(loss, leaves)), dout, dlse


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@both
@pytest.mark.parametrize("dense", [False, True], ids=["listed", "dense"])
def test_gradients_of_some_tiles(packed, dense):
    x = case(packed)
    lists = (
        {"threshold": None} if dense else {"read_mask": x.read, "threshold": -1.0, "direction": -1}
    )
    out, lse, write = lite_attention(*x.leaves, **lists, grad_mask=x.some, **x.options)
    with torch.no_grad():
        expected = lite_attention(*x.leaves, **lists, **x.options)
    assert (
        torch.equal(out, expected[0])
        and torch.equal(lse, expected[1])
        and lse.dtype == torch.float64
    )
    assert write is None if dense else torch.equal(write, expected[2]) and not write.requires_grad
    found, dout, dlse = gradients(x.leaves, out, lse)
    mask = x.some if dense else x.some & x.read
    leaves = [y.detach() for y in x.leaves]
    given = {"out": out.detach(), "lse": lse.detach(), "dlse": dlse * lse.isfinite()}
    assert_close(found, reference.masked_gradients(*leaves, dout, mask, **given, **x.options))
    exact = gradients(x.leaves, *lite_attention(*x.leaves, **lists, **x.options)[:2])[0]
    assert all((one - other).abs().max() > 0.01 for one, other in zip(found, exact))


@both
@pytest.mark.parametrize("every", [
    lambda shape: masks.full(*shape), lambda shape: masks.full(1, 1, 1, shape[3])[0, 0, 0],
    lambda shape: torch.full((), -1, dtype=torch.int32),
], ids=["full", "row", "word"])  # fmt: skip
@pytest.mark.parametrize("dense", [False, True], ids=["listed", "dense"])
def test_gradients_of_all_tiles_are_those_of_autograd(packed, every, dense):
    x = case(packed)
    lists = {"threshold": None} if dense else {"read_mask": x.read, "threshold": -1.0}
    plain = lite_attention(*x.leaves, **lists, **x.options)
    mask = every((*x.read.shape[:3], 3 if packed else 4))
    assert_close(
        gradients(x.leaves, *lite_attention(*x.leaves, **lists, grad_mask=mask, **x.options)[:2])[
            0
        ],
        gradients(x.leaves, *plain[:2])[0],
    )


@both
def test_gradients_of_the_operator(packed):
    """What a GPU runs, with the CPU's arithmetic: bfloat16, no grad_mask and a direction on the device."""
    x = case(packed, torch.bfloat16)
    step = torch.tensor([-1], dtype=torch.int32)
    plain = lite_attention(*x.leaves, x.read, threshold=-1.0, direction=-1, **x.options)
    with AsCuda():
        found = lite_attention(*x.leaves, x.read, threshold=-1.0, direction=step, **x.options)
    assert "liteattention_sm89_attend" in found[0].grad_fn.name()
    assert all(map(torch.equal, found, plain)) and not found[2].requires_grad
    ours, dout, dlse = gradients(x.leaves, *found[:2])
    leaves, (out, lse) = ([y.detach() for y in z] for z in (x.leaves, found[:2]))
    given = {"out": out, "lse": lse, "dlse": dlse * lse.isfinite()}
    wanted = reference.masked_gradients(*leaves, dout, x.read, **given, **x.options)
    assert all(map(torch.equal, ours, wanted))
    assert_near(ours, gradients(x.leaves, *plain[:2])[0])


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_a_gradient_of_one_result(result):
    x = case(False)

    def of(results: tuple) -> tuple[Tensor, ...]:
        blind = results[1].isinf() if result else results[1].isinf().mT[..., None]
        loss = results[result].masked_fill(blind, 0).sin().sum()
        return torch.autograd.grad(loss, x.leaves, allow_unused=True)

    plain = of(lite_attention(*x.leaves, x.read, **x.options))
    every = torch.tensor(-1, dtype=torch.int32)
    found = of(lite_attention(*x.leaves, x.read, grad_mask=every, **x.options))
    for one, other in zip(found, plain):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("given", [("read",), ("some",), ("read", "some")], ids="-".join)
def test_lists_may_be_overwritten_before_the_backward_pass(given):
    x = case(False, torch.bfloat16)

    def call(read: Tensor, some: Tensor) -> tuple:
        lists = {"read_mask": read, "threshold": -1.0} if "read" in given else {"threshold": None}
        with AsCuda():
            return lite_attention(
                *x.leaves, **lists, grad_mask=some if "some" in given else None, **x.options
            )

    read, some = x.read.clone(), x.some.clone()
    out, lse, write = call(read, some)
    for mask in (read, some, write):
        if mask is not None:
            mask.zero_()
    found = gradients(x.leaves, out, lse)[0]
    wanted = gradients(x.leaves, *call(x.read, x.some)[:2])[0]
    assert all(map(torch.equal, found, wanted))


def test_a_list_has_no_gradient():
    x = case(False)
    out, lse, write = lite_attention(*x.leaves, x.read, grad_mask=x.some, **x.options)
    assert out.requires_grad and lse.requires_grad and not write.requires_grad
    with torch.no_grad():
        assert not any(
            y.requires_grad
            for y in lite_attention(*x.leaves, x.read, grad_mask=x.some, **x.options)
        )


def test_only_what_needs_a_gradient_gets_one():
    x = case(False)
    q, k, v = (y.detach() for y in x.leaves)
    out, _, _ = lite_attention(q, k.requires_grad_(), v, x.read, grad_mask=x.read, **x.options)
    out.sum().backward()
    assert k.grad is not None and q.grad is v.grad is None


def test_there_is_no_second_derivative():
    x = case(False)
    out, _, _ = lite_attention(*x.leaves, x.read, grad_mask=x.some, **x.options)
    first = torch.autograd.grad(out.square().sum(), x.leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative|differentiable"):
        sum(y.square().sum() for y in first).backward()


def test_opcheck():
    """With every argument that there is, and shapes without lists and packing."""
    x = case(True)
    starts = [PACKING[n] for n in ("cu_seqlens_q", "cu_seqlens_k")]
    rest = (140, 130, -1.0, "max", -1, 0.3, True, 128, 64, False)
    given = (*x.leaves, x.read, x.some, x.some, *starts, None, *rest)
    torch.library.opcheck(ATTEND, given)
    with torch.no_grad():
        out, lse, _ = ATTEND(*given)
    leaves = [y.detach() for y in x.leaves]
    saved = (torch.randn_like(out), torch.randn_like(lse), *leaves, out, lse, x.read, *starts)
    torch.library.opcheck(BACKWARD, (*saved, 140, 130, 0.3, True, 128, 64, True))

    x = case(False)
    given = (*x.leaves, *(None,) * 6, 200, 200, *rest[2:])
    torch.library.opcheck(ATTEND, given, test_utils="test_faketensor")
    for op in (ATTEND, BACKWARD):
        assert not any(n.alias_info for n in op._schema.arguments)


class Layer(nn.Module):
    def __init__(self, attention: nn.Module | None = None):
        super().__init__()
        self.project, self.attention = nn.Linear(24, 3 * 2 * 16), attention

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 16).unbind(2)
        attend = lite_attention if self.attention is None else self.attention
        out = attend(q, k, v, **more)
        return (out if isinstance(out, Tensor) else out[0]).flatten(2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_of_a_training_step(dynamic, fresh_compiler):
    layer, read, some = Layer(), masks.full(2, 2, 2, 3), torch.rand(2, 2, 2, 3) < 0.7

    def step(x: Tensor) -> Tensor:
        return layer(x, read_mask=read, threshold=-3.0, grad_mask=some, causal=True).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x = torch.randn(2, 150, 24)
    found = []
    for run in (step, compiled):
        layer.zero_grad()
        run(x).backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


def test_a_module_trains():
    """Through lists that shrink from call to call."""
    lite = LiteAttention(threshold=-0.5)
    layer, head = Layer(lite), nn.Linear(32, 24)
    x, target = torch.randn(1, 300, 24), torch.randn(24, 24)
    with torch.no_grad():  # every token looks for its like, which is in its tile
        x += 8 * nn.functional.one_hot(torch.arange(300) // 64, 24)
        queries, keys, _ = layer.project.weight.mul_(2).view(3, -1, 24)
        keys.copy_(queries)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-2)
    losses, densities = [], []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (head(layer(x)) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        densities.append(lite.density().item())
    assert losses[-1] < 0.8 * losses[0]
    assert densities == sorted(densities, reverse=True) and densities[-1] < densities[0] < 1


# ---- what the kernels are handed -------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[dict]]:
    """The launcher's calls of the backward pass, computed on the CPU. Enter `AsCuda` to get there."""
    calls: list[dict] = []

    def forward(*given, **more):
        a = dict(zip((*FORWARD, "max_seqlen_q"), given, strict=True)) | more
        targets = [a.pop(n) for n in ("out", "lse", "write_mask")]
        known = inspect.signature(reference.lite_attention).parameters
        results = reference.lite_attention(**{n: y for n, y in a.items() if n in known})
        for target, result in zip(targets, results):
            if target is not None:
                target.copy_(result)

    def backward(facts, *given, **more):
        assert facts == {"deterministic": more["deterministic"]}
        a = dict(zip(LAUNCHED, given, strict=True)) | more
        calls.append(dict(a))
        assert (
            all(is_aligned(a[n]) for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
            and a["scale"] > 0
        )
        assert all(a[n] is None or a[n].is_contiguous() for n in ("lse", "mask"))
        assert a["dlse"] is None or a["dlse"].stride(2) == 1
        targets = [a.pop(n) for n in ("dq", "dk", "dv")]
        a.pop("deterministic")
        for target, result in zip(targets, reference.masked_gradients(**a)):
            target.copy_(result)

    monkeypatch.setattr(ops, "launcher", lambda *_: forward)
    monkeypatch.setattr(autograd, "launcher", lambda *_, **facts: partial(backward, facts))
    with torch.library._scoped_library("liteattention_sm89", "IMPL") as library:
        library.impl("forward", ops._forward_cuda, "CPU")
        library.impl("attend", autograd._attend_cuda, "CPU")
        library.impl("backward", autograd._backward_cuda, "CPU")
        yield calls


def on_gpu(leaves: list[Tensor], loss: Any, **more: Any) -> list[Tensor]:
    with AsCuda():
        out, lse, _ = lite_attention(*leaves, **more)
        return list(torch.autograd.grad(loss(out, lse), leaves))


def assert_near(found: list[Tensor], wanted: Iterable[Tensor]) -> None:
    """bfloat16: what is handed over is rounded."""
    for one, other in zip(found, wanted, strict=True):
        error, size = (one.double() - other.double()).norm(), other.double().norm()
        assert error <= 2e-2 * size + 1e-30, error / size


def weighted(out: Tensor, lse: Tensor) -> Tensor:
    weights = torch.arange(out.numel()).view(out.shape).sin()
    of_rows = torch.arange(lse.numel()).view(lse.shape).cos()
    return (out * weights).sum() + (lse.masked_fill(lse.isinf(), 0) * of_rows).sum()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
class TestLaunches:
    @both
    @pytest.mark.parametrize("scale", [0.3, -0.3, 0, -0.0, 1e-60, -1e-60])
    def test_scales(self, launched, packed, scale):
        x = case(packed, torch.bfloat16)
        options = x.options | {"scale": scale, "threshold": -math.inf, "read_mask": x.read}
        found = on_gpu(x.leaves, weighted, **options)
        (a,) = launched
        assert a["scale"] == (abs(scale) if abs(scale) > 0.1 else 1.0)
        assert torch.equal(a["mask"], x.read) and a["deterministic"] is False
        leaves = [y.detach().double().requires_grad_() for y in x.leaves]
        out, lse, _ = lite_attention(*leaves, **options)
        assert_near(found, list(torch.autograd.grad(weighted(out, lse), leaves)))
        assert not found[0].any() and not found[1].any() if abs(scale) < 0.1 else found[0].any()

    def test_gradients_that_are_views(self, launched):
        """out.sum() gives a dout without strides; transposed and shifted ones come from other models."""
        leaves = tensors(2, torch.bfloat16)
        shifted = torch.cat((leaves[0][..., :1], leaves[0]), 3)[..., 1:].detach().requires_grad_()
        assert not is_aligned(shifted)
        for loss in (
            lambda out, lse: out.sum(), lambda out, lse: out.transpose(1, 2).contiguous().sin().sum(),
            lambda out, lse: lse.sum(), lambda out, lse: lse.mT.contiguous().sin().sum() + out[..., 1:].sum(),
        ):  # fmt: skip
            found = on_gpu([shifted, *leaves[1:]], loss, threshold=None, causal=True)
            doubles = [y.detach().double().requires_grad_() for y in (shifted, *leaves[1:])]
            out, lse, _ = lite_attention(*doubles, threshold=None, causal=True)
            wanted = torch.autograd.grad(loss(out, lse), doubles, allow_unused=True)
            assert_near(
                found, [torch.zeros_like(d) if w is None else w for w, d in zip(wanted, doubles)]
            )
        assert all(a["mask"] is None for a in launched) and len(launched) == 4

    def test_tiles_of_the_gradient(self, launched):
        x = case(False, torch.bfloat16)
        more = {"read_mask": x.read, "threshold": -1.0, "grad_mask": x.some[:1], **x.options}
        on_gpu(x.leaves, weighted, **more)
        assert torch.equal(launched[0]["mask"], x.some[:1].expand_as(x.read) & x.read)
        on_gpu(x.leaves, weighted, threshold=None, grad_mask=x.some)
        assert torch.equal(launched[1]["mask"], x.some)
        on_gpu(x.leaves, weighted, **more | {"read_mask": None})
        assert torch.equal(launched[2]["mask"], x.some[:1].expand_as(x.read))

    def test_determinism(self, launched):
        leaves = tensors(2, torch.bfloat16)
        on_gpu(leaves, weighted, deterministic=True)
        torch.use_deterministic_algorithms(True)
        try:
            on_gpu(leaves, weighted)
        finally:
            torch.use_deterministic_algorithms(False)
        on_gpu(leaves, weighted)
        assert [a["deterministic"] for a in launched] == [True, True, False]

    @pytest.mark.parametrize("batch, rows, keys", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
    def test_nothing_to_do(self, launched, batch, rows, keys):
        shapes = ((batch, rows, 4, 16), (batch, keys, 2, 16), (batch, keys, 2, 16))
        leaves = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
        for threshold in (None, -10.0):
            found = on_gpu(leaves, lambda out, lse: out.sum(), threshold=threshold)
            assert [y.shape for y in found] == [y.shape for y in leaves]
            assert not any(y.any() for y in found) and not launched

    def test_a_module_keeps_its_lists(self, launched):
        """Calls in between overwrite the masks of the module."""
        lite, inputs = LiteAttention(threshold=-4.0), qkv(1, 200, 300, 2, 1, 64, torch.bfloat16)
        with AsCuda():
            lite(*inputs)
        leaves, mask = [x.clone().requires_grad_() for x in inputs], lite.write_mask.clone()
        assert lite.density() < 1
        with AsCuda():
            out = lite(*leaves)
            for _ in range(3):
                lite(*drift(*inputs))
            dout = torch.randn_like(out)
            out.backward(dout)
        doubles = [x.double() for x in inputs]
        wanted = reference.masked_gradients(*doubles, dout.double(), mask)
        assert torch.equal(launched[0]["mask"], mask)
        assert_near([leaf.grad for leaf in leaves], wanted)
