"""Gradients on a GPU, through the public function."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from lite_gradients import EMULATED, LISTS, problem
from torch import Tensor, nn

from cula_testing.lite.gradients import Backward, Problem, assert_gradients
from liteattention_sm89 import LiteAttention, lite_attention, masks, reference

pytestmark = pytest.mark.gpu

# Few kernels, because each takes seconds to compile: what is not about them runs with LISTS' or with causal ones.
CALLS = [c for c in EMULATED if c.dim == LISTS.dim and c.listed is not None]
CALLS += [
    replace(LISTS, rows=1000, keys=1333, heads=8, heads_k=2, batch=2, listed=0.3),
    replace(LISTS, rows=1500, keys=1500, heads=4, heads_k=2, dlse=True),
    Backward(1500, 1500, causal=True, heads=4),
    Backward(1500, 700, causal=True, heads=1),
    Backward(300, 1000, causal=True, heads=4, heads_k=2, batch=2),
    Backward(
        dim=128, listed=0.7, how=("atomics",), lengths=((1000, 700), (0, 5), (1, 1500), (640, 0), (129, 128))
    ),
    Backward(
        dim=72, causal=True, index_dtype="int64", how=("order",), lengths=((700, 1000), (500, 64), (0, 9), (64, 64))
    ),
    Backward(900, 1000, dim=256, heads=3, heads_k=3, listed=0.5, block_n=128, how=("order",)),
    Backward(513, 640, dim=192, causal=True, listed=0.7, dtype="float16", how=("atomics",)),
]  # fmt: skip


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def attend(call: Backward, p: Problem, how: str = "atomics") -> tuple[Tensor, ...]:
    """The gradients of a forward pass over the listed tiles, or over all with a grad_mask."""
    x = p.inputs
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    lists: dict[str, Any] = {"threshold": None}
    if x.read is not None:
        lists = {"threshold": -math.inf, "grad_mask" if call.fewer else "read_mask": x.read}
    if call.lengths is not None:
        lists |= {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]}
    out, lse, _ = lite_attention(
        *leaves, **lists, causal=call.causal, block_n=call.block_n, cu_seqlens_q=x.starts_q, cu_seqlens_k=x.starts_k,
        deterministic=how == "order",
    )  # fmt: skip
    results, given = ([out], [p.dout]) if p.dlse is None else ([out, lse], [p.dout, p.dlse])
    return torch.autograd.grad(results, leaves, given)


@pytest.mark.parametrize("call, how", [
    pytest.param(c, how, id=f"{c}-{how}") for c in CALLS for how in c.how
])  # fmt: skip
def test_numbers(cuda, call, how):
    p = problem(call, str(cuda))
    assert_gradients(attend(call, p, how), p)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """The oracle's results lie on the device."""
    yield
    problem.cache_clear()
    gc.collect()


