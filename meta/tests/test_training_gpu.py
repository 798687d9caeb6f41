"""Training steps on a GPU: compiled, in autocast, under a checkpoint of activations; and the kernels' operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.nn.functional import layer_norm, logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cula import delta, kda, lightning

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_fla")]

WIDTH, H, HV, D = 64, 2, 8, 128
LENGTHS = (70, 130, 300, 200)
BOUND = 2e-2  # two results of 16-bit products in orders that the compiler chooses


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has a kernel for each of these functions")
    torch.manual_seed(0)
    torch._dynamo.reset()
    return torch.device("cuda", torch.cuda.current_device())


def attend_kda(q, k, v, g, beta, A_log):
    return kda.chunk_kda(
        q, k, v, g, beta, A_log=A_log, safe_gate=True, lower_bound=-5.0, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def attend_delta(q, k, v, g, beta, A_log, impl="auto"):
    return lightning.chunk_gated_delta_rule(
        q, k, v, g[..., 0], beta, A_log=A_log, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True, impl=impl,
    )  # fmt: skip


def attend_lightning(q, k, v, g, beta, A_log):
    return lightning.chunk_lightning_attn(q, k, v, 1, 4, use_qk_l2norm_in_kernel=True)


def attend_gla(q, k, v, g, beta, A_log):
    return lightning.chunk_simple_gla(
        q, k, v, logsigmoid(g[..., 0].float()), use_qk_l2norm_in_kernel=True
    )


LIGHTNING = "cula_lightning_sm90.prefill.default"
LIGHTNING_BACKWARD = "cula_lightning_sm90.prefill_backward.default"
FORWARD: dict[Callable[..., Any], set[str]] = {
    attend_kda: {"cula_cp_sm90.prefill.default"},
    attend_delta: {"cula_lightning_sm90.gated_prefill.default"},
    attend_lightning: {LIGHTNING},
    attend_gla: {LIGHTNING},
}
TRAINING: dict[Callable[..., Any], set[str]] = {
    attend_kda: FORWARD[attend_kda] | {"cula_cp_sm90.backward.default"},
    attend_delta: FORWARD[attend_delta] | {"cula_lightning_sm90.gated_backward.default"},
    attend_lightning: {LIGHTNING, LIGHTNING_BACKWARD},
    attend_gla: {LIGHTNING, LIGHTNING_BACKWARD},
    partial(attend_delta, impl="reference"): {"cula.chunk_gated_delta_rule.default"},
}


class Layer(nn.Module):
    """Linear attention between two projections: `[B, T, WIDTH]` to the same."""

    def __init__(
        self, attend: Callable[..., Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attend, self.sizes = attend, [H * D, H * D, HV * D, HV * D]
        self.inside = nn.Linear(WIDTH, sum(self.sizes), device=device, dtype=dtype)
        # Inductor pads rows that are no multiple of 16 bytes, and torch 2.11 then expects the first length's strides of
        # views at others: so HV is 8, in a tensor of its own.
        self.strength = nn.Linear(WIDTH, HV, device=device, dtype=dtype)
        self.outside = nn.Linear(HV * D, WIDTH, device=device, dtype=dtype)
        self.A_log = nn.Parameter(torch.linspace(-1, 1, HV, device=device))

    def forward(self, x: Tensor) -> Tensor:
        tokens, beta = self.inside(x).split(self.sizes, -1), self.strength(x)
        # Autocast makes the results of a norm float32.
        q, k, v, g = (layer_norm(t.unflatten(-1, (-1, D)), (D,)) for t in tokens)
        return x + self.outside(self.attend(q, k, v, g, beta, self.A_log)[0].flatten(2))


class Graphs:
    """A backend that counts the graphs that it compiles, and knows the operators of cula in them."""

    def __init__(self, backend: str) -> None:
        self.compile, self.count = lookup_backend(backend), 0
        self.operators: set[str] = set()

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.count += 1
        parts = [x for x in graph.modules() if isinstance(x, torch.fx.GraphModule)]
        targets = {str(node.target) for part in parts for node in part.graph.nodes}
        self.operators |= {x for x in targets if x.startswith("cula")}
        return self.compile(graph, example)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape and got.dtype == want.dtype and got.isfinite().all(), name
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error <= BOUND, f"{name}: relative RMSE {error:.2e}"


def stepped(layer: Layer, run: Callable[..., Tensor], x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of a mean of its squares."""
    layer.zero_grad()
    y = run(x)
    y.float().square().mean().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **gradients}


