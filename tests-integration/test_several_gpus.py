"""Several GPUs of one host, against one of them: what the tests on gloo say of the reference, of the kernels.

Two ranks have a GPU each and NCCL. Four and eight ranks share what GPUs there are, over gloo, and their messages
go through the host. What runs on a rank takes the device, so that the same code runs on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cula.distributed import ContextParallel, exchange
from cula.kda import chunk_kda
from cula.lightning import chunk_gated_delta_rule, chunk_lightning_attn, chunk_simple_gla
from cula.lite import LiteAttention, SeqParallelLiteAttention
from tools.ranks import World

pytestmark = pytest.mark.gpu

RANKS, HEADS = 2, 2
# Relative RMSE between a sequence that is cut and one that is not; KDA's walk rounds its operands to 16 bits.
BARS = {"kda": 5e-3, "gdn": 1.5e-3, "gla": 1.5e-3, "lightning": 1.5e-3}
GRADIENT_BAR = 2e-2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("two GPUs of one host are needed: with one there is nothing to exchange")
    with World(RANKS, "nccl", tmp_path_factory.mktemp("ranks"), seconds=500) as run:
        yield run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    with World(1, "nccl", tmp_path_factory.mktemp("one"), seconds=500) as run:
        yield run


@pytest.fixture(scope="module", params=[4, 8])
def sharing(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., list[Any]]]:
    folder = tmp_path_factory.mktemp("sharing")
    with World(request.param, "gloo", folder, seconds=500, detail=False) as run:
        yield functools.partial(run, through_the_host)


# ---- what runs on the ranks ------------------------------------------------------------------------------------------


def through_the_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs it where gloo does not send what lies on a GPU."""

    def staged(real: Callable[..., Any], into: Tensor, x: Tensor, *more: Any, group: Any) -> None:
        host = into.cpu()
        real(host, x.cpu(), *more, group=group)
        into.copy_(host)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_into", "exchange_into"):
            patch.setattr(exchange, name, functools.partial(staged, getattr(exchange, name)))
        return function(*arguments)


def sizes(device: str) -> tuple[torch.device, int, int]:
    """This rank's device, tokens of a batch and the dimension of a head."""
    if device == "cpu":
        return torch.device(device), 256, 16
    return torch.device(device, dist.get_rank() % torch.cuda.device_count()), 4096, 128


def problem(device: str) -> dict[str, Tensor]:
    """q, k, v, g and beta of the whole batch, the same on every rank."""
    place, tokens, dim = sizes(device)
    rng = torch.Generator().manual_seed(0)
    q, k, v, g = torch.randn(4, 1, tokens, HEADS, dim, generator=rng).unbind()
    beta = torch.rand(1, tokens, HEADS, generator=rng)
    k = nn.functional.normalize(k, dim=-1)
    low = {"q": q, "k": k, "v": v, "beta": beta}
    return {name: x.to(place, torch.bfloat16) for name, x in low.items()} | {
        "g": (-0.1 * g.abs()).to(place)
    }


def call(kind: str, x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    if kind == "kda":
        return chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **options)
    if kind == "gdn":
        g = g[..., 0].contiguous()
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **options)
    if kind == "gla":
        return chunk_simple_gla(q, k, v, g[..., 0].contiguous(), **options)
    return chunk_lightning_attn(q, k, v, 1, 4, **options)


def near(got: Tensor, want: Tensor, bar: float, name: str) -> None:
    assert got.shape == want.shape and got.isfinite().all(), name
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    assert error <= bar, f"{name}: relative RMSE {error:.2e}, expected at most {bar:.1e}"


def context_of(device: str, cut: str, exchange: str = "auto") -> tuple[ContextParallel, Tensor]:
    """cut: "contiguous" or "zigzag" of one sequence, "packed" of three, one of them empty; and the offsets."""
    place, tokens, _ = sizes(device)
    offsets = [0, tokens * 3 // 8, tokens * 3 // 8, tokens] if cut == "packed" else [0, tokens]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    layout = "zigzag" if cut == "zigzag" else "contiguous"
    cp = ContextParallel(
        dist.group.WORLD, cu_seqlens_cpu=cu_seqlens, layout=layout, exchange=exchange
    )
    cp.check()
    return cp, cu_seqlens.to(place)


def forward(device: str, kind: str, cut: str) -> None:
    """Outputs and final states as on one device; both exchanges and a second run to the bit."""
    x = problem(device)
    found = []
    for way in ("gather", "gather", "transpose"):
        cp, cu_seqlens = context_of(device, cut, way)
        local = {name: cp.shard(t) for name, t in x.items()}
        found.append(call(kind, local, output_final_state=True, cp_context=cp))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))
    want, states = call(kind, x, output_final_state=True, cu_seqlens=cu_seqlens)
    o, final = found[0]
    near(o, cp.shard(want), BARS[kind], "o")
    for i, piece in enumerate(cp.pieces):
        if piece.ends and piece.start < piece.stop:
            near(final[i], states[piece.sequence], BARS[kind], f"state {i}")