def many(cuda: torch.device, tokens: int, heads: int = 8, dim: int = LISTS.dim) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator(cuda).manual_seed(0)
    shape = (2, tokens, heads, dim)
    made = [torch.randn(shape, generator=generator, device=cuda).bfloat16() for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def some_tiles(
    cuda: torch.device, tiles: int, keys: int, share: float = 0.5, heads: int = 8
) -> Tensor:
    generator = torch.Generator(cuda).manual_seed(1)
    shape = (2, heads, tiles, keys)
    return masks.pack(torch.rand(shape, generator=generator, device=cuda) < share)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def of(loss: Callable[..., Tensor], *leaves: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out, lse, _ = lite_attention(*leaves, **options)
    return torch.autograd.grad(loss(out, lse), leaves)


def weighted_by(dout: Tensor) -> Callable[..., Tensor]:
    return lambda out, lse: (out * dout).sum()


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error, size = (got.double() - want.double()).norm(), want.double().norm()
        assert error < 1e-2 * size + 1e-30, f"{name}: {error / size}"


@pytest.mark.parametrize("asked", ["argument", "torch"])
def test_repeated_calls_give_the_same_bits(cuda, asked):
    q, k, v, dout = many(cuda, 1024)
    mask = some_tiles(cuda, 8, 16)

    def call() -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"deterministic": True} if asked == "argument" else {}
        out, _, _ = lite_attention(q, k, v, mask, threshold=-math.inf, **options)
        return torch.autograd.grad(out, (q, k, v), dout)

    with deterministic_algorithms() if asked == "torch" else contextlib.nullcontext():
        first = call()
        for _ in range(100):
            assert all(map(torch.equal, first, call()))
    assert_near(first, of(weighted_by(dout), q, k, v, read_mask=mask, threshold=-math.inf))


def test_atomics_leave_little_to_chance(cuda):
    """Gradients of k and v have one order in any case."""
    q, k, v, dout = many(cuda, 1024)
    first = of(weighted_by(dout), q, k, v)
    for _ in range(20):
        again = of(weighted_by(dout), q, k, v)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        assert (first[0].double() - again[0].double()).norm() < 1e-3 * first[0].double().norm()


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_sequences(cuda, deterministic):
    """The last queries alone and the others alone: the causal mask is aligned at the end."""
    q, k, v, dout = many(cuda, 8192, 4, 128)
    options = {"threshold": None, "causal": True, "deterministic": deterministic}
    dq, dk, dv = of(weighted_by(dout), q, k, v, **options)
    first, last = slice(-512), slice(-512, None)
    ends = of(weighted_by(dout[:, last]), leaf(q[:, last]), k, v, **options)
    rest = of(weighted_by(dout[:, first]), *(leaf(t[:, first]) for t in (q, k, v)), **options)
    assert_near(
        (dq[:, first], dk[:, last], dv[:, last]), (rest[0], ends[1][:, last], ends[2][:, last])
    )
    sums = (ends[i][:, first].float() + rest[i].float() for i in (1, 2))
    assert_near((dq[:, last], dk[:, first], dv[:, first]), (ends[0], *sums))


def test_a_graph_holds_forward_and_backward(cuda):
    q, k, v, dout = many(cuda, 640, 4)
    mask, some = some_tiles(cuda, 5, 10, 0.8, 4), some_tiles(cuda, 5, 10, 0.6, 4)

    def call() -> tuple[Tensor, ...]:
        out, _, kept = lite_attention(
            q, k, v, mask, threshold=-3.0, grad_mask=some, deterministic=True
        )
        return (*torch.autograd.grad(out, (q, k, v), dout), out, kept)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in range(3):
        generator = torch.Generator(cuda).manual_seed(seed)
        with torch.no_grad():
            for tensor in (q, k, v, dout):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=cuda))
            mask.copy_(some_tiles(cuda, 5, 10, 0.9 - 0.2 * seed, 4))
        graph.replay()
        results = [t.clone() for t in captured]
        assert all(map(torch.equal, results, call()))


def test_nothing_synchronises(cuda):
    q, k, v, dout = many(cuda, 512)
    mask, some = some_tiles(cuda, 4, 8), some_tiles(cuda, 4, 8)
    for warm in (True, False):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            for deterministic in (False, True):
                out, _, _ = lite_attention(
                    q, k, v, mask, grad_mask=some, deterministic=deterministic
                )
                torch.autograd.grad(out, (q, k, v), dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(cuda, dynamic, fresh_compiler):
    mask, some = some_tiles(cuda, 3, 5, 0.8, 4), some_tiles(cuda, 3, 5, 0.6, 4)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = lite_attention(
            q, k, v, mask, threshold=-3.0, grad_mask=some, deterministic=True
        )
        return out.float().sin().sum() + lse.masked_fill(lse == -math.inf, 0).sum()

    leaves = many(cuda, 300, 4)[:3]
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    plain = torch.autograd.grad(loss(*leaves), leaves)
    assert_near(torch.autograd.grad(compiled(*leaves), leaves), plain)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-60])
def test_scales(cuda, scale, deterministic):
    q, k, v, dout = many(cuda, 300, 2)
    mask = some_tiles(cuda, 3, 5, 0.7, 2)
    found = of(
        weighted_by(dout), q, k, v, read_mask=mask, scale=scale, threshold=-math.inf,
        deterministic=deterministic,
    )  # fmt: skip
    doubles = [t.detach().double() for t in (q, k, v)]
    wanted = reference.masked_gradients(*doubles, dout.double(), mask, scale=scale)
    if scale > -0.1:
        assert not found[0].any() and not found[1].any()
    assert_near(found, wanted)


def test_gradients_that_are_views(cuda):
    """dout of out.sum() has strides of zero; inputs may be transposed, or lie behind an odd address."""
    plain = many(cuda, 300, 4)[:3]
    by_head = [
        t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in plain
    ]
    shifted = [torch.cat((t[..., :1], t), 3)[..., 1:].detach().requires_grad_() for t in plain]
    assert shifted[0].data_ptr() % 16
    for loss in (
        lambda out, lse: out.sum(),
        lambda out, lse: out.transpose(1, 2).contiguous().float().sin().sum(),
        lambda out, lse: lse.sum(),
        lambda out, lse: lse.mT.contiguous().sin().sum() + out[..., 1:].float().sum(),
    ):
        first, *others = (
            of(loss, *leaves, deterministic=True) for leaves in (plain, by_head, shifted)
        )
        assert all(all(map(torch.equal, first, other)) for other in others)
        doubles = [t.detach().double().requires_grad_() for t in plain]
        wanted = torch.autograd.grad(
            loss(*reference.lite_attention(*doubles)[:2]), doubles, allow_unused=True
        )
        assert_near(first, tuple(torch.zeros(()) if w is None else w for w in wanted))


