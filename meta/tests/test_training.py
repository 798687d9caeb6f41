"""What training does around a call: torch.compile, checkpointing, autocast, accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tiny_model import batch, gradients, loss, model
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
    """Sizes are dynamic from the second shape on, or from the first if asked; no further shape makes a graph."""
    graphs, asked = Graphs(), layer is not attend_kda
    oracle, dtype = (layer, torch.float32) if asked else (recurrence, torch.float64)

    def step(run: Callable[..., Any], q: Tensor, **rest: Tensor) -> Any:
        return run(q.tanh(), **rest)

    compiled = torch.compile(step, fullgraph=True, backend=graphs, dynamic=asked or None)
    counts = []
    for sequences, tokens in ((3, 33), (5, 66), (7, 40))[asked:]:
        x = inputs(sequences, tokens, dtype)
        found = derivatives(partial(compiled, layer), x)
        for got, want in zip(found, derivatives(partial(step, oracle), x), strict=True):
            torch.testing.assert_close(got, want)
        counts.append(graphs.count)
    assert counts[1:] == counts[:1] if asked else counts == [1, 2, 2]


def all_arguments(function: str, x: dict[str, Tensor]) -> tuple[Any, ...]:
    """Arguments of `cula::<function>` in the order of its schema."""
    heads = torch.rand(HV)
    given = {
        **x, "q": x["q"], "decay": heads, "g_gamma": -heads, "A_log": heads, "dt_bias": torch.rand(HV, K),
        "lower_bound": -5.0, "scale": 0.3, "output_final_state": True, "use_qk_l2norm_in_kernel": True,
        "softplus_beta": 1.0, "softplus_threshold": 20.0, "cu_seqlens": CU,
        "initial_state": torch.randn(len(CU) - 1, HV, K, V).bfloat16(), "block_m": 4, "block_n": 2,
        "threshold": -1.0, "threshold_mode": "max", "direction": torch.tensor([-1], dtype=torch.int32),
    }  # fmt: skip
    schema = getattr(torch.ops.cula, _opaque.defined(function)).default._schema
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    if function == "lightning_attn_fwd":
        given["initial_state"] = given["initial_state"][:1]
    elif function != "chunk_kda":
        del given["dt_bias"], given["lower_bound"], given["A_log"]
    if "g" in kinds and function not in ("chunk_kda", "fused_recurrent_kda"):
        given["g"] = x["g"][..., 0]
    if function == "lite_attention":
        given["q"] = x["q"].repeat_interleave(HV // H, dim=2)
        given["v"] = x["v"][:, :, :H]
    gates = {"use_gate_in_kernel": function == "chunk_kda"}
    return tuple(
        given.get(name, gates.get(name, False if kind == "bool" else None))
        for name, kind in kinds.items()
    )


@pytest.mark.parametrize("function", _opaque.FUNCTIONS)
def test_operators(function: str) -> None:
    _opaque.defined(function)
    given = all_arguments(function, inputs(1, int(CU[-1]), torch.bfloat16))
    given = tuple(
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given
    )
    operator = getattr(torch.ops.cula, function).default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        operator, given, test_utils=checks
    )  # graphs of every length are compiled above
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in given]
    with torch.no_grad():
        results = operator(*given)
    grads = [x if x.is_floating_point() else None for x in results]
    backward = getattr(torch.ops.cula, f"{function}_backward").default
    torch.library.opcheck(backward, (grads, wanted, *given), test_utils=checks)
    with pytest.raises(RuntimeError, match="the derivative of a gradient is not implemented"):
        sum(x.sum() for x in backward(grads, wanted, *given)).backward()


def test_what_is_written_is_traced() -> None:
    """`out` and a pool are the caller's memory, which an operator without such arguments could not write."""
    tokens = [inputs(1, 7)[name] for name in "qkv"]
    pools = torch.randn(4, HV, K, V).repeat(2, 1, 1, 1, 1)
    outs = torch.full((2, 1, 7, HV, V), float("nan"))
    before, rows = pools[0].clone(), torch.tensor([2], dtype=torch.int32)
    packed = torch.tensor([0, 7])

    def run(pool: Tensor, out: Tensor) -> Any:
        return lightning.lightning_attn_fwd_varlen(
            *tokens, torch.ones(HV), packed, state_pool=pool, initial_state_indices=rows, out=out
        )

    expected = run(pools[0], outs[0])
    found = torch.compile(run, fullgraph=True, backend="eager")(pools[1], outs[1])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((pools[1], outs[1]), (pools[0], outs[0]))
    assert torch.equal(pools[1][[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.equal(pools[1][2], before[2])


def trained(run: Any, net: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    value = loss(run, x)
    value.backward()
    return {"loss": value.detach(), **{name: g.clone() for name, g in gradients(net).items()}}


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(compiled: bool) -> None:
    net, x = model(1), batch(2, 9)
    calls = []

    def run(x: Tensor) -> Tensor:
        for layer in net:
            if not compiled:
                layer.register_forward_pre_hook(lambda *_: calls.append(1))
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    expected = trained(net, net, x)
    step = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    torch.testing.assert_close(trained(step, net, x), expected)
    assert compiled or len(calls) == 2 * len(net)  # once more in the backward


def test_accumulation() -> None:
    net, x = model(), batch(4, 9)
    expected = trained(net, net, x)
    net.zero_grad()
    for part in x.split([2, 2]):
        (loss(net, part) / 2).backward()
    found = gradients(net)
    assert len(found) == len(expected) - 1
    torch.testing.assert_close(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("layer", LAYERS)
def test_autocast(layer: Callable[..., Any]) -> None:
    """float32 tokens become bfloat16; sums, gates and states stay as they are, bit for bit."""
    x = inputs(2, 19)
    cast = {name: t.bfloat16() if name in "qkv" else t for name, t in x.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found, of_cast, double = layer(**x), layer(**cast), layer(**inputs(2, 19, torch.float64))
    expected = layer(**cast)
    assert found[0].dtype == torch.bfloat16 and double[0].dtype == torch.float64
    if layer is not attend_lite:
        assert found[1].dtype == torch.float32
    for got, same, want in zip(found, of_cast, expected, strict=True):
        assert torch.equal(got, want) and torch.equal(same, want)


@pytest.mark.parametrize("compiled", [False, True])
def test_training_in_autocast(compiled: bool) -> None:
    net, x = model(1), batch(2, 9)
    exact = trained(net, net, x)
    step = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(x)

    for name, got in trained(run, net, x).items():
        assert got.dtype == torch.float32
        error = (got - exact[name]).norm() / exact[name].norm()
        assert 0 < error < 3e-2, (name, error)


def test_autocast_of_one_argument_that_is_no_tensor() -> None:
    q = torch.randn(1, 3, H, K)
    with torch.autocast("cpu"), pytest.raises(TypeError, match="^k: "):
        kda.chunk_kda(q, None, q, q, q[..., 0])