def check_forward(attend: Callable[..., Any], device: torch.device, backend: str) -> Graphs:
    layer, graphs = Layer(attend, device, torch.bfloat16), Graphs(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for tokens in LENGTHS:
            x = torch.randn(2, tokens, WIDTH, device=device, dtype=torch.bfloat16)
            assert_near({"y": compiled(x)}, {"y": layer(x)})
    assert graphs.count <= 2
    return graphs


def check_training(
    attend: Callable[..., Any], device: torch.device, backend: str, mode: str
) -> Graphs:
    """mode: what stands around the layer, "autocast" or "checkpoint", or nothing."""
    dtype = torch.float32 if mode == "autocast" else torch.bfloat16
    layer, graphs = Layer(attend, device, dtype), Graphs(backend)

    def within(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False) if mode == "checkpoint" else layer(x)

    compiled = torch.compile(within, fullgraph=True, backend=graphs)
    for tokens in LENGTHS:
        x = torch.randn(2, tokens, WIDTH, device=device, dtype=dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast"):
            expected = stepped(layer, layer, x)
            for run in (within, compiled):
                assert_near(stepped(layer, run, x), expected)
    assert {"inside.weight", "outside.bias"} < expected.keys()
    assert graphs.count <= 2
    return graphs


@pytest.mark.parametrize("attend", FORWARD)
def test_the_forward_compiles(cuda: torch.device, attend: Callable[..., Any]) -> None:
    """As one graph around the kernel, for every length but the first."""
    assert check_forward(attend, cuda, "inductor").operators == FORWARD[attend]


@pytest.mark.parametrize("mode", ["plain", "autocast", "checkpoint"])
@pytest.mark.parametrize("attend", TRAINING)
def test_a_step_compiles(cuda: torch.device, attend: Callable[..., Any], mode: str) -> None:
    assert check_training(attend, cuda, "inductor", mode).operators == TRAINING[attend]


class Operators(TorchDispatchMode):
    """Remembers the calls of kernels' operators, with copies of their tensors as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace.startswith("cula_"):
            assert not kwargs
            copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
            self.calls.append((function, copies))
        return function(*args, **(kwargs or {}))


def tokens_of(device: torch.device, batch: int, count: int) -> list[Tensor]:
    """q, k, v, a raw gate per channel and logits of beta."""
    shapes = ((H, D), (H, D), (HV, D), (HV, D), (HV,))
    return [
        torch.randn(batch, count, *shape, device=device, dtype=torch.bfloat16) for shape in shapes
    ]


def call_kernels(device: torch.device) -> None:
    """One call of each kernel's operator, on pools of states where it takes one; row 1 is padding."""
    q, k, v, g, beta = tokens_of(device, 1, 100)
    cu, rows = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 30, 100], [2, -1]))
    pool, decay = torch.randn(3, HV, D, D, device=device), torch.rand(HV, device=device)
    raw = {"A_log": decay, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    packed = {"cu_seqlens": cu, "state_pool": pool}
    kda.chunk_kda(q, k, v, g, beta, **raw, **packed, initial_state_indices=rows)
    lightning.chunk_gated_delta_rule(q, k, v, g[..., 0], beta, **raw, **packed, state_indices=rows)
    lightning.lightning_attn_fwd_varlen(q, k, v, decay, **packed, initial_state_indices=rows)
    q, k, v, g, beta = tokens_of(device, 2, 2)
    lightning.linear_attention_decode(q, k, v, pool, decay, state_indices=rows)
    accepted = torch.tensor([1, 2], dtype=torch.int32, device=device)
    lightning.linear_attention_commit(k, v, pool, decay, accepted, state_indices=rows)
    delta.delta_rule_decode(q, k, v, g, beta, pool, A_log=decay, state_indices=rows)
    kda.fused_recurrent_kda(q, k, v, g, beta, **raw, output_final_state=True)


CALLED = {
    "cula_cp_sm90::prefill", "cula_lightning_sm90::gated_prefill", "cula_lightning_sm90::prefill",
    "cula_lightning_decode::decode", "cula_lightning_decode::commit", "cula_delta_decode::decode",
    "cula_delta_decode::recurrent",
}  # fmt: skip


def test_operators(cuda: torch.device) -> None:
    """What a schema says is written is what a kernel writes, and graphs around it are right."""
    with torch.no_grad(), Operators() as seen:
        call_kernels(cuda)
    assert {function.name() for function, _ in seen.calls} == CALLED
    for function, arguments in seen.calls:
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(function, arguments, test_utils=checks)