def test_packed_qkv_is_read_where_it_is(cuda):
    generator = torch.Generator(cuda).manual_seed(0)
    qkv = (
        torch.randn(2, 300, 3, 4, 128, generator=generator, device=cuda).bfloat16().requires_grad_()
    )
    out, _, _ = lite_attention(*qkv.unbind(2), threshold=None, causal=True)
    (found,) = torch.autograd.grad(out.float().square().sum(), qkv)
    doubles = qkv.detach().double().requires_grad_()
    exact, _, _ = reference.lite_attention(*doubles.unbind(2), causal=True)
    (wanted,) = torch.autograd.grad(exact.square().sum(), doubles)
    assert (found.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_offsets_beyond_32_bits(cuda):
    """Heads that lie more than 2^31 elements apart."""
    q, k, v, dout = many(cuda, 130, 1)
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device=cuda)
    apart = far.as_strided((2, 130, 1, 64), (2**31, 64, 64, 1))
    apart.copy_(q.detach())
    found = of(weighted_by(dout), apart.requires_grad_(), k, v, deterministic=True)
    wanted = of(weighted_by(dout), q, k, v, deterministic=True)
    assert all(map(torch.equal, found, wanted))


def test_a_module_trains(cuda):
    """Through lists that shrink from call to call, as in fp32 on the CPU."""
    x = torch.randn(1, 300, 64)
    # Tokens look for their like, which is in their tile.
    x += 8 * nn.functional.one_hot(torch.arange(300) // 64, 64)
    target = torch.randn(1, 300, 64)
    start = nn.Linear(64, 3 * 2 * 64)
    with torch.no_grad():
        queries, keys, _ = start.weight.mul_(2).view(3, -1, 64)
        keys.copy_(queries)
    head = nn.Linear(128, 64)
    losses: dict[str, list[float]] = {}
    slopes = []
    for device, dtype in (("cpu", torch.float32), (str(cuda), torch.bfloat16)):
        lite = LiteAttention(threshold=-1.0)
        model = nn.ModuleList((nn.Linear(64, 3 * 2 * 64), nn.Linear(128, 64))).to(device)
        for layer, other in zip(model, (start, head)):
            layer.load_state_dict(other.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        losses[device] = []
        for _ in range(10):
            optimizer.zero_grad()
            q, k, v = model[0](x.to(device)).view(1, 300, 3, 2, 64).to(dtype).unbind(2)
            out = lite(q, k, v)
            loss = (model[1](out.float().flatten(2)) - target.to(device)).square().mean()
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            if not losses[device]:
                slopes.append(model[0].weight.grad.cpu().view(3, -1))
            optimizer.step()
            losses[device].append(loss.item())
        assert losses[device][-1] < losses[device][0] and lite.density() < 1
    torch.testing.assert_close(losses["cpu"], losses[str(cuda)], rtol=2e-2, atol=1e-3)
    errors = (slopes[0] - slopes[1]).norm(dim=1) / slopes[0].norm(dim=1)
    assert errors.max() < 0.03, f"of the weights of q, k and v: {errors}"


def test_lists_may_be_overwritten_before_the_backward_pass(cuda):
    q, k, v, dout = many(cuda, 512)
    mask = some_tiles(cuda, 4, 8)
    own = mask.clone()
    out, _, write = lite_attention(q, k, v, own, deterministic=True)
    own.zero_()
    write.zero_()
    found = torch.autograd.grad(out, (q, k, v), dout)
    out, _, _ = lite_attention(q, k, v, mask, deterministic=True)
    assert all(map(torch.equal, found, torch.autograd.grad(out, (q, k, v), dout)))


def test_out_of_order_streams(cuda):
    """Forward and backward run on the stream of the forward, whatever the current one is."""
    q, k, v, dout = many(cuda, 512)
    expected = of(weighted_by(dout), q, k, v, deterministic=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out, _, _ = lite_attention(q, k, v, deterministic=True)
        loss = (out * dout).sum()
    torch.cuda.current_stream().wait_stream(side)
    found = torch.autograd.grad(loss, (q, k, v))
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
