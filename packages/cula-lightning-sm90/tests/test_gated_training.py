"""Training through the public function of the gated delta rule: what autograd gets, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from cula_core.reference.common import normalized
from cula_core.reference.gates import log_decay, write_strength
from cula_lightning_sm90 import _spec, chunk_gated_delta_rule
from cula_lightning_sm90.gated.backward import ops
from cula_lightning_sm90.gated.backward.call import SCHEMA, BackwardCall
from cula_lightning_sm90.gated.backward.ops import prepared

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
DOUBLE = torch.float64
# Heads of q, k and v.
HEADS = {"alike": (2, 2, 2), "shared keys": (1, 1, 2), "shared values": (4, 2, 2)}


def problem(
    heads: tuple[int, int, int] = (1, 1, 2), packed: bool = False, **more: Any
) -> dict[str, Any]:
    """Inputs in fp64, and what the function is told about them."""
    torch.manual_seed(0)
    lengths = (66, 0, 3, 1) if packed else (70, 70)
    batch, tokens = (1, sum(lengths)) if packed else (2, 70)
    most = max(heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DOUBLE)

    q, k, v = (random(batch, tokens, h, d) for h, d in zip(heads, (4, 4, 6)))
    states = (len(lengths), most, 6, 4) if more.get("state_v_first") else (len(lengths), most, 4, 6)
    x: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": random(batch, tokens, most), "beta": random(batch, tokens, most),
        "A_log": random(most), "dt_bias": random(most), "initial_state": random(*states), "scale": 0.3,
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    if packed:
        x["cu_seqlens"] = torch.tensor((0, *lengths)).cumsum(0)
    return x | more


PLAIN = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}
PROBLEMS = {
    **{name: problem(heads) for name, heads in HEADS.items()},
    "packed": problem(packed=True, state_v_first=True, allow_neg_eigval=True),
    "log decays": problem(**PLAIN, g=-torch.rand(2, 70, 2, dtype=DOUBLE), initial_state=None),
    "no decay": problem(**PLAIN, g=None),
    "strengths of one": problem(beta=None, use_beta_sigmoid_in_kernel=False, dt_bias=None),
    "steep softplus": problem(
        softplus_beta=2.0, softplus_threshold=1.0, use_qk_l2norm_in_kernel=False
    ),
}


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor]:
    """Token by token, with what autograd follows."""
    heads, cu_seqlens = max(q.shape[2], v.shape[2]), more.get("cu_seqlens")
    if more.get("use_qk_l2norm_in_kernel"):
        q, k = normalized(q), normalized(k)
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).flatten(0, 1) for x in (q, k, v))
    like = q.new_zeros(q.shape[:2])
    decay = like if g is None else g
    if more["use_gate_in_kernel"]:
        softplus = (more.get("softplus_beta", 1.0), more.get("softplus_threshold", 20.0))
        decay = log_decay(decay[..., None], more["A_log"], more["dt_bias"], softplus=softplus)
    strength = like + 1 if beta is None else beta
    if more["use_beta_sigmoid_in_kernel"]:
        strength = write_strength(strength, more.get("allow_neg_eigval", False))
    decay, strength = decay.reshape(like.shape).exp(), strength.reshape(like.shape)
    bounds = range(0, q.shape[0] + 1, 70) if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        given = more["initial_state"]
        state = like.new_zeros(heads, k.shape[2], v.shape[2]) if given is None else given[n]
        if given is not None and more.get("state_v_first"):
            state = state.mT
        for t in range(start, stop):
            state = decay[t, :, None, None] * state
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + k[t][..., None] * (strength[t, :, None] * error)[:, None]
            outputs.append(more["scale"] * torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state.mT if more.get("state_v_first") else state)
    batch = 1 if cu_seqlens is not None else q.shape[0] // 70
    return torch.stack(outputs).unflatten(0, (batch, -1)), torch.stack(states)


def leaves_of(x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x[name].detach().requires_grad_() for name in LEAVES if x[name] is not None}


def weighed(*results: Tensor) -> Tensor:
    """A loss in which every number counts differently."""
    return sum(
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in results
    )


def grads(x: dict[str, Any], run: Any) -> dict[str, Tensor]:
    leaves = leaves_of(x)
    found = torch.autograd.grad(
        weighed(*run(**x | leaves)), list(leaves.values()), allow_unused=True
    )
    return {
        name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(leaves.items(), found)
    }


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_the_reference(name):
    """Of every input, from both results, against autograd of the recurrence."""
    x = PROBLEMS[name]
    found = grads(x, lambda **a: chunk_gated_delta_rule(**a, output_final_state=True))
    exact = grads(x, recurrence)
    for which, right in exact.items():
        assert torch.allclose(found[which], right, rtol=1e-8, atol=1e-8), which


@pytest.mark.parametrize("result", [0, 1])
def test_one_result_alone(result):
    x = PROBLEMS["packed"]
    found = grads(
        x, lambda **a: chunk_gated_delta_rule(**a, output_final_state=True)[result : result + 1]
    )
    exact = grads(x, lambda **a: recurrence(**a)[result : result + 1])
    for which, right in exact.items():
        assert torch.allclose(found[which], right, rtol=1e-8, atol=1e-8), which


def test_no_token():
    x = problem()
    x |= {name: x[name][:, :0] for name in ("q", "k", "v", "g", "beta")}
    found = grads(x, lambda **a: chunk_gated_delta_rule(**a, output_final_state=True)[1:])
    exact = torch.linspace(-1, 2, 96, dtype=DOUBLE).view(2, 2, 4, 6)
    assert torch.allclose(found["initial_state"], exact) and not found["A_log"].any()


def test_under_a_checkpoint_of_activations():
    x = PROBLEMS["shared keys"]
    exact = grads(x, lambda **a: chunk_gated_delta_rule(**a)[:1])
    found = grads(
        x, lambda **a: checkpoint(lambda: chunk_gated_delta_rule(**a), use_reentrant=False)[:1]
    )
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_compiled():
    """In one graph, with the same bits."""
    x = PROBLEMS["shared keys"]
    run = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend=aot_eager)
    found = grads(x, lambda **a: run(**a)[:1])
    exact = grads(x, lambda **a: chunk_gated_delta_rule(**a)[:1])
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_no_gradient_of_a_gradient():
    leaves = leaves_of(problem())
    o, _ = chunk_gated_delta_rule(**problem() | leaves)
    (dq,) = torch.autograd.grad(o.square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="derivative of a gradient"):
        dq.sum().backward()


@pytest.mark.parametrize(
    "more, says",
    [
        ({"out": torch.zeros(2, 70, 2, 6, dtype=DOUBLE)}, "out"),
        (
            {"state_pool": torch.zeros(2, 2, 4, 6, dtype=DOUBLE), "initial_state": None},
            "state_pool",
        ),
        ({"has_initial_state": torch.tensor([True, False])}, "has_initial_state"),
        (
            {
                "beta": torch.full((2, 70, 2), -0.1, dtype=DOUBLE),
                "use_beta_sigmoid_in_kernel": False,
            },
            "beta",
        ),
    ],
    ids=["out", "pool", "fresh", "negative strengths"],
)
def test_refusals(more, says):
    x = problem(**more)
    with pytest.raises(ValueError, match=says):
        chunk_gated_delta_rule(**x | {"q": x["q"].requires_grad_()})


def test_what_a_dispatcher_is_told():
    facts = {
        "function": "chunk_gated_delta_rule",
        "requires_grad": True,
        "gate_requires_grad": True,
    }
    assert _spec.supports(**facts) is None
    assert _spec.supports(**facts, state_pool=True) == "no backward with state_pool"
    assert _spec.supports(**facts, checkpoints=True) == "no backward with checkpoints"


def test_the_schema_is_the_call():
    schema = torch.ops.cula_lightning_sm90.gated_backward.default._schema
    assert [a.name for a in schema.arguments] == list(inspect.signature(BackwardCall).parameters)
    assert SCHEMA.count("->") == 1 and len(schema.returns) == 6


def test_the_backward_is_told_where_to_cut(monkeypatch):
    """As the forward is, and how long packed sequences are."""
    calls = []

    def backward(call):
        calls.append(call)
        return ops._run_on_cpu(call)

    monkeypatch.setattr(ops, "_backward", backward)
    x = problem(packed=True)
    x["cu_seqlens_cpu"] = x["cu_seqlens"]
    for options in ({}, {"use_intracard_cp": False}, {"segment_tokens": 1024}):
        chunk_gated_delta_rule(**x | {"v": x["v"].requires_grad_()}, **options)[0].sum().backward()
    told = [(call.intracard_cp, call.segment_tokens) for call in calls]
    assert told == [("auto", 0), ("off", 0), ("auto", 1024)]
    assert all(torch.equal(call.cu_seqlens_cpu, x["cu_seqlens"]) for call in calls)


def test_tensors_as_kernels_read_them():
    """Unaligned views are copied, decays of 64 bits and states of 16 converted; what fits is passed on."""
    tokens = torch.zeros(1, 5, 1, 130, dtype=torch.bfloat16)
    numbers = torch.zeros(1, 5, 1, dtype=DOUBLE)
    states = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16)
    dense = torch.zeros(1, 5, 1, 128, dtype=torch.bfloat16)
    call = BackwardCall(
        tokens[..., 1:129], dense, dense, numbers, numbers.float(), states, None, dense.transpose(1, 3).transpose(1, 3),
        None, 1.0, False, False, False, False, "float16",
    )  # fmt: skip
    ready = prepared(call)
    assert ready.q.data_ptr() % 16 == 0 and ready.q.stride(3) == 1 and ready.k is dense
    assert ready.g.dtype == torch.float32 and ready.initial_state.dtype == torch.float32
