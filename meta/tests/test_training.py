"""What training does around a call: torch.compile, checkpointing, autocast, accumulation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_model import DIM, HEADS, batch, gradients, loss, model
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from cula import _opaque, kda, lightning, lite

H, HV, K, V = 2, 4, 8, 6
CU = torch.tensor([0, 3, 3, 7])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.count += 1
        return aot_eager(graph, example)


def inputs(sequences: int, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shape = (sequences, tokens)
    x = {
        "q": torch.randn(*shape, H, K),
        "k": torch.nn.functional.normalize(torch.randn(*shape, H, K), dim=-1),
        "v": torch.randn(*shape, HV, V),
        "g": -torch.rand(*shape, HV, K),
        "beta": torch.rand(*shape, HV),
        "state": torch.randn(sequences, HV, K, V),
    }
    return {name: value.to(dtype) for name, value in x.items()}


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
    """KDA token by token."""
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        wrong = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], wrong)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * K**-0.5)
    return torch.stack(outputs, dim=1), state


def derivatives(function: Callable[..., Any], x: dict[str, Tensor]) -> list[Tensor]:
    """Results and the gradient of every input, of a loss that weighs all results."""
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    results = [y for y in function(**leaves) if y is not None and y.is_floating_point()]
    value = sum((y.sin() * (1 + i)).sum() for i, y in enumerate(results))
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return [*results, *(x for x in found if x is not None)]


def attend_kda(q, k, v, g, beta, state):
    return kda.chunk_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)


def attend_kda_recurrent(q, k, v, g, beta, state):
    return kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)


def attend_delta(q, k, v, g, beta, state):
    return lightning.chunk_gated_delta_rule(
        q, k, v, g[..., 0], beta, initial_state=state, output_final_state=True
    )


def attend_gla(q, k, v, g, beta, state):
    return lightning.chunk_simple_gla(
        q, k, v, g[..., 0], -beta.mean((0, 1)), initial_state=state, output_final_state=True
    )


def attend_lightning(q, k, v, g, beta, state):
    return lightning.lightning_attn_fwd(
        q, k, v, beta.float().mean((0, 1)), initial_state=state, output_final_state=True
    )


def attend_lite(q, k, v, g, beta, state):
    q = q.repeat_interleave(HV // H, dim=2)
    return lite.lite_attention(q, k, v[:, :, ::2], threshold=-3.0, block_m=16, block_n=16)


LAYERS = [attend_kda, attend_kda_recurrent, attend_delta, attend_gla, attend_lightning, attend_lite]


@pytest.mark.parametrize("layer", LAYERS)
def test_one_graph_for_every_length(layer: Callable[..., Any]) -> None:
    """The second shape makes sizes dynamic, the third finds the graph of the second."""
    graphs = Graphs()

    def step(q: Tensor, **rest: Tensor) -> Any:
        return layer(q.tanh(), **rest)

    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for sequences, tokens in ((2, 5), (3, 66), (4, 9)):
        x = inputs(sequences, tokens)
        for got, want in zip(derivatives(compiled, x), derivatives(step, x), strict=True):
            torch.testing.assert_close(got, want)
    assert graphs.count == 2


def test_compiled_against_the_recurrence() -> None:
    x = inputs(2, 67, torch.float64)
    found = derivatives(torch.compile(attend_kda, fullgraph=True, backend="aot_eager"), x)
    for got, want in zip(found, derivatives(recurrence, x), strict=True):
        torch.testing.assert_close(got, want)