def on_another_device(device: str) -> None:
    """Tensors need not lie on the current device."""
    x, (cp, _) = problem(device), context_of(device, "zigzag")
    local = {name: cp.shard(t) for name, t in x.items()}
    want, _ = call("kda", local, cp_context=cp)
    other: Any = contextlib.nullcontext()
    if device == "cuda":
        other = torch.cuda.device(RANKS - 1 - dist.get_rank())
    with other:
        got, _ = call("kda", local, cp_context=cp)
    assert got.device == want.device and torch.equal(got, want)


def quickly() -> contextlib.AbstractContextManager[Any]:
    """FLA's kernels take the first candidate, because timing all takes minutes."""
    if find_spec("fla") is None or not torch.cuda.is_available():
        return contextlib.nullcontext()
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    patch = pytest.MonkeyPatch.context()
    patched = contextlib.ExitStack()
    patched.enter_context(patch).setattr(
        Autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:1]
    )
    return patched


def backward(device: str, kind: str, cut: str) -> None:
    """Gradients as on one device, by FLA's backward where that is installed."""
    x, (cp, cu_seqlens) = problem(device), context_of(device, cut)
    d_o = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1)).to(x["v"])
    given = {name: t.clone().requires_grad_() for name, t in x.items()}
    local = {name: cp.shard(t).clone().requires_grad_() for name, t in x.items()}
    wanted = ["q", "k", "v", "g"] + ["beta"] * (kind != "gla")
    with quickly():
        o, _ = call(kind, given, cu_seqlens=cu_seqlens)
        want = torch.autograd.grad(o, [given[name] for name in wanted], d_o)
        got, _ = call(kind, local, cp_context=cp)
        grads = torch.autograd.grad(got, [local[name] for name in wanted], cp.shard(d_o))
    for name, a, b in zip(wanted, grads, want, strict=True):
        near(a, cp.shard(b), GRADIENT_BAR, f"gradient of {name}")


class Layer(nn.Module):
    """KDA behind a short convolution; `[B, T, HEADS * dim]` to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.inside = nn.Linear(HEADS * dim, HEADS * (4 * dim + 1))
        self.conv = nn.Parameter(torch.randn(HEADS * (4 * dim + 1), 4) * 0.3)
        self.A_log = nn.Parameter(torch.rand(HEADS))

    def forward(self, x: Tensor, cp: ContextParallel) -> Tensor:
        mixed = cp.causal_conv1d(self.inside(x), self.conv, activation="silu")
        *tokens, beta = mixed.split([HEADS * self.dim] * 4 + [HEADS], -1)
        q, k, v, g = (t.unflatten(-1, (HEADS, self.dim)) for t in tokens)
        o, _ = chunk_kda(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log,
        )  # fmt: skip
        return x + o.flatten(2)


def sharded(device: str) -> None:
    """FSDP2 and `with cp:` over the same ranks: a sequence over both, and gradients that are those of one device."""
    place, _, dim = sizes(device)
    tokens = 256
    torch.manual_seed(0)
    model = Layer(dim).to(place, torch.bfloat16)
    across = Layer(dim).to(place, torch.bfloat16)
    across.load_state_dict(model.state_dict())
    mesh = init_device_mesh(device, (RANKS,))
    fully_shard(across, mesh=mesh)
    x = torch.randn(1, tokens, HEADS * dim, generator=torch.Generator().manual_seed(2))
    x = x.to(place, torch.bfloat16)
    offsets = torch.tensor([0, tokens])
    alone = ContextParallel(
        dist.new_group([dist.get_rank()], use_local_synchronization=True), offsets
    )
    cp = ContextParallel(mesh, cu_seqlens_cpu=offsets, layout="zigzag")
    with quickly():
        want = model(x, alone)
        want.float().square().sum().backward()
        with cp:
            got = across(cp.shard(x), cp)
            got.float().square().sum().backward()
    near(got, cp.shard(want), BARS["kda"], "output")
    for (name, one), (_, other) in zip(
        model.named_parameters(), across.named_parameters(), strict=True
    ):
        near(other.grad.full_tensor() * RANKS, one.grad, GRADIENT_BAR, f"gradient of {name}")


def convolution(device: str) -> None:
    place, tokens, dim = sizes(device)
    rng = torch.Generator().manual_seed(3)
    given = [torch.randn(*shape, generator=rng) for shape in ((1, tokens, dim), (dim, 4), (dim,))]
    given = [x.to(place, torch.bfloat16).requires_grad_() for x in given]
    cp, _ = context_of(device, "zigzag")
    padded = nn.functional.pad(given[0].mT, (3, 0))
    want = nn.functional.conv1d(padded, given[1][:, None], given[2], groups=dim).mT
    d_y = torch.randn(want.shape, generator=rng).to(want)
    grads = torch.autograd.grad(want, given, d_y)
    own = [cp.shard(given[0].detach()).clone(), *(x.detach().clone() for x in given[1:])]
    own = [x.requires_grad_() for x in own]
    y = cp.causal_conv1d(*own)
    near(y, cp.shard(want), 5e-3, "y")
    found = list(torch.autograd.grad(y, own, cp.shard(d_y)))
    near(found[0], cp.shard(grads[0]), 5e-3, "gradient of x")
    for name, mine, whole in zip(("weight", "bias"), found[1:], grads[1:], strict=True):
        total = mine.float().contiguous()
        dist.all_reduce(total)
        near(total, whole, GRADIENT_BAR, f"gradient of {name}")


def skip_lists(device: str, heads_kv: int) -> None:
    """By heads as one module on one device; around the ranks as the merged attentions to two parts."""
    place, _, dim = sizes(device)
    tokens, rank = 512, dist.get_rank()
    rng = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, tokens, h, dim, generator=rng) for h in (4, heads_kv, heads_kv))
    q, k, v = (
        x.to(place, torch.bfloat16)
        for x in (q, k * torch.linspace(0.1, 2, tokens)[:, None, None], v)
    )
    across = SeqParallelLiteAttention(threshold=-2.0, group=dist.group.WORLD)
    whole = LiteAttention(threshold=-2.0)
    mine = slice(rank * tokens // RANKS, (rank + 1) * tokens // RANKS)
    for _ in range(3):
        want, lse = whole(q, k, v, return_softmax_lse=True)
        got, got_lse = across(q[:, mine], k[:, mine], v[:, mine], return_softmax_lse=True)
        if heads_kv % RANKS:
            # Parts keep other tiles than the whole does; what they drop is small.
            near(got, want[:, mine], 0.25, "around")
            continue
        near(got, want[:, mine], 1e-3, "by heads")
        near(got_lse, lse[:, :, mine], 1e-4, "log-sum-exp")
        masks = across.lite_attention[0].write_mask, whole.write_mask.chunk(RANKS, 1)[rank]
        assert (masks[0] != masks[1]).float().mean() <= 0.02
    if heads_kv % RANKS:
        across.enable_skip_optimization(False)
        whole.enable_skip_optimization(False)
        got = across(q[:, mine], k[:, mine], v[:, mine])
        near(got, whole(q, k, v)[:, mine], 5e-3, "all tiles")


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["contiguous", "packed", "zigzag"])
@pytest.mark.parametrize("kind", list(BARS))
def test_forward(ranks, kind, cut):
    ranks(forward, "cuda", kind, cut)


def test_tensors_on_another_device_than_the_current_one(ranks):
    ranks(on_another_device, "cuda")


@pytest.mark.parametrize("cut", ["packed", "zigzag"])
@pytest.mark.parametrize("kind", ["kda", "gdn", "gla"])
def test_backward(ranks, kind, cut):
    ranks(backward, "cuda", kind, cut)


@pytest.mark.parametrize("kind", ["kda", "gdn", "gla"])
def test_one_gpu_that_holds_both_parts(one_rank, kind):
    """Under zigzag a rank by itself has two slices of a sequence, and sends the state between them to itself."""
    one_rank(forward, "cuda", kind, "zigzag")
    one_rank(backward, "cuda", kind, "zigzag")


@pytest.mark.parametrize("cut", ["contiguous", "packed", "zigzag"])
@pytest.mark.parametrize("kind", ["kda", "gdn", "gla"])
def test_many_ranks_that_share_a_gpu(sharing, kind, cut):
    """Slices with others on both sides, of which M travels, and ranks that hold fewer heads than there are ranks."""
    sharing(forward, "cuda", kind, cut)
    sharing(backward, "cuda", kind, cut)


def test_sharded_model_over_one_sequence(ranks):
    ranks(sharded, "cuda")


def test_short_convolution(ranks):
    ranks(convolution, "cuda")


@pytest.mark.parametrize("heads_kv", [2, 1])
def test_skip_list_attention(ranks, heads_kv):
    ranks(skip_lists, "cuda", heads_kv)
